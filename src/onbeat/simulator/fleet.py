"""The replicas of a configuration, together on one clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from onbeat.core.errors import ConfigError
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.cluster.fleet import Decided
from onbeat.scheduler.cluster.routers import make_router
from onbeat.scheduler.cluster.routing import Router
from onbeat.scheduler.cluster.work import WorkEstimate
from onbeat.simulator.client import Clients
from onbeat.simulator.config import MemberChange, ReplicaKind, SimulationConfig
from onbeat.simulator.dispatch import Dispatcher
from onbeat.simulator.fleet_loop import Deciders, FleetLoop, wants_reports
from onbeat.simulator.loop import EventLoop
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
    on_decision : of a fleet, is told of each event, its time and the actions.

    Raises
    ------
    ConfigError : a request that no replica can ever run.
    """
    if config.has_fleet or on_decision is not None:
        return _run_fleet(_fleet(load, config, step_time, collector, observer, on_decision), collector)
    router = make_router(config.router, config.num_replicas, seed=config.seed)
    replicas, loop = _mixed(load, config, step_time, router, collector, observer)
    is_complete = _run(loop, collector)
    return FleetOutcome([each.counters() for each in replicas], is_complete, {})


def _run(loop: EventLoop | FleetLoop, collector: Collector) -> bool:
    """Run to the end; return whether it came (Ctrl-C)."""
    try:
        loop.run()
        collector.report()
    except KeyboardInterrupt:
        return False
    return True


def _run_fleet(loop: FleetLoop, collector: Collector) -> FleetOutcome:
    is_complete = _run(loop, collector)
    return FleetOutcome(
        loop.all_counters(), is_complete, dict(loop.decisions), loop.replica_seconds, loop.sizes
    )


def _fleet(
    load: OfferedLoad,
    config: SimulationConfig,
    step_time: StepTimeModel,
    collector: Collector,
    observer: SimulationObserver | None,
    on_decision: Decided | None,
) -> FleetLoop:
    def make(index: int, kind: ReplicaKind) -> VirtualReplica:
        stages = kind.scheduler.num_micro_batches if config.kinds else config.pipeline
        own = replace(plain, scheduler=kind.scheduler, pipeline=stages)
        is_watched = wants_reports(config, router)
        return make_replica(index, own, kind.step_time, observer=observer, is_watched=is_watched)

    plain = replace(
        config,
        kinds=(),
        fleet_changes=(),
        autoscale=None,
        num_prefill=0,
        num_replicas=1,
    )
    router = make_router(config.router, 0, seed=config.seed)
    deciders = Deciders(router, _work_estimate(load, router, step_time), on_decision)
    return FleetLoop(Clients(load, config), config, step_time, deciders, collector, make)


def _work_estimate(load: OfferedLoad, router: Router, step_time: StepTimeModel) -> WorkEstimate | None:
    """Return what predicts work for a router; None where it does not look at it."""
    if not router.weighs_work:
        return None
    return WorkEstimate(step_time, mean_output_tokens=float(load.num_output_tokens.mean()))


def _mixed(
    load: OfferedLoad,
    config: SimulationConfig,
    step_time: StepTimeModel,
    router: Router,
    collector: Collector,
    observer: SimulationObserver | None,
) -> tuple[Sequence[VirtualReplica], EventLoop]:
    is_alone = config.num_replicas == 1
    replicas = [
        make_replica(index, config, step_time, observer=observer, is_alone=is_alone)
        for index in range(config.num_replicas)
    ]
    work = _work_estimate(load, router, step_time)
    dispatcher = Dispatcher(None if is_alone else router, work)
    changes = _changes(config, router)
    return replicas, EventLoop(Clients(load, config), replicas, dispatcher, collector, changes=changes)


def _changes(config: SimulationConfig, router: Router) -> list[tuple[float, Callable[[], None]]]:
    """Let replicas wait that join later; return when each joins or leaves, and what to call then."""
    changes = sorted(config.member_changes)
    first = {change.replica: change for change in reversed(changes)}
    late = {change.replica for change in first.values() if change.joins}
    _check_one_stays(set(range(config.num_replicas)) - late, changes)
    for replica in late:
        router.leave(replica)
    return [
        (when, partial(router.join if joins else router.leave, replica)) for when, replica, joins in changes
    ]


def _check_one_stays(members: set[int], changes: Sequence[MemberChange]) -> None:
    """Raise ConfigError where the last member is to leave."""
    for _, replica, joins in changes:
        members = members | {replica} if joins else members - {replica}
        if not members:
            raise ConfigError(
                f"replica {replica} cannot leave: no other takes requests; let another one join before"
            )
