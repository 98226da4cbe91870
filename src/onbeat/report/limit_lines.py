"""Objectives in charts: a named line across, so that a reader sees which values keep them."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onbeat.report.charts import MISSED_COLOUR, log_scale
from onbeat.report.page import Figure

MUCH_LARGER = 30
"""Times: beside a value so much larger, others would lie flat on the axis."""


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
    named = layout["yaxis" if axis == "y" else "yaxis2"]
    is_log = named.get("type") == "log"
    ends = [(1, "right"), (0, "left")]  # names of neighbours are apart
    shapes, names = [], []
    for place, (limit, who) in enumerate(limits.items()):
        at, (x, anchor) = limit / unit, ends[place % 2]
        shapes.append(level_line(at, axis))
        names.append(line_name(f"{who} {limit:g} ms", math.log10(at) if is_log else at, axis))
        names[-1] |= {"x": x, "xanchor": anchor}
    layout["shapes"] = [*layout.get("shapes", []), *shapes]
    layout["annotations"] = [*layout.get("annotations", []), *names]
    return figure


def level_line(at: float, axis: str = "y") -> dict[str, Any]:
    """Return a line from side to side."""
    line = {"color": MISSED_COLOUR, "width": 1.5, "dash": "dash"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": axis, "y0": at, "y1": at, "line": line}


def line_name(text: str, at: float, axis: str = "y") -> dict[str, Any]:
    """Return the name of such a line, above its right end."""
    return {
        "xref": "paper",
        "x": 1,
        "xanchor": "right",
        "yref": axis,
        "y": at,
        "yanchor": "bottom",
        "text": html.escape(text),
        "showarrow": False,
        "font": {"size": 11},
    }


def latency_axis(values: Sequence[float]) -> dict[str, Any]:
    """Return an axis from 0, or a logarithmic one where most values would lie flat on it."""
    positive = [value for value in values if value > 0]
    if positive and max(positive) > MUCH_LARGER * min(positive):
        return log_scale(values)
    return {"rangemode": "tozero"}


def drawn_values(lines: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    """Yield the values of all lines of a figure."""
    for line in lines:
        yield from line["y"]
