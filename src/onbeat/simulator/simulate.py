"""Run a load through virtual replicas."""

from __future__ import annotations

import time

from onbeat.core.step_time import StepTimeModel
from onbeat.metrics.record import RequestRecord
from onbeat.scheduler.cluster.fleet import Decided
from onbeat.simulator.deliveries import Collector
from onbeat.simulator.fleet_loop import FleetLoop, OnlyReplica
from onbeat.simulator.replica import make_replica
from onbeat.simulator.result import OnRequests, SimulationObserver, SimulationResult
from onbeat.simulator.simulation_config import ReplicaKind, SimulationConfig
from onbeat.simulator.virtual_clients import Clients
from onbeat.simulator.virtual_fleet import VirtualFleet
from onbeat.simulator.virtual_replica import Around
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
    on_decision : is told of each event of the fleet, its time and the actions; then there is one to tell of,
        even of one replica.

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
    loop = FleetLoop(Clients(load, config), collector)
    fleet: VirtualFleet | None = None
    kinds = config.kinds or (ReplicaKind(scheduler=config.scheduler, step_time=step_time),)
    if config.is_alone and on_decision is None:
        replica = make_replica(0, config, kinds[0], Around(observer, is_alone=True))
        is_complete = loop.run(OnlyReplica(loop, replica))
        replicas = [replica.counters()]
    else:
        fleet = VirtualFleet(loop, config, kinds, observer, on_decision=on_decision)
        is_complete = loop.run(fleet)
        replicas = fleet.counters(is_complete=is_complete)
    collector.report()
    return SimulationResult(
        records=[record for record in kept if record is not None],
        num_requests=len(load),
        duration=collector.virtual_time,
        wall_seconds=time.perf_counter() - started,
        is_complete=is_complete,
        replicas=replicas,
        decisions={} if fleet is None else dict(fleet.decisions),
        replica_seconds=None if fleet is None else fleet.seconds,
        sizes=() if fleet is None else fleet.sizes,
        jobs=load.jobs,
    )
