"""Throughput against latency: the same load at rising rates or concurrencies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLOMode
from onbeat.metrics.summary import SummaryOptions, summarise
from onbeat.planner.cases import Case, Labels, case_name, simulate_trial
from onbeat.planner.parallel import TaskContext
from onbeat.planner.search import Stopped
from onbeat.report.run import Level, TradeoffPoint, summary_values
from onbeat.workload.offered import OfferedLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelTask:
    """One run of one case."""

    case: Case
    load: OfferedLoad
    level: Level
    slo_mode: SLOMode = "stream"
    """How requests are held to their objectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """What one run showed."""

    labels: Labels
    level: Level
    run: TradeoffPoint | None
    """None where the case cannot run."""
    error: str = ""
    """Why it cannot run."""

    @property
    def series(self) -> str:
        return case_name(self.labels)

    @property
    def values(self) -> dict[str, Any]:
        """As a file has it, under the keys of a load test; without numbers where the case cannot run."""
        about: dict[str, Any] = {"name": self.series, "case": dict(self.labels), "level": self.level.name}
        about |= {"error": self.error or None}
        if self.run is None:
            return about
        return (
            about
            | summary_values(self.run.summary)
            | {
                **self.level.values,
                "num_gpus": self.run.num_gpus,
                "output_throughput_per_gpu": self.run.output_throughput_per_gpu,
            }
        )


def run_level(task: LevelTask, context: TaskContext) -> FrontierPoint | None:
    """Run one level of one case; a worker of `parallel.run_tasks`. None where it was stopped."""
    level = task.level
    try:
        built = task.case.build()
        load = task.load.with_arrivals(None) if level.is_closed else task.load.at_rate(level.request_rate)
        if level.max_concurrency is not None:
            built = built._replace(config=replace(built.config, max_concurrency=level.max_concurrency))
        result = simulate_trial(built, load, context.is_stopped)
    except ConfigError as error:
        return FrontierPoint(labels=task.case.labels, level=level, run=None, error=str(error))
    except Stopped:
        context.stop()
        return None
    options = SummaryOptions(slo_mode=task.slo_mode)
    summary = summarise(result.records, duration=result.duration, options=options)
    labels = task.case.labels
    run = TradeoffPoint(
        series=case_name(labels),
        level=level,
        summary=summary,
        num_gpus=built.num_devices,
    )
    point = FrontierPoint(labels=labels, level=level, run=run)
    context.report(point)
    return point
