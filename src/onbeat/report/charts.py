"""Figures of one run (distributions, what happened over time), and of several (over throughput and load)."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from itertools import takewhile
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onbeat.metrics.attainment import USUAL_SHARE
from onbeat.metrics.distribution import Array
from onbeat.metrics.summary import LatencyStatistic, RunSummary, collect_samples
from onbeat.report import plot
from onbeat.report.objectives import limits_of
from onbeat.report.run import AnyRun, ReportedRequest

VISIBLE_SECONDS = 1e-3
"""A shorter wait is too thin to draw."""
MAX_TIMELINE_REQUESTS = 300
MAX_GAP_POINTS = 2500
NUM_TIME_BINS = 120
MOST_OF_LIMIT = 2.0
"""Times the longest gap: a limit above it would press the gaps together."""
MOST_NAMED = 3
"""Marks in one figure; more names would lie over each other."""
MANY_RUNS = 6
"""On one page, with more, each has fewer points."""
TIME = "seconds since start"

# Dense at the tail, where the interesting part of a latency distribution is.
CDF_LEVELS = np.concatenate([np.linspace(0, 90, 91), np.linspace(90.5, 99, 18), np.linspace(99.1, 100, 10)])


def cdf_figure(results: Sequence[AnyRun], metric: str, title: str) -> plot.Figure | None:
    """Return the cumulative distribution of a metric, one curve a run; None where no run has a value."""
    curves = []
    hover = "%{y:.1f} % within %{x:.1f} ms"
    for position, result in enumerate(results):
        values = collect_samples(result.records)[metric] * 1e3
        if values.size:
            xs, ys = plot.rounded(np.percentile(values, CDF_LEVELS)), CDF_LEVELS.tolist()
            colour = _level_colour(position, len(results))
            curves.append(plot.trace(result.header.level.name, xs, ys, hover=hover, colour=colour))
    if not curves:
        return None
    limits = limits_of([results[0].summary], metric)
    scale = plot.log_scale([*(value for curve in curves for value in curve["x"]), *limits])
    # Along its line: a legend would take the room of the curves.
    place = {"y": 4, "textangle": -90, "xanchor": "right", "yanchor": "bottom", "showarrow": False}
    names = [
        {
            **place,
            "x": math.log10(limit) if scale["type"] == "log" else limit,
            "text": html.escape(f"{who} {limit:g} ms"),
            "font": {"size": 11},
        }
        for limit, who in limits.items()
    ]
    look = {"color": plot.MISSED_COLOUR, "width": 1.5, "dash": "dash"}
    lines = [
        plot.trace("", [limit, limit], [0, 101], line=look, hoverinfo="skip", showlegend=False)
        for limit in limits
    ]
    share = plot.axis("% of requests" if metric != "itl" else "% of gaps", range=[0, 101])
    is_several = len(curves) > 1
    ms = plot.axis("ms", **scale)
    return plot.figure(
        title, [*curves, *lines], ms, share, height=320, showlegend=is_several, annotations=names
    )


def timeline_figure(result: AnyRun, num_runs: int = 1) -> plot.Figure | None:
    """Return a Gantt chart: each request's wait in the client, wait for the first token, and stream.

    Parameters
    ----------
    num_runs : that the page shows.
    """
    records = sorted(
        _thinned(result.records, _share_of(MAX_TIMELINE_REQUESTS, num_runs)),
        key=lambda record: record.arrival,
    )
    if not records:
        return None
    segments: dict[str, tuple[str, list[float | None], list[float | None]]] = {
        "waiting in the client": (plot.QUEUE_COLOUR, [], []),
        "sent, no token yet": (plot.WAIT_COLOUR, [], []),
        "streaming": (plot.STREAM_COLOUR, [], []),
        "not completed": (plot.MISSED_COLOUR, [], []),
    }
    for row, record in enumerate(records):
        for name, begin, end in _spans(record):
            _, xs, ys = segments[name]
            xs += [round(begin - result.start, 4), round(end - result.start, 4), None]
            ys += [row, row, None]
    width = 8 if len(records) <= 50 else 4 if len(records) <= 120 else 2
    data = [
        plot.trace(name, xs, ys, hover="%{x:.2f} s", colour=colour, width=width)
        for name, (colour, xs, ys) in segments.items()
        if xs
    ]
    shown = "" if len(records) == len(result.records) else f" ({len(records)} of {len(result.records)} shown)"
    rows = plot.axis("request, by arrival", autorange="reversed", zeroline=False)
    height = min(700, 200 + 8 * len(records))
    return plot.figure(f"Timeline of requests{shown}", data, TIME, rows, showlegend=True, height=height)


def _spans(record: ReportedRequest) -> list[tuple[str, float, float]]:
    if not record.is_completed:
        return [("not completed", record.arrival, record.end)]
    first, last = record.delivery_times[0], record.delivery_times[-1]
    spans = [("sent, no token yet", record.sent, first), ("streaming", first, last)]
    if record.client_queue_time > VISIBLE_SECONDS:
        spans.insert(0, ("waiting in the client", record.arrival, record.sent))
    return spans


def _share_of(most: int, num_runs: int) -> int:
    """Return how many points a run may have, so that a page of many runs can still be mailed."""
    return max(50, min(most, MANY_RUNS * most // num_runs))


def gaps_figure(result: AnyRun, num_runs: int = 1) -> plot.Figure | None:
    """Return the gaps between deliveries over time: the points, and median and P99 of each time slice.

    Parameters
    ----------
    num_runs : that the page shows.
    """
    times, gap_ms = _gap_series(result)
    if not times.size:
        return None
    shown = _most_telling(times, gap_ms, _share_of(MAX_GAP_POINTS, num_runs))
    end = np.nextafter(times.max(), np.inf)  # the last gap belongs to the last slice
    edges = np.linspace(0, end, min(NUM_TIME_BINS, max(2, times.size // 50)) + 1)
    bins = np.digitize(times, edges) - 1
    centres = (edges[:-1] + edges[1:]) / 2
    dots = {"color": plot.STREAM_COLOUR, "size": 3, "opacity": 0.35}
    told = "%{y:.1f} ms at %{x:.2f} s"
    xs, points = plot.rounded(times[shown]), plot.rounded(gap_ms[shown])
    data = [plot.trace("gap", xs, points, "markers", hover=told, marker=dots)]
    for level, name, colour in ((50, "median", plot.COLOURS[2]), (99, "P99", plot.MISSED_COLOUR)):
        ys = [_percentile(gap_ms[bins == index], level) for index in range(centres.size)]
        data.append(plot.trace(name, plot.rounded(centres), ys, colour=colour))
    drawn = plot.figure("Gaps between deliveries (TBT) over time", data, TIME, "ms", height=340)
    most = MOST_OF_LIMIT * gap_ms.max()
    near = {limit: who for limit, who in limits_of([result.summary], "itl").items() if limit <= most}
    return plot.with_limits(drawn, near)


def _percentile(gap_ms: Array, level: int) -> float | None:
    """Return a percentile; None of no gap, where a line has a hole."""
    return plot.rounded([np.percentile(gap_ms, level)])[0] if gap_ms.size else None


def _gap_series(result: AnyRun) -> tuple[Array, Array]:
    """Return when each gap ended (seconds since start) and how long it was (ms)."""
    done = [
        np.asarray(r.delivery_times) for r in result.records if r.is_completed and len(r.delivery_times) > 1
    ]
    if not done:
        return np.empty(0), np.empty(0)
    times = np.concatenate([series[1:] for series in done]) - result.start
    return times, np.concatenate([np.diff(series) for series in done]) * 1e3


def _most_telling(times: Array, gap_ms: Array, most: int) -> NDArray[np.int64]:
    """Choose the points to draw: the longest gaps, and every k-th of the others."""
    if times.size <= most:
        return np.arange(times.size)
    longest = np.argsort(gap_ms)[-most // 4 :]
    others = np.linspace(0, times.size - 1, most * 3 // 4).astype(np.int64)
    return np.union1d(longest, others)


def load_figure(result: AnyRun) -> plot.Figure | None:
    """Return open requests and output tokens per second over time."""
    records = [record for record in result.records if record.is_completed]
    if not records:
        return None
    end = max(record.end for record in result.records) - result.start
    edges = np.linspace(0, max(end, 1e-6), NUM_TIME_BINS + 1)
    width = edges[1] - edges[0]
    times = np.concatenate([np.asarray(record.delivery_times) for record in records]) - result.start
    weights = np.concatenate(
        [np.full(len(r.delivery_times), r.num_output_tokens / len(r.delivery_times)) for r in records]
    )
    tokens, _ = np.histogram(times, bins=edges, weights=weights)
    centres = (edges[:-1] + edges[1:]) / 2
    begins = np.sort([record.sent - result.start for record in result.records])
    ends = np.sort([record.end - result.start for record in result.records])
    open_requests = np.searchsorted(begins, centres, side="right") - np.searchsorted(ends, centres)
    fill: dict[str, Any] = {
        "fill": "tozeroy",
        "fillcolor": "rgba(76,141,255,0.15)",
        "colour": plot.COLOURS[0],
        "width": 1.5,
    }
    steps: dict[str, Any] = {"yaxis": "y2", "colour": plot.COLOURS[1], "line": {"shape": "hv"}}
    xs = plot.rounded(centres)
    data = [
        plot.trace("output tokens/s", xs, plot.rounded(tokens / width), **fill),
        plot.trace("open requests", xs, open_requests.tolist(), **steps),
    ]
    right = plot.axis("open requests", **plot.RIGHT, rangemode="tozero")
    return plot.figure("Load over time", data, TIME, "output tokens/s", height=340, yaxis2=right)


def _thinned(records: Sequence[ReportedRequest], limit: int) -> list[ReportedRequest]:
    if len(records) <= limit:
        return list(records)
    return [records[i] for i in np.linspace(0, len(records) - 1, limit).astype(int).tolist()]


def _level_colour(position: int, count: int) -> str:
    """Return a step from blue (the first, lowest level) over violet to red: all readable on any ground."""
    if count == 1:
        return plot.COLOURS[0]
    return f"hsl({round(205 + 155 * position / (count - 1))}, 72%, 60%)"


KEPT_TITLE = "Share of requests within their objectives"


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
    limits = limits_of((run.summary for run in runs), latency.metric)
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
    layout["yaxis"] = plot.axis("% of requests good", range=[0, 109], tickvals=[0, 20, 40, 60, 80, 100])
    layout |= {
        "shapes": [plot.level_line(level)],
        "annotations": [plot.line_name(f"{level:g} % {name}", level)],
    }
    layout |= {"showlegend": len(data) > 1, "height": plot.height_with_legend(data)}
    return drawn | {"data": data}


def capacity_marks(highest: Sequence[tuple[float, float]]) -> plot.Trace:
    """Return marks, where lines still keep what is asked; few are named by their loads."""
    loads, kept = [load for load, _ in highest], [share for _, share in highest]
    marker = {"symbol": "diamond", "size": 11, "color": plot.MISSED_COLOUR}
    look: dict[str, Any] = {"textposition": "bottom left", "textfont": {"size": 11}, "marker": marker}
    text = [f"{load:.3g}" if len(loads) <= MOST_NAMED else "" for load in loads]
    return plot.trace("capacity", loads, kept, "markers+text", hover="%{x:.4g}", text=text, **look)


def goodput_figure(runs: Sequence[AnyRun]) -> plot.Figure | None:
    """Return the good requests per second over the load; None where nothing was asked of them.

    Parameters
    ----------
    runs : all of closed loops, or all of open ones.
    """
    return over_load_figure(runs, lambda summary: summary.score.goodput, "Goodput", unit="good requests/s")


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
