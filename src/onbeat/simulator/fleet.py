"""The replicas of a configuration, together on one clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.cluster.disaggregation import PoolRouter
from onbeat.scheduler.cluster.routers import Router
from onbeat.scheduler.cluster.work import WorkEstimate
from onbeat.scheduler.config import SchedulerConfig
from onbeat.simulator.client import Clients
from onbeat.simulator.config import DisaggregationConfig, SimulationConfig
from onbeat.simulator.dispatch import Dispatcher, PoolDispatcher
from onbeat.simulator.loop import EventLoop
from onbeat.simulator.observer import Collector, SimulationObserver
from onbeat.simulator.pipeline import PipelineReplica
from onbeat.simulator.replica import SerialReplica, VirtualReplica
from onbeat.simulator.result import ReplicaCounters
from onbeat.workload.offered import OfferedLoad


def make_replica(
    index: int,
    config: SimulationConfig,
    step_time: StepTimeModel,
    *,
    observer: SimulationObserver | None = None,
    is_alone: bool = False,
) -> VirtualReplica:
    """Return replica `index`, with or without pipeline stages.

    Parameters
    ----------
    is_alone : whether every request comes to this replica.
    """
    if config.pipeline > 1:
        return PipelineReplica(str(index), config, step_time, observer=observer)
    return SerialReplica(str(index), config, step_time, observer=observer, is_alone=is_alone)


def run_together(
    load: OfferedLoad,
    config: SimulationConfig,
    step_time: StepTimeModel,
    router: Router,
    collector: Collector,
    observer: SimulationObserver | None,
) -> tuple[list[ReplicaCounters], bool]:
    """Run all replicas on one clock.

    Parameters
    ----------
    config : with `disaggregation`, whose schedulers, counts and step times take the place of the others.
    collector : takes the records, one a request.
    observer : hears of steps; of pools, prefill replicas are numbered first, then decode replicas.

    Returns
    -------
    What each replica did, and whether the run came to its end (Ctrl-C).

    Raises
    ------
    ConfigError : a request that is longer than a pool takes, or that no replica can ever run.
    """
    if config.disaggregation is None:
        replicas, loop = _mixed(load, config, step_time, router, collector, observer)
    else:
        replicas, loop = _pools(load, config, config.disaggregation, collector, observer)
    is_complete = True
    try:
        loop.run()
        collector.report()
    except KeyboardInterrupt:
        is_complete = False
    return [each.counters() for each in replicas], is_complete


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
    work = None
    if router.weighs_work:
        work = WorkEstimate(step_time, mean_output_tokens=float(load.num_output_tokens.mean()))
    dispatcher = Dispatcher(None if is_alone else router, work)
    changes = _changes(config, router)
    return replicas, EventLoop(Clients(load, config), replicas, dispatcher, collector, changes=changes)


def _pools(
    load: OfferedLoad,
    config: SimulationConfig,
    pools: DisaggregationConfig,
    collector: Collector,
    observer: SimulationObserver | None,
) -> tuple[Sequence[VirtualReplica], EventLoop]:
    load.check_lengths(pools.max_model_len, overlong="error")

    def with_limits(scheduler: SchedulerConfig) -> SimulationConfig:
        stages = scheduler.num_micro_batches
        return replace(config, scheduler=scheduler, pipeline=stages, disaggregation=None, member_changes=())

    replicas: list[VirtualReplica] = []
    for pool, scheduler in ((pools.prefill, pools.prefill.scheduler), (pools.decode, pools.decode_scheduler)):
        for _ in range(pool.num_replicas):
            replicas.append(
                make_replica(len(replicas), with_limits(scheduler), pool.step_time, observer=observer)
            )
    clients = Clients(load, with_limits(pools.prefill.scheduler))
    router = PoolRouter(pools.prefill.num_replicas, pools.decode.num_replicas)
    loop = EventLoop(
        clients,
        replicas,
        PoolDispatcher(router),
        collector,
        transfer=pools.transfer,
        changes=_changes(config, router),
    )
    return replicas, loop


def _changes(config: SimulationConfig, router: Router | PoolRouter) -> list[tuple[float, Callable[[], None]]]:
    """Let replicas wait that join later; return when each joins or leaves, and what to call then."""
    changes = sorted(config.member_changes)
    first = {change.replica: change for change in reversed(changes)}
    for change in first.values():
        if change.joins:
            router.leave(change.replica)
    return [
        (when, partial(router.join if joins else router.leave, replica)) for when, replica, joins in changes
    ]
