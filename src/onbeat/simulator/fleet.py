"""The replicas of a configuration, together on one clock."""

from __future__ import annotations

from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.cluster.routers import Router
from onbeat.simulator.client import Clients
from onbeat.simulator.collector import Collector
from onbeat.simulator.config import SimulationConfig
from onbeat.simulator.dispatch import Dispatcher, WorkEstimate
from onbeat.simulator.loop import EventLoop
from onbeat.simulator.observer import SimulationObserver
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
    """Run all replicas on one clock; return what they did, and whether they came to the end."""
    is_alone = config.num_replicas == 1
    replicas = [
        make_replica(index, config, step_time, observer=observer, is_alone=is_alone)
        for index in range(config.num_replicas)
    ]
    clients = Clients(load, config)
    work = None
    if router.weighs_work:
        work = WorkEstimate(step_time, mean_output_tokens=float(load.num_output_tokens.mean()))
    dispatcher = Dispatcher(None if is_alone else router, work)
    is_complete = True
    try:
        EventLoop(clients, replicas, dispatcher, collector).run()
        collector.report()
    except KeyboardInterrupt:
        is_complete = False
    return [replica.counters() for replica in replicas], is_complete
