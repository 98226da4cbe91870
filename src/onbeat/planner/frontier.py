"""Throughput against latency: the same load at rising rates or concurrencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from onbeat.core.errors import ConfigError
from onbeat.metrics.summary import SummaryOptions, summarise
from onbeat.planner.cases import Case, Labels, case_name
from onbeat.planner.parallel import TaskContext
from onbeat.planner.search import Stopped
from onbeat.planner.trial import require_finished, stop_if
from onbeat.simulator.simulate import simulate
from onbeat.workload.offered import OfferedLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """How hard a load presses: a request rate (open loop), or requests under way at once (closed loop)."""

    request_rate: float | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if (self.request_rate is None) == (self.concurrency is None):
            raise ConfigError("a level is a request rate or a concurrency, one of them")

    @property
    def name(self) -> str:
        return f"c={self.concurrency}" if self.request_rate is None else f"{self.request_rate:g}/s"

    def apply(self, load: OfferedLoad) -> OfferedLoad:
        """Return the load at this level."""
        return load.with_arrivals(None) if self.request_rate is None else load.at_rate(self.request_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelTask:
    """One run of one case."""

    case: Case
    load: OfferedLoad
    level: Level


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """What one run showed."""

    labels: Labels
    level: Level
    summary: dict[str, Any]
    """Keys of `metrics.summary.summarise`, and `request_rate`, `max_concurrency`, `num_gpus`,
    `output_throughput_per_gpu` as a load test writes them; empty where the case cannot run."""
    error: str = ""
    """Why it cannot run."""

    @property
    def series(self) -> str:
        return case_name(self.labels)


def run_level(task: LevelTask, context: TaskContext) -> FrontierPoint | None:
    """Run one level of one case; a worker of `parallel.run_tasks`. None where it was stopped."""
    level = task.level
    try:
        built = task.case.build()
        config = built.config
        if level.concurrency is not None:
            config = replace(config, max_concurrency=level.concurrency)
        result = simulate(
            level.apply(task.load),
            config,
            built.step_time,
            on_progress=lambda *_: stop_if(context.is_stopped),
        )
        require_finished(result)
    except ConfigError as error:
        return FrontierPoint(labels=task.case.labels, level=level, summary={}, error=str(error))
    except Stopped:
        context.stop()
        return None
    summary = summarise(result.records, duration=result.duration, options=SummaryOptions())
    summary |= {
        "request_rate": "inf" if level.request_rate is None else level.request_rate,
        "max_concurrency": level.concurrency,
        "num_gpus": built.num_devices,
        "output_throughput_per_gpu": summary["output_throughput"] / built.num_devices,
    }
    point = FrontierPoint(labels=task.case.labels, level=level, summary=summary)
    context.report(point)
    return point


def group_points(points: Sequence[FrontierPoint]) -> dict[str, list[FrontierPoint]]:
    """Return the points that ran, by case, in their order."""
    groups: dict[str, list[FrontierPoint]] = {}
    for point in points:
        if point.summary:
            groups.setdefault(point.series, []).append(point)
    return groups
