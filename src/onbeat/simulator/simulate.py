"""Run a load through virtual replicas."""

from __future__ import annotations

import time
from collections.abc import Callable

from onbeat.core.errors import ConfigError
from onbeat.core.slo import ShedMode
from onbeat.core.step_time import StepTimeModel
from onbeat.metrics.record import RequestRecord
from onbeat.scheduler.cluster.fleet import Decided
from onbeat.scheduler.cluster.routers import make_router
from onbeat.scheduler.cluster.routing import Router
from onbeat.simulator.config import SimulationConfig
from onbeat.simulator.observer import Collector, Progress, ProgressMeter, SimulationObserver
from onbeat.simulator.result import SimulationResult
from onbeat.simulator.shards import IndependentReplicas, run_in_processes
from onbeat.simulator.together import FleetOutcome, run_together
from onbeat.workload.offered import OfferedLoad


def simulate(  # noqa: PLR0913 (four say who watches)
    load: OfferedLoad,
    config: SimulationConfig,
    step_time: StepTimeModel,
    *,
    on_progress: Progress | None = None,
    observer: SimulationObserver | None = None,
    jobs: int = 1,
    on_decision: Decided | None = None,
    on_record: Callable[[RequestRecord], None] | None = None,
) -> SimulationResult:
    """Run a load through virtual replicas.

    The scheduler is the live one under a virtual clock; the step-time model stands in for the device. The
    same arguments give the same records, whatever `jobs` is.

    Parameters
    ----------
    load : who asks for what, and when; every request generates exactly the output tokens that the load says.
    config : the replicas, and the router in front of them.
    step_time : predicts each step of a replica; kinds of replicas bring their own.
    on_progress : hears (requests ended, requests offered, virtual seconds) at most ten times a second.
    observer : hears of each step and request.
    jobs : most processes to use; only replicas whose router ignores their state, and which refuse nothing,
        can be told apart.
    on_decision : is told of each event of the fleet, its time and the actions, if not None.
    on_record : takes the record of each request as it ends, in place of the result: what a run keeps of its
        requests is then bounded by those that are under way, however many there are.

    Returns
    -------
    The records of all requests; of those that had ended, where Ctrl-C interrupted the run. None are there if
    `on_record` has taken them.

    Raises
    ------
    ConfigError : a request that does not fit, a load without arrivals or limit on concurrency, a prediction
        that is not a time above 0.
    """
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}; it must be at least 1")
    load.check_lengths(config.max_model_len, overlong="error")
    started = time.perf_counter()
    meter = ProgressMeter(on_progress, len(load))
    kept: list[RequestRecord | None] = [None] * (0 if on_record is not None else len(load))
    end = 0.0

    def keep(row: int, record: RequestRecord) -> None:
        nonlocal end
        end = max(end, record.end)
        if on_record is None:
            kept[row] = record
        else:
            on_record(record)

    collector = Collector(keep, on_progress=meter.advance, observer=observer)
    router = make_router(config.router, config.num_replicas, seed=config.seed)
    if observer is None and on_decision is None and _is_separable(load, config, router):
        replicas = IndependentReplicas(load, config, step_time, router)
        if jobs > 1:
            outcome = FleetOutcome(*run_in_processes(replicas, jobs, keep, meter.advance), {})
        else:
            outcome = FleetOutcome(*replicas.run_all(keep, meter.advance), {})
    else:
        outcome = run_together(load, config, step_time, collector, observer, on_decision)
    meter.finish()
    records = [record for record in kept if record is not None]
    return SimulationResult(
        records=records,
        num_requests=len(load),
        duration=end,
        wall_seconds=time.perf_counter() - started,
        is_complete=outcome.is_complete,
        replicas=outcome.counters,
        decisions=outcome.decisions,
        replica_seconds=outcome.replica_seconds,
        sizes=outcome.sizes,
    )


def _is_separable(load: OfferedLoad, config: SimulationConfig, router: Router) -> bool:
    """Whether what happens on one replica has no effect on another."""
    is_open = load.arrivals is not None and config.max_concurrency is None
    is_fixed = not (config.fleet_changes or config.kinds or config.kv_link or config.fleet.autoscale)
    # What one replica refuses goes to another.
    return is_fixed and is_open and router.ignores_state and config.num_replicas > 1 and not _refuses(config)


def _refuses(config: SimulationConfig) -> bool:
    """Whether a replica may refuse a request that it could run."""
    limits = config.scheduler
    caps = (limits.max_num_queued_reqs, limits.max_num_queued_tokens, limits.max_queue_seconds)
    return config.shed is ShedMode.REJECT or any(each is not None for each in caps)
