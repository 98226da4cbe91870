"""The replicas of a configuration, together on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.cluster.fleet import Decided
from onbeat.scheduler.cluster.routers import make_router
from onbeat.simulator.client import Clients
from onbeat.simulator.config import ReplicaKind, SimulationConfig
from onbeat.simulator.fleet import VirtualFleet, wants_reports
from onbeat.simulator.fleet_loop import Desk, FleetLoop, OnlyReplica
from onbeat.simulator.observer import Collector, SimulationObserver
from onbeat.simulator.pipeline import PipelineReplica
from onbeat.simulator.replica import SerialReplica, VirtualReplica
from onbeat.simulator.result import FleetSize, ReplicaCounters
from onbeat.workload.offered import OfferedLoad


class FleetOutcome(NamedTuple):
    """What replicas did in a run."""

    counters: list[ReplicaCounters]
    is_complete: bool
    """Whether the run came to its end (Ctrl-C)."""
    decisions: dict[str, int]
    """See `SimulationResult.decisions`; so are the next."""
    replica_seconds: float | None = None
    sizes: Sequence[FleetSize] = ()


def make_replica(
    index: int,
    config: SimulationConfig,
    step_time: StepTimeModel,
    *,
    observer: SimulationObserver | None = None,
    is_alone: bool = False,
    is_watched: bool = False,
) -> VirtualReplica:
    """Return replica `index`, with or without pipeline stages.

    Parameters
    ----------
    is_alone, is_watched : see `SerialReplica`.
    """
    if config.pipeline > 1:
        return PipelineReplica(str(index), config, step_time, observer=observer)
    return SerialReplica(
        str(index), config, step_time, observer=observer, is_alone=is_alone, is_watched=is_watched
    )


def run_together(
    load: OfferedLoad,
    config: SimulationConfig,
    step_time: StepTimeModel,
    collector: Collector,
    observer: SimulationObserver | None,
    on_decision: Decided | None = None,
) -> FleetOutcome:
    """Run all replicas on one clock.

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
        return FleetOutcome([replica.counters()], is_complete, {})
    router = make_router(config.router, 0, seed=config.seed)
    is_watched = wants_reports(config, router)

    def make(index: int, kind: ReplicaKind) -> VirtualReplica:
        own = _of(config, kind)
        return make_replica(index, own, kind.step_time, observer=observer, is_watched=is_watched)

    loop = FleetLoop(clients, collector)
    fleet = VirtualFleet(loop, config, _kinds(config, step_time), router, make, on_decision=on_decision)
    is_complete = _run(loop, fleet, collector)
    if is_complete:
        fleet.end()
    return FleetOutcome(
        fleet.lives.counters(), is_complete, dict(fleet.decisions), fleet.lives.seconds, fleet.sizes
    )


def run_alone(clients: Clients, replica: VirtualReplica, collector: Collector) -> bool:
    """Run requests through one replica that nothing happens to; return whether the run came to its end."""
    loop = FleetLoop(clients, collector)
    return _run(loop, OnlyReplica(loop, replica), collector)


def _run(loop: FleetLoop, desk: Desk, collector: Collector) -> bool:
    try:
        loop.run(desk)
        collector.report()
    except KeyboardInterrupt:
        return False
    return True


def _kinds(config: SimulationConfig, step_time: StepTimeModel) -> Sequence[ReplicaKind]:
    """Return what the replicas are, the first first; further ones are like the last."""
    stages = replace(config.scheduler, num_micro_batches=config.pipeline)
    return config.kinds or (ReplicaKind(scheduler=stages, step_time=step_time),)


def _of(config: SimulationConfig, kind: ReplicaKind) -> SimulationConfig:
    """Return the configuration of one replica of a fleet."""
    fleet = replace(config.fleet, router=config.router)
    stages = kind.scheduler.num_micro_batches
    return replace(config, kinds=(), fleet=fleet, scheduler=kind.scheduler, pipeline=stages)
