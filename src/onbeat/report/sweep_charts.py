"""Figures of several runs, as plain Plotly descriptions: against throughput, and over the load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from math import isfinite
from typing import Any

from onbeat.metrics.attainment import USUAL_SHARE
from onbeat.metrics.summary import LatencyStatistic, RunSummary
from onbeat.report import plot
from onbeat.report.objectives import limits_of_all
from onbeat.report.run import AnyRun

KEPT_TITLE = "Share of requests within their objectives"
GOODPUT_TITLE = "Goodput"
SHARES = [0, 20, 40, 60, 80, 100]
"""That an axis of percents marks."""


def tradeoff_figure(runs: Sequence[AnyRun], latency: LatencyStatistic, title: str) -> plot.Figure | None:
    """Return a latency statistic against output throughput, per GPU of several; None where no run has it."""
    points = [(run, value) for run in runs if (value := latency.of(run.summary)) is not None]
    if not points:
        return None
    xs = plot.rounded([run.output_throughput_per_gpu for run, _ in points])
    ys = plot.rounded([y for _, y in points])
    levels = [run.header.level.name for run, _ in points]
    labels = [level.removeprefix("c=") for level in levels]
    text = {"text": labels, "textposition": "top center", "textfont": {"size": 10}, "cliponaxis": False}
    hover = "%{x:.1f} tok/s, %{y:.1f} ms (%{customdata})"
    line = plot.series("", 0, xs, ys, hover=hover, customdata=levels) | text | {"mode": "lines+markers+text"}
    is_one = all(run.num_gpus == 1 for run in runs)
    limits = limits_of_all((run.summary for run in runs), latency.metric)
    ms = plot.axis("ms", **plot.latency_axis([*ys, *limits]))
    drawn = plot.figure(title, [line], "output tokens/s" if is_one else "output tokens/s per GPU", ms)
    return plot.with_limits(drawn, limits)


def kept_figure(runs: Sequence[AnyRun]) -> plot.Figure | None:
    """Return the share of the requests that were good over the load; None where nothing was asked of them.

    The highest load that keeps the usual share is marked.

    Parameters
    ----------
    runs : all of closed loops, or all of open ones.
    """

    def share(summary: RunSummary) -> float | None:
        attainment = summary.score.attainment
        return None if attainment is None else attainment * 100

    drawn = over_load_figure(runs, share, KEPT_TITLE, unit="%")
    if drawn is None:
        return None
    (line,) = drawn["data"]
    kept = takewhile(lambda point: point[1] >= USUAL_SHARE * 100, zip(line["x"], line["y"], strict=True))
    return with_promise(drawn, USUAL_SHARE, list(kept)[-1:], "of the requests")


def with_promise(
    drawn: plot.Figure, share: float, highest: Sequence[tuple[float, float]], name: str = "promised"
) -> plot.Figure:
    """Return a figure of shares, %, over the load with the share that is to be kept, and how far it is kept.

    Parameters
    ----------
    highest : the highest load of each line that keeps it, with its share, %.
    """
    layout, level = drawn["layout"], share * 100
    data = [*drawn["data"], *([capacity_marks(highest)] if highest else [])]
    layout["yaxis"] = plot.axis("% of requests good", range=[0, 109], tickvals=SHARES)
    layout |= {
        "shapes": [plot.level_line(level)],
        "annotations": [plot.line_name(f"{level:g} % {name}", level)],
    }
    layout |= {"showlegend": len(data) > 1, "height": plot.height_with_legend(data)}
    return drawn | {"data": data}


def capacity_marks(highest: Sequence[tuple[float, float]]) -> plot.Trace:
    """Return marks, named by their loads, where lines still keep what is asked."""
    loads, kept = [load for load, _ in highest], [share for _, share in highest]
    marker = {"symbol": "diamond", "size": 11, "color": plot.MISSED_COLOUR}
    look: dict[str, Any] = {"textposition": "bottom left", "textfont": {"size": 11}, "marker": marker}
    text = [f"{load:.3g}" for load in loads]
    return plot.trace("capacity", loads, kept, "markers+text", hover="%{x:.4g}", text=text, **look)


def goodput_figure(runs: Sequence[AnyRun]) -> plot.Figure | None:
    """Return the good requests per second over the load; None where nothing was asked of them.

    Parameters
    ----------
    runs : all of closed loops, or all of open ones.
    """
    return over_load_figure(
        runs, lambda summary: summary.score.goodput, GOODPUT_TITLE, unit="good requests/s"
    )


def over_load_figure(
    runs: Sequence[AnyRun], value_of: Callable[[RunSummary], float | None], title: str, *, unit: str
) -> plot.Figure | None:
    """Return a number of each run over its load; None where no run has it."""
    load = "requests at once" if any(run.header.level.is_closed for run in runs) else "requests/s"
    levels = [(run.header.level.load, value_of(run.summary)) for run in runs]
    drawn = sorted((at, value) for at, value in levels if value is not None and isfinite(at))
    if not drawn:
        return None
    xs, ys = zip(*drawn, strict=True)
    line = plot.series(
        "measured", 0, plot.rounded(xs), plot.rounded(ys), hover=f"%{{y:.4g}} {unit} at %{{x:g}} {load}"
    )
    return plot.figure(title, [line], load, unit)
