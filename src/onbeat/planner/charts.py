"""Figures of capacities, as plain Plotly descriptions."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from onbeat.planner.capacity import Capacity, Outcome
from onbeat.planner.cases import Labels, case_name, short_name
from onbeat.report.plot import (
    QUEUE_COLOUR,
    Figure,
    axis,
    drawn_values,
    figure,
    latency_axis,
    rounded,
    series,
    with_limits,
)
from onbeat.report.sweep_charts import KEPT_TITLE, capacity_marks, with_promise

RATE = "requests/s"
PER_GPU = "requests/s per GPU"


def search_figures(capacities: Sequence[Capacity]) -> list[Figure]:
    """Return what the objective limits over the request rate, by the runs of the searches, a line a case.

    Shares of good requests and latencies have a figure each, with the limit and the capacities.
    """
    named = (measure.name for each in capacities for _, verdict in each.curve for measure in verdict.measures)
    figures = (_search_figure(capacities, name) for name in dict.fromkeys(named))
    return [drawn for drawn in figures if drawn is not None]


def _search_figure(capacities: Sequence[Capacity], name: str) -> Figure | None:
    lines, found, limits, is_share = [], [], set(), False
    for position, each in enumerate(capacities):
        own = [
            (rate, measure)
            for rate, verdict in each.curve
            for measure in verdict.measures
            if measure.name == name and isfinite(measure.value)
        ]
        if not own:
            continue
        is_share = own[0][1].unit == "share"
        scale, unit = (100, "%") if is_share else (1e3, "ms")
        xs, ys = [rate for rate, _ in own], [measure.value * scale for _, measure in own]
        hover = f"%{{y:.4g}} {unit} at %{{x:.4g}} requests/s"
        lines.append(series(case_name(each.labels), position, rounded(xs), rounded(ys), hover=hover))
        limits.add(own[0][1].limit)
        if each.outcome is Outcome.FOUND:
            found.append((each.rate, own[0][1].limit * scale))
    if not lines:
        return None
    if is_share:
        return with_promise(figure(KEPT_TITLE, lines, RATE, "%"), max(limits), found)
    ms = axis("ms", **latency_axis([*drawn_values(lines), *(limit * 1e3 for limit in limits)]))
    drawn = figure(f"{name} over the request rate", lines, RATE, ms)
    drawn["data"].append(capacity_marks(found))
    return with_limits(drawn, {limit * 1e3: "limit" for limit in sorted(limits)})


def capacity_over_figure(capacities: Sequence[Capacity], name: str) -> Figure | None:
    """Return the capacity per device over one numeric setting, a line for each combination of the others.

    Over the TBT objective this is the plot of Sarathi-Serve (OSDI 2024, figure 12).

    Returns
    -------
    None unless the setting has two values or more, all of them numbers.
    """
    groups: dict[str, list[tuple[float, Capacity]]] = {}
    for each in capacities:
        labels = dict(each.labels)
        value = _number(labels.pop(name, ""))
        if value is not None and each.outcome is not Outcome.INTERRUPTED:
            groups.setdefault(case_name(tuple(labels.items())), []).append((value, each))
    values = {value for points in groups.values() for value, _ in points}
    if len(values) < 2:
        return None
    lines = []
    for position, (others, points) in enumerate(groups.items()):
        points.sort(key=lambda point: point[0])
        members = [each for _, each in points]
        told = {"error_y": _error_bars(members), "customdata": [each.reason for each in members]}
        xs, ys = [value for value, _ in points], [each.rate_per_device for each in members]
        hover = "%{y:.3f} requests/s per GPU at %{x}<br>%{customdata}"
        lines.append(series(others, position, xs, ys, hover=hover, **told))
    title = short_name(name)
    return figure(f"Capacity over {title}", lines, axis(title, **_ticks(values)), PER_GPU)


def axes_of(cases: Sequence[Labels]) -> list[str]:
    """Return the settings in which cases differ, in their order."""
    return list(dict.fromkeys(name for labels in cases for name, _ in labels))


def _error_bars(capacities: Sequence[Capacity]) -> dict[str, Any]:
    """Return the interval of each capacity; an end that is not known is drawn as none."""

    def length(each: Capacity, end: float) -> float:
        return abs(end - each.rate) / each.num_devices if isfinite(end) and each.num_devices else 0.0

    return {
        "type": "data",
        "symmetric": False,
        "color": QUEUE_COLOUR,  # seen on white and on near-black
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
