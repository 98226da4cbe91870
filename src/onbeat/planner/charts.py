"""Figures of capacities and of throughput against latency, as plain Plotly descriptions."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from onbeat.metrics.summary import LatencyStatistic
from onbeat.planner.capacity import Capacity, Outcome
from onbeat.planner.cases import Labels, case_name, short_name
from onbeat.planner.frontier import FrontierPoint
from onbeat.report.charts import COLOURS, QUEUE_COLOUR
from onbeat.report.page import Figure
from onbeat.report.sweep_charts import (
    height_with_legend,
    kept_figure,
    line,
    over_load_figure,
    tradeoff_figure,
)

TITLES = {
    LatencyStatistic("tpot", "median"): "Median TPOT against throughput",
    LatencyStatistic("ttft", "median"): "Median TTFT against throughput",
    LatencyStatistic("itl", "p99"): "P99 TBT against throughput",
}
RATE_TITLES = {
    LatencyStatistic("ttft", "median"): "Median TTFT against request rate",
    LatencyStatistic("itl", "p99"): "P99 TBT against request rate",
}


def capacity_figure(capacities: Sequence[Capacity]) -> Figure | None:
    """Return the capacity of each case per device, with its interval; None where no case has one."""
    found = [each for each in capacities if each.rate > 0 and each.num_devices]
    if not found:
        return None
    bars = {
        "type": "bar",
        "orientation": "h",  # names of cases are long
        "y": [case_name(each.labels) for each in found],
        "x": [each.rate_per_device for each in found],
        "error_x": _error_bars(found),
        "customdata": [each.reason for each in found],
        "marker": {"color": COLOURS[0]},
        "hovertemplate": "%{x:.3f} requests/s per GPU<br>%{customdata}<extra>%{y}</extra>",
    }
    layout = {
        "xaxis": {"title": {"text": "requests/s per GPU"}, "rangemode": "tozero"},
        "yaxis": {"type": "category", "autorange": "reversed"},
        "height": max(220, 90 + 36 * len(found)),
    }
    return {"title": "Capacity", "data": [bars], "layout": layout}


def capacity_over_figure(capacities: Sequence[Capacity], axis: str) -> Figure | None:
    """Return the capacity per device over one numeric setting, a line for each combination of the others.

    Over the TBT objective this is the plot of Sarathi-Serve (OSDI 2024, figure 12).

    Returns
    -------
    None unless the setting has two values or more, all of them numbers.
    """
    series: dict[str, list[tuple[float, Capacity]]] = {}
    for each in capacities:
        labels = dict(each.labels)
        value = _number(labels.pop(axis, ""))
        if value is not None and each.outcome is not Outcome.INTERRUPTED:
            series.setdefault(case_name(tuple(labels.items())), []).append((value, each))
    if len({value for points in series.values() for value, _ in points}) < 2:
        return None
    lines = []
    for position, (name, points) in enumerate(series.items()):
        points.sort(key=lambda point: point[0])
        members = [each for _, each in points]
        drawn = line(
            name,
            position,
            hover="%{y:.3f} requests/s per GPU at %{x}<br>%{customdata}",
            x=[value for value, _ in points],
            y=[each.rate_per_device for each in members],
        )
        lines.append(
            drawn | {"error_y": _error_bars(members), "customdata": [each.reason for each in members]}
        )
    layout = {
        "xaxis": {"title": {"text": short_name(axis)}, **_ticks({x for each in lines for x in each["x"]})},
        "yaxis": {"title": {"text": "requests/s per GPU"}, "rangemode": "tozero"},
        "showlegend": len(lines) > 1,
        "height": height_with_legend(lines),
    }
    return {"title": f"Capacity over {short_name(axis)}", "data": lines, "layout": layout}


def axes_of(cases: Sequence[Labels]) -> list[str]:
    """Return the settings in which cases differ, in their order."""
    return list(dict.fromkeys(name for labels in cases for name, _ in labels))


def frontier_figures(points: Sequence[FrontierPoint]) -> list[Figure]:
    """Return latency against output tokens/s per GPU, one line a case, as MLC's engine study plots it.

    Points of an open loop are also shown over the request rate, as Sarathi-Serve plots them.

    Parameters
    ----------
    points : all of closed loops, or all of open ones.
    """
    runs = [point.run for point in points if point.run is not None]
    against = [tradeoff_figure(runs, latency, title) for latency, title in TITLES.items()]
    over_rate = [
        over_load_figure(runs, latency.of, title, unit="ms")
        for latency, title in RATE_TITLES.items()
        if not any(run.is_closed for run in runs)
    ]
    figures = [kept_figure(runs), *against, *over_rate]
    return [figure for figure in figures if figure is not None]


def _error_bars(capacities: Sequence[Capacity]) -> dict[str, Any]:
    """Return the interval of each capacity; an end that is not known is drawn as none."""

    def length(each: Capacity, end: float) -> float:
        return abs(end - each.rate) / each.num_devices if isfinite(end) and each.num_devices else 0.0

    return {
        "type": "data",
        "symmetric": False,
        "color": QUEUE_COLOUR,  # seen on bars, on white and on near-black
        "array": [length(each, each.interval[1]) for each in capacities],
        "arrayminus": [length(each, each.interval[0]) for each in capacities],
    }


def _ticks(values: set[float]) -> dict[str, Any]:
    """Mark the values that were run, and no others; far apart, they are spread by their ratios."""
    marked = sorted(values)
    is_log = marked[0] > 0 and marked[-1] >= 4 * marked[0]
    return {
        "type": "log" if is_log else "linear",
        "tickvals": marked,
        "ticktext": [f"{each:g}" for each in marked],
    }


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
