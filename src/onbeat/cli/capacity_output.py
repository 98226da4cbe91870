"""The result of a capacity search as tables, a file and a page."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from rich.table import Table

from onbeat import __version__
from onbeat.cli.capacity_answer import answer_of, facts_of
from onbeat.cli.outputs import is_given
from onbeat.metrics.summary import LatencyStatistic
from onbeat.planner.capacity import Capacity, Outcome
from onbeat.planner.cases import Labels, case_name
from onbeat.planner.charts import (
    axes_of,
    capacity_figure,
    capacity_over_figure,
    frontier_figures,
    search_figures,
)
from onbeat.planner.frontier import FrontierPoint, point_keys
from onbeat.report.page import Page, answer, folded, notes, table
from onbeat.report.run_report import settings_section
from onbeat.report.sweep_charts import group_by_load
from onbeat.report.table import filled_table, percent
from onbeat.report.units import significant

SCHEMA_VERSION = 1
INTERRUPTED_NOTE = "interrupted: this is a partial result"

CAPACITY_HEADER = ("case", "requests/s", "interval", "GPUs", "per GPU", "what limits it")
FRONTIER_HEADER = (
    *("case", "level", "tokens/s per GPU", "requests/s", "TPOT P50 (ms)", "TBT P99 (ms)", "TTFT P50 (ms)"),
    *("TTFT P99 (ms)", "good"),
)
FRONTIER_LATENCIES = (
    *(LatencyStatistic("tpot", "median"), LatencyStatistic("itl", "p99")),
    *(LatencyStatistic("ttft", "median"), LatencyStatistic("ttft", "p99")),
)
"""Of the columns before the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityReport:
    """Everything that a run of the command found."""

    title: str
    lead: str
    """What was asked, in a sentence."""
    settings: dict[str, Any]
    """What was asked, for the saved file."""
    capacities: Sequence[Capacity] = ()
    points: Sequence[FrontierPoint] = ()
    promises: Mapping[Labels, str] = field(default_factory=dict)
    """What each case must keep, in words."""
    share: float | None = None
    """Of good requests, that the objective asks for; None of one that names none."""
    is_interrupted: bool = False

    @property
    def num_requests(self) -> int:
        """Requests of a run."""
        return int(self.settings["load"]["num_requests"])

    @property
    def best(self) -> Capacity | None:
        """The case with the highest rate per device; None where none has a capacity."""
        found = [each for each in self.capacities if each.outcome is Outcome.FOUND]
        return max(found, key=lambda each: each.rate_per_device, default=None)

    @property
    def is_infeasible(self) -> bool:
        """Whether nothing that was asked for can run or keep the objective."""
        if self.is_interrupted or not (self.capacities or self.points):
            return False
        no_capacity = all(each.outcome is Outcome.INFEASIBLE for each in self.capacities)
        return no_capacity and not any(point.run for point in self.points)


def capacity_rows(capacities: Sequence[Capacity]) -> list[tuple[str, ...]]:
    """Return the cells of the table of capacities, as `CAPACITY_HEADER` names them."""
    return [
        (
            case_name(each.labels),
            _rate_text(each),
            _interval_text(each),
            str(each.num_devices or "-"),
            significant(each.rate_per_device, 4) if each.rate else "-",
            each.reason,
        )
        for each in capacities
    ]


def frontier_rows(points: Sequence[FrontierPoint]) -> list[tuple[str, ...]]:
    """Return the cells of the table of runs, as `FRONTIER_HEADER` names them."""
    rows = []
    for point in points:
        run = point.run
        if run is None:
            rows.append((point.series, point.level.name, point.error, *[""] * (len(FRONTIER_HEADER) - 3)))
            continue
        values = [latency.of(run.summary) for latency in FRONTIER_LATENCIES]
        rows.append(
            (
                point.series,
                point.level.name,
                f"{run.output_throughput_per_gpu:,.0f}",
                f"{run.summary.counts.request_throughput:.3f}",
                *("-" if value is None else f"{value:,.1f}" for value in values),
                percent(run.summary.score.attainment),
            )
        )
    return rows


def rich_tables(report: CapacityReport) -> list[Table]:
    """Return what the terminal shows."""
    tables = []
    for title, header, rows, last_left in (
        ("Capacity", CAPACITY_HEADER, capacity_rows(report.capacities), len(CAPACITY_HEADER) - 1),
        ("Latency and throughput", FRONTIER_HEADER, frontier_rows(report.points), 0),
    ):
        if rows:
            tables.append(filled_table(title, header, rows, texts=(0, last_left), overflow="fold"))
    return tables


def to_document(report: CapacityReport) -> dict[str, Any]:
    """Return what is saved."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "capacity",
        "onbeat_version": __version__,
        "interrupted": report.is_interrupted,
        "settings": report.settings,
        "cases": [each.as_dict() for each in report.capacities],
        "frontier": [
            {"case": dict(point.labels), "error": point.error or None, **point_keys(point)}
            for point in report.points
        ],
    }


def write_page(path: Path, report: CapacityReport) -> None:
    """Write one self-contained page.

    Raises
    ------
    ConfigError : the file cannot be written.
    """
    page = Page()
    body = answer(report.title, answer_of(report), facts_of(report))
    body += notes([INTERRUPTED_NOTE] if report.is_interrupted else [])
    body += page.grid(search_figures(report.capacities), per_row=2)
    if report.capacities:
        cases = table(CAPACITY_HEADER, capacity_rows(report.capacities), texts=(len(CAPACITY_HEADER) - 1,))
        cases += page.grid(_capacity_figures(report.capacities), per_row=2)
        body += folded("Cases", cases) if len(report.capacities) > 1 else folded("The numbers", cases)
    if report.points:
        loads = group_by_load(report.points, lambda point: point.level.request_rate is None)
        for load, points in loads.items():
            figures = page.grid(frontier_figures(points, report.share), per_row=2)
            body += folded(f"Latency and throughput: {load}", figures)
        body += folded("All runs", table(FRONTIER_HEADER, frontier_rows(report.points)))
    body += f"<h2>How it was found</h2>\n<p class='lead'>{html.escape(report.lead)}.</p>\n"
    flags = {name: value for name, value in report.settings.get("flags", {}).items() if is_given(value)}
    page.write(path, report.title, body + settings_section(flags))


def _capacity_figures(capacities: Sequence[Capacity]) -> list[Any]:
    # A rate that nothing limited says how far the search went; beside it no other could be seen.
    bounded = [each for each in capacities if each.outcome is not Outcome.UNBOUNDED]
    axes = axes_of([each.labels for each in bounded])
    return [capacity_figure(bounded), *(capacity_over_figure(bounded, axis) for axis in axes)]


def _rate_text(each: Capacity) -> str:
    if each.outcome is Outcome.INFEASIBLE:
        return "INFEASIBLE"
    if not each.rate:
        return "-"
    prefix = {Outcome.FOUND: "", Outcome.UNBOUNDED: "above ", Outcome.INTERRUPTED: "at least "}[each.outcome]
    return f"{prefix}{significant(each.rate, 4)}"


def _interval_text(each: Capacity) -> str:
    if each.outcome is Outcome.INFEASIBLE or not each.rate:
        return "-"
    low, high = (significant(end, 4) for end in each.interval)
    return f"{low} to {high}" if isfinite(each.interval[1]) else f"{low} or more"
