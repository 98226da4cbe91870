"""Throughput against latency, and the figures that show it."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from onbeat.planner.capacity import Capacity, Outcome
from onbeat.planner.charts import axes_of, capacity_figure, capacity_over_figure, frontier_figures
from onbeat.planner.frontier import FrontierPoint, LevelTask, run_level
from onbeat.report.page import write_page
from onbeat.report.result import Plots, Result, Section
from onbeat.report.run import Level, TradeoffPoint
from tests.pure.planner.fakes import FakeCase, QuietContext, make_load

CASE = FakeCase(0.01, 1e-5, max_num_seqs=64, token_budget=512, labels=(("policy", "sarathi"),))


def runs_of(points: list[FrontierPoint]) -> list[TradeoffPoint]:
    assert not [point.error for point in points if point.error]
    return [point.run for point in points if point.run is not None]


def run_levels(levels: list[Level], case: FakeCase = CASE) -> list[FrontierPoint]:
    load = make_load(120, output=40, seed=0)
    points = [run_level(LevelTask(case=case, load=load, level=level), QuietContext()) for level in levels]
    return [point for point in points if point is not None]


def test_a_closed_loop_trades_latency_for_throughput() -> None:
    runs = runs_of(run_levels([Level(max_concurrency=n) for n in (1, 8, 64)]))
    throughputs = [run.output_throughput_per_gpu for run in runs]
    tpots = [run.summary.latencies["tpot"].median_ms or 0.0 for run in runs]
    assert throughputs == sorted(throughputs)
    assert tpots[0] > 0
    assert tpots == sorted(tpots)
    assert runs[0].summary.max_concurrent_requests == 1
    # Alone, a request takes one step for its prompt and 39 for its other tokens.
    alone = 0.01 + 1e-5 * 128 + 39 * (0.01 + 1e-5)
    assert runs[0].output_throughput_per_gpu == pytest.approx(40 / alone / 2)


def test_an_open_loop_keeps_its_rate() -> None:
    (run,) = runs_of(run_levels([Level(request_rate=5.0)]))
    assert run.summary.counts.request_throughput == pytest.approx(5.0, rel=0.05)
    assert run.level.name == "5/s"


def test_a_case_that_cannot_run_says_why() -> None:
    (point,) = run_levels([Level(max_concurrency=2)], FakeCase(error="the weights take 141.2 GB"))
    assert point.error == "the weights take 141.2 GB"
    assert point.run is None
    assert frontier_figures([point]) == []


def test_a_stopped_level_is_no_point() -> None:
    context = QuietContext()
    context.is_stop_wanted = True
    load = make_load(50, output=400)
    task = LevelTask(case=CASE, load=load, level=Level(max_concurrency=2))
    assert run_level(task, context) is None


def make_capacity(rate: float, **labels: str) -> Capacity:
    return Capacity(
        labels=tuple(labels.items()),
        outcome=Outcome.FOUND if rate else Outcome.INFEASIBLE,
        rate=rate,
        interval=(rate * 0.9, inf if rate > 5 else rate * 1.1),
        num_devices=2,
        reason="P99 TBT 0.2 s > 0.1 s",
        repeats=(),
    )


CAPACITIES = [
    make_capacity(1.0, policy="sarathi", slo_tbt_ms="100"),
    make_capacity(6.0, policy="sarathi", slo_tbt_ms="50"),
    make_capacity(0.0, policy="orca", slo_tbt_ms="100"),
]


def test_bars_show_each_capacity_per_device() -> None:
    figure = capacity_figure(CAPACITIES)
    assert figure is not None
    (bars,) = figure["data"]
    assert bars["x"] == [0.5, 3.0]
    assert bars["error_x"]["arrayminus"] == pytest.approx([0.05, 0.3])
    assert bars["error_x"]["array"] == pytest.approx([0.05, 0.0])
    assert capacity_figure([CAPACITIES[2]]) is None


def test_lines_show_capacity_over_a_numeric_setting() -> None:
    assert axes_of([each.labels for each in CAPACITIES]) == ["policy", "slo_tbt_ms"]
    figure = capacity_over_figure(CAPACITIES, "slo_tbt_ms")
    assert figure is not None
    sarathi, orca = figure["data"]
    assert (sarathi["x"], sarathi["y"]) == ([50.0, 100.0], [3.0, 0.5])
    assert orca["y"] == [0.0]
    assert figure["layout"]["xaxis"]["ticktext"] == ["50", "100"]
    assert capacity_over_figure(CAPACITIES, "policy") is None


def test_figures_fit_a_page(tmp_path: Path) -> None:
    points = run_levels([Level(max_concurrency=1), Level(max_concurrency=4)])
    figures = frontier_figures(points)
    assert [figure["title"] for figure in figures] == [
        "Median TPOT against throughput",
        "Median TTFT against throughput",
        "P99 TBT against throughput",
    ]
    open_loop = frontier_figures(run_levels([Level(request_rate=1.0), Level(request_rate=4.0)]))
    assert [figure["title"] for figure in open_loop][-2:] == [
        "Median TTFT against request rate",
        "P99 TBT against request rate",
    ]
    page = tmp_path / "page.html"
    sections = [Section("Frontier", [Plots(figures + open_loop)])]
    write_page(Result(kind="capacity", title="Capacity", sections=sections), page)
    assert 'data-figure="1"' in page.read_text()
