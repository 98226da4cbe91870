"""Figures of several runs, as plain Plotly descriptions: against throughput, and over the load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from math import isfinite
from typing import Any, Protocol, TypeVar

from onbeat.metrics.attainment import USUAL_SHARE
from onbeat.metrics.summary import LatencyStatistic, RunSummary
from onbeat.report.objectives import limits_of_all
from onbeat.report.plot import (
    MISSED_COLOUR,
    Figure,
    Trace,
    axis,
    drawn_values,
    figure,
    height_with_legend,
    latency_axis,
    level_line,
    line_name,
    rounded,
    series,
    trace,
    with_limits,
)
from onbeat.report.run import TradeoffPoint

KEPT_TITLE = "Share of requests within their objectives"
GOODPUT_TITLE = "Goodput"
SHARES = [0, 20, 40, 60, 80, 100]
"""That an axis of percents marks."""


class InSeries(Protocol):
    """What belongs to one line of a chart."""

    @property
    def series(self) -> str: ...


S = TypeVar("S", bound=InSeries)
L = TypeVar("L")


def tradeoff_figure(runs: Sequence[TradeoffPoint], latency: LatencyStatistic, title: str) -> Figure | None:
    """Return a latency statistic against output throughput, per GPU of several, a line a series of runs."""
    lines = []
    groups = group_by_series(runs)
    hover = "%{x:.1f} tok/s, %{y:.1f} ms (%{customdata})"
    for position, (name, members) in enumerate(groups.items()):
        points = [(run, value) for run in members if (value := latency.of(run.summary)) is not None]
        if not points:
            continue
        xs = rounded([run.output_throughput_per_gpu for run, _ in points])
        levels = [run.level.name for run, _ in points]
        labels = _point_labels(levels, is_crowded=len(groups) > 1)
        text = {"text": labels, "textposition": "top center", "textfont": {"size": 10}, "cliponaxis": False}
        drawn = series(name, position, xs, rounded([y for _, y in points]), hover=hover, customdata=levels)
        lines.append(drawn | text | {"mode": "lines+markers+text"})
    if not lines:
        return None
    is_one = all(run.num_gpus == 1 for run in runs)
    limits = limits_of_all((run.summary for run in runs), latency.metric)
    ms = axis("ms", **latency_axis([*drawn_values(lines), *limits]))
    drawn = figure(title, lines, "output tokens/s" if is_one else "output tokens/s per GPU", ms)
    return with_limits(drawn, limits)


def latency_figure(runs: Sequence[TradeoffPoint], latency: LatencyStatistic, title: str) -> Figure | None:
    """Return a latency statistic over the load, a line a series of runs; None where no run has it."""
    drawn = over_load_figure(runs, latency.of, title, unit="ms")
    if drawn is None:
        return None
    limits = limits_of_all((run.summary for run in runs), latency.metric)
    drawn["layout"]["yaxis"] |= latency_axis([*drawn_values(drawn["data"]), *limits])
    return with_limits(drawn, limits)


def _point_labels(levels: Sequence[str], *, is_crowded: bool) -> list[str]:
    """Label every point, or where several lines lie together only the last of each."""
    names = [level.removeprefix("c=") for level in levels]
    last = len(names) - 1
    return [name if i == last or not is_crowded else "" for i, name in enumerate(names)]


def group_by_load(runs: Sequence[L], is_closed: Callable[[L], bool]) -> dict[str, list[L]]:
    """Return the runs of closed loops and those of open loops, in their order."""
    groups: dict[str, list[L]] = {}
    for run in runs:
        name = "closed loop, by concurrency" if is_closed(run) else "open loop, by request rate"
        groups.setdefault(name, []).append(run)
    return groups


def group_by_series(runs: Sequence[S]) -> dict[str, list[S]]:
    """Return the runs by series, in their order."""
    groups: dict[str, list[S]] = {}
    for run in runs:
        groups.setdefault(run.series, []).append(run)
    return groups


def kept_figure(
    runs: Sequence[TradeoffPoint], promised: float = USUAL_SHARE, *, is_promised: bool = False
) -> Figure | None:
    """Return the share of the requests that were good over the load; None where nothing was asked of them.

    Parameters
    ----------
    runs : all of closed loops, or all of open ones.
    promised : share that is to be good: a line, and the highest load of each series that keeps it.
    is_promised : whether somebody asked for just this share.
    """

    def share(summary: RunSummary) -> float | None:
        attainment = summary.score.attainment
        return None if attainment is None else attainment * 100

    drawn = over_load_figure(runs, share, KEPT_TITLE, unit="%")
    if drawn is None:
        return None
    least = promised * 100
    highest = []
    for each in drawn["data"]:
        kept = list(takewhile(lambda point: point[1] >= least, zip(each["x"], each["y"], strict=True)))
        highest += kept[-1:]
    return with_promise(drawn, promised, highest, "promised" if is_promised else "of the requests")


def with_promise(
    drawn: Figure, share: float, highest: Sequence[tuple[float, float]], name: str = "promised"
) -> Figure:
    """Return a figure of shares, %, over the load with the share that is to be kept, and how far it is kept.

    Parameters
    ----------
    highest : the highest load of each series that keeps it, with its share, %.
    """
    layout, level = drawn["layout"], share * 100
    data = [*drawn["data"], *([capacity_marks(highest)] if highest else [])]
    layout["yaxis"] = axis("% of requests good", range=[0, 109], tickvals=SHARES)
    layout |= {"shapes": [level_line(level)], "annotations": [line_name(f"{level:g} % {name}", level)]}
    layout |= {"showlegend": len(data) > 1, "height": height_with_legend(data)}
    return drawn | {"data": data}


def capacity_marks(highest: Sequence[tuple[float, float]]) -> Trace:
    """Return marks, named by their loads, where lines still keep what is asked."""
    loads, kept = [load for load, _ in highest], [share for _, share in highest]
    marker = {"symbol": "diamond", "size": 11, "color": MISSED_COLOUR}
    look: dict[str, Any] = {"textposition": "bottom left", "textfont": {"size": 11}, "marker": marker}
    text = [f"{load:.3g}" for load in loads]
    return trace("capacity", loads, kept, "markers+text", hover="%{x:.4g}", text=text, **look)


def goodput_figure(runs: Sequence[TradeoffPoint]) -> Figure | None:
    """Return the good requests per second over the load; None where nothing was asked of them.

    Parameters
    ----------
    runs : all of closed loops, or all of open ones.
    """
    return over_load_figure(
        runs, lambda summary: summary.score.goodput, GOODPUT_TITLE, unit="good requests/s"
    )


def over_load_figure(
    runs: Sequence[TradeoffPoint], value_of: Callable[[RunSummary], float | None], title: str, *, unit: str
) -> Figure | None:
    """Return a number of each run over its load, a line a series; None where no run has it."""
    lines = []
    load = "requests at once" if any(run.level.is_closed for run in runs) else "requests/s"
    for position, (name, members) in enumerate(group_by_series(runs).items()):
        values = [(run.level.load, value_of(run.summary)) for run in members if isfinite(run.level.load)]
        drawn = sorted((at, value) for at, value in values if value is not None)
        if drawn:
            hover = f"%{{y:.4g}} {unit} at %{{x:g}} {load}"
            xs, ys = zip(*drawn, strict=True)
            lines.append(series(name, position, rounded(xs), rounded(ys), hover=hover))
    return figure(title, lines, load, unit) if lines else None
