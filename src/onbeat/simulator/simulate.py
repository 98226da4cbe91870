"""Run a load through virtual replicas."""

from __future__ import annotations

import time

from onbeat.core.errors import ConfigError
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.cluster.routers import Router, make_router
from onbeat.simulator.client import Clients
from onbeat.simulator.collector import Collector, ProgressMeter
from onbeat.simulator.config import SimulationConfig
from onbeat.simulator.dispatch import Dispatcher, WorkEstimate
from onbeat.simulator.loop import EventLoop
from onbeat.simulator.observer import Progress, SimulationObserver
from onbeat.simulator.pipeline import PipelineReplica
from onbeat.simulator.replica import SerialReplica, VirtualReplica
from onbeat.simulator.result import SimulationResult
from onbeat.workload.offered import OfferedLoad


def simulate(
    load: OfferedLoad,
    config: SimulationConfig,
    step_time: StepTimeModel,
    *,
    on_progress: Progress | None = None,
    observer: SimulationObserver | None = None,
    jobs: int = 1,
) -> SimulationResult:
    """Run a load through virtual replicas.

    The scheduler is the live one under a virtual clock; the step-time model stands in for the device. The
    same arguments give the same records, whatever `jobs` is.

    Parameters
    ----------
    load : who asks for what, and when; every request generates exactly the output tokens that it asks for.
    config : the replicas, and the router in front of them.
    step_time : predicts each step of a replica.
    on_progress : hears (requests ended, requests offered, virtual seconds) at most ten times a second.
    observer : hears of each step and request.
    jobs : most processes to use; only replicas whose router ignores their state can be told apart.

    Returns
    -------
    The records of all requests; of those that had ended, where Ctrl-C interrupted the run.

    Raises
    ------
    ConfigError : a request that does not fit, a load without arrivals or limit on concurrency, a prediction
        that is not a time above 0.
    """
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}; it must be at least 1")
    load.check_lengths(config.scheduler.max_model_len, overlong="error")
    started = time.perf_counter()
    meter = ProgressMeter(on_progress, len(load))
    collector = Collector(len(load), on_progress=meter.advance, observer=observer)
    replicas = [_make_replica(index, config, step_time, observer) for index in range(config.num_replicas)]
    router = None
    if config.num_replicas > 1:
        router = make_router(config.router, config.num_replicas, seed=config.seed)
    clients = Clients(load, block_size=config.scheduler.block_size, max_concurrency=config.max_concurrency)
    is_complete = True
    try:
        dispatcher = Dispatcher(router, _work(router, load, step_time))
        EventLoop(clients, replicas, dispatcher, collector).run()
    except KeyboardInterrupt:
        is_complete = False
    collector.report()
    meter.finish()
    return SimulationResult(
        records=[record for record in collector.records if record is not None],
        num_requests=len(load),
        duration=collector.last_end,
        wall_seconds=time.perf_counter() - started,
        is_complete=is_complete,
        replicas=[replica.counters() for replica in replicas],
    )


def _make_replica(
    index: int, config: SimulationConfig, step_time: StepTimeModel, observer: SimulationObserver | None
) -> VirtualReplica:
    if config.pipeline > 1:
        return PipelineReplica(str(index), config, step_time, observer=observer)
    is_alone = config.num_replicas == 1
    return SerialReplica(str(index), config, step_time, observer=observer, is_alone=is_alone)


def _work(router: Router | None, load: OfferedLoad, step_time: StepTimeModel) -> WorkEstimate | None:
    if router is None or router.ignores_state:
        return None
    return WorkEstimate(step_time, mean_output_tokens=float(load.num_output_tokens.mean()))
