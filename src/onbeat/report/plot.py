"""Figures as plain Plotly descriptions: numbers in, dictionaries out.

Colours of text and grid are left to the page, which knows whether it is shown dark or light.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Figure = dict[str, Any]
"""`title` (text), `data` and `layout` as Plotly takes them; colours of text and grid are the page's."""
Trace = dict[str, Any]

# Colour-blind safe and readable on white and on near-black.
COLOURS = ("#4c8dff", "#f2a23a", "#2fb58a", "#b07cf0", "#ef6f6c", "#35b6d4", "#d98cc0", "#a3a847")
QUEUE_COLOUR = "#9aa3ad"
WAIT_COLOUR = "#f2a23a"
STREAM_COLOUR = "#4c8dff"
MISSED_COLOUR = "#ef6f6c"
MUCH_LARGER = 30
"""Times: beside a value so much larger, others would lie flat on the axis."""
RIGHT = {"overlaying": "y", "side": "right", "showgrid": False, "tickmode": "auto"}
CATEGORIES = {"type": "category", "autorange": "reversed", "automargin": True}


def figure(title: str, data: Sequence[Trace], x: Any, y: Any, *, height: int = 0, **layout: Any) -> Figure:
    """Return a figure.

    Parameters
    ----------
    x, y : axes; a text is the title of an axis from 0 on.
    height : pixels; 0 leaves the plot the same room whatever its legend takes.
    layout : more of it; the legend is shown where there are several traces, unless it says otherwise.
    """
    axes = {"xaxis": axis(x) if isinstance(x, str) else x, "yaxis": axis(y) if isinstance(y, str) else y}
    look = {"showlegend": len(data) > 1, "height": height or height_with_legend(data)}
    return {"title": title, "data": list(data), "layout": axes | look | layout}


def axis(text: str, **look: Any) -> dict[str, Any]:
    """Return an axis from 0 on, unless `look` says otherwise."""
    return {"title": {"text": text}, **(look or {"rangemode": "tozero"})}


def trace(name: str, x: Any, y: Any, mode: str = "lines", *, hover: str = "", **look: Any) -> Trace:
    """Return lines or points.

    Parameters
    ----------
    hover : what is shown of a point; the name of the trace stands beside it.
    look : `line`, `marker` and more; `colour` and `width` of the line.
    """
    if "colour" in look:
        look["line"] = {"color": look.pop("colour"), "width": look.pop("width", 2), **look.get("line", {})}
    told = {"hovertemplate": hover + "<extra>%{fullData.name}</extra>"} if hover else {}
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, **told, **look}


def series(name: str, position: int, x: Any, y: Any, *, hover: str, **look: Any) -> Trace:
    """Return one line with its points, in the colour of its position."""
    style = {"colour": COLOURS[position % len(COLOURS)], "marker": {"size": 7}} | look
    return trace(name, x, y, "lines+markers", hover=hover, **style)


def bars(names: Sequence[str], values: Sequence[float], colour: str, hover: str, **look: Any) -> Trace:
    """Return bars from left to right: names are long."""
    shown = {"marker": {"color": colour}, "hovertemplate": f"{hover}<extra>%{{y}}</extra>"}
    return {"type": "bar", "orientation": "h", "y": names, "x": values} | shown | look


def rounded(values: Any) -> list[float]:
    """Five significant digits are more than a plot shows, and keep the page small."""
    return [float(f"{value:.5g}") for value in np.asarray(values, dtype=np.float64).tolist()]


def height_with_legend(lines: Sequence[Trace]) -> int:
    """Return the height of a figure that leaves its plot the same room whatever its legend takes, pixels."""
    longest = max(len(line.get("name", "")) for line in lines)
    per_row = max(1, 480 // (45 + 6 * longest))
    return 320 + 20 * -(-len(lines) // per_row)


def log_scale(values: Iterable[float]) -> dict[str, Any]:
    """Return a logarithmic axis for values that spread over more than a decade, else a linear one."""
    positive = [value for value in values if value > 0]
    if not positive or max(positive) < 10 * min(positive):
        return {"type": "linear"}
    digits = (1, 2, 5) if max(positive) < 1000 * min(positive) else (1,)  # more would not fit side by side
    ticks = [digit * 10.0**power for power in range(-4, 7) for digit in digits]
    ends = [math.log10(min(positive)) - 0.05, math.log10(max(positive)) + 0.05]
    return {"type": "log", "range": ends, "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def latency_axis(values: Iterable[float]) -> dict[str, Any]:
    """Return an axis from 0, or a logarithmic one where most values would lie flat on it."""
    positive = [value for value in values if value > 0]
    if positive and max(positive) > MUCH_LARGER * min(positive):
        return log_scale(positive)
    return {"rangemode": "tozero"}


def with_limits(
    figure: Figure | None, limits: Mapping[float, str], *, unit: float = 1.0, axis: str = "y"
) -> Figure | None:
    """Return a figure with a level line for each objective, named at its end.

    Parameters
    ----------
    limits : objective, ms -> whose it is.
    unit : of the axis, ms.
    axis : that has the values: `y`, or `y2` at the right.
    """
    if figure is None:
        return None
    layout = figure["layout"]
    is_log = layout["yaxis" if axis == "y" else "yaxis2"].get("type") == "log"
    ends = [{"x": 1, "xanchor": "right"}, {"x": 0, "xanchor": "left"}]  # names of neighbours are apart
    for place, (limit, who) in enumerate(limits.items()):
        at = limit / unit
        name = line_name(f"{who} {limit:g} ms", math.log10(at) if is_log else at, axis)
        layout.setdefault("shapes", []).append(level_line(at, axis))
        layout.setdefault("annotations", []).append(name | ends[place % 2])
    return figure


def level_line(at: float, axis: str = "y") -> dict[str, Any]:
    """Return a line from side to side."""
    line = {"color": MISSED_COLOUR, "width": 1.5, "dash": "dash"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": axis, "y0": at, "y1": at, "line": line}


def line_name(text: str, at: float, axis: str = "y") -> dict[str, Any]:
    """Return the name of such a line, above its right end."""
    place = {"xref": "paper", "x": 1, "xanchor": "right", "yref": axis, "y": at, "yanchor": "bottom"}
    return {**place, "text": html.escape(text), "showarrow": False, "font": {"size": 11}}
