"""Run a load through virtual replicas."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from onbeat.core.step_time import StepTimeModel
from onbeat.metrics.record import RequestRecord
from onbeat.scheduler.cluster.fleet import Decided
from onbeat.scheduler.cluster.routers import make_router
from onbeat.simulator.deliveries import Collector
from onbeat.simulator.fleet_loop import FleetLoop, run_alone
from onbeat.simulator.observer import OnRequests, SimulationObserver
from onbeat.simulator.replica import make_replica
from onbeat.simulator.result import ReplicaCounters, SimulationResult
from onbeat.simulator.simulation_config import ReplicaKind, SimulationConfig
from onbeat.simulator.virtual_clients import Clients
from onbeat.simulator.virtual_fleet import VirtualFleet, wants_all_reports
from onbeat.simulator.virtual_replica import VirtualReplica
from onbeat.workload.offered import OfferedLoad


def simulate(
    load: OfferedLoad,
    config: SimulationConfig,
    step_time: StepTimeModel,
    *,
    on_progress: OnRequests | None = None,
    observer: SimulationObserver | None = None,
    on_decision: Decided | None = None,
) -> SimulationResult:
    """Run a load through virtual replicas.

    The scheduler is the live one under a virtual clock; the step-time model stands in for the device. The
    same arguments give the same records.

    Parameters
    ----------
    load : who asks for what, and when; every request generates exactly the output tokens that the load says.
    config : the replicas, and the router in front of them.
    step_time : predicts each step of a replica; kinds of replicas bring their own.
    on_progress : hears (requests ended, requests offered, virtual seconds) at most ten times a second.
    observer : hears of each step and request.
    on_decision : is told of each event of the fleet, its time and the actions, if not None.

    Returns
    -------
    The records of all requests; of those that had ended, where Ctrl-C interrupted the run.

    Raises
    ------
    ConfigError : a request that does not fit, a load without arrivals or limit on concurrency, a prediction
        that is not a time above 0.
    """
    load.check_lengths(config.max_model_len, overlong="error")
    started = time.perf_counter()
    kept: list[RequestRecord | None] = [None] * len(load)
    collector = Collector(kept.__setitem__, len(load), on_progress=on_progress, observer=observer)
    is_complete, replicas, fleet = run_replicas(load, config, step_time, collector, observer, on_decision)
    collector.report()
    records = [record for record in kept if record is not None]
    return SimulationResult(
        records=records,
        num_requests=len(load),
        duration=collector.virtual_time,
        wall_seconds=time.perf_counter() - started,
        is_complete=is_complete,
        replicas=replicas,
        decisions={} if fleet is None else dict(fleet.decisions),
        replica_seconds=None if fleet is None else fleet.seconds,
        sizes=() if fleet is None else fleet.sizes,
    )


def run_replicas(
    load: OfferedLoad,
    config: SimulationConfig,
    step_time: StepTimeModel,
    collector: Collector,
    observer: SimulationObserver | None,
    on_decision: Decided | None = None,
) -> tuple[bool, list[ReplicaCounters], VirtualFleet | None]:
    """Run all replicas on one clock; return whether the run came to its end, what each did, and their fleet.

    Parameters
    ----------
    collector : takes the records, one a request.
    observer : hears of steps.
    on_decision : is told of each event of the fleet, its time and the actions; then there is one to tell of,
        even of one replica.

    Raises
    ------
    ConfigError : a request that no replica can ever run.
    """
    clients = Clients(load, config)
    if config.is_alone and on_decision is None:
        kind = _kinds(config, step_time)[0]
        replica = make_replica(0, _of(config, kind), kind.step_time, observer=observer, is_alone=True)
        is_complete = run_alone(clients, replica, collector)
        return is_complete, [replica.counters()], None
    router = make_router(config.router)
    is_watched = wants_all_reports(config, router)

    def make(index: int, kind: ReplicaKind) -> VirtualReplica:
        own = _of(config, kind)
        return make_replica(index, own, kind.step_time, observer=observer, is_watched=is_watched)

    loop = FleetLoop(clients, collector)
    fleet = VirtualFleet(loop, config, _kinds(config, step_time), router, make, on_decision=on_decision)
    if is_complete := loop.run(fleet):
        fleet.end()
    return is_complete, fleet.counters(), fleet


def _kinds(config: SimulationConfig, step_time: StepTimeModel) -> Sequence[ReplicaKind]:
    """Return what the replicas are, the first first; further ones are like the last."""
    return config.kinds or (ReplicaKind(scheduler=config.scheduler, step_time=step_time),)


def _of(config: SimulationConfig, kind: ReplicaKind) -> SimulationConfig:
    """Return the configuration of one replica of a fleet."""
    if not config.kinds:
        return config
    fleet = replace(config.fleet, router=config.router)
    return replace(config, kinds=(), fleet=fleet, scheduler=kind.scheduler)
