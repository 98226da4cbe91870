"""Figures of a plan, as plain Plotly descriptions."""

from __future__ import annotations

from typing import Any

from onbeat.planner.plan_task import Fleet, FleetPlan
from onbeat.report.charts import COLOURS, MISSED_COLOUR
from onbeat.report.limit_lines import line_name
from onbeat.report.page import Figure
from onbeat.report.sweep_charts import height_with_legend

_POWERS = {
    "type": "log",
    "tickvals": [2**power for power in range(2, 18, 2)],
    "ticktext": [f"{2**power:,}" for power in range(2, 18, 2)],
}
"""An axis of tokens."""


def _shown(plan: FleetPlan) -> list[Fleet]:
    return [] if plan.best is None else [plan.best, *plan.alternatives]


def cost_figure(plan: FleetPlan) -> Figure | None:
    """Return the cost of each fleet over the rate that it keeps up, and the staircase of the cheapest.

    Of fleets that failed, the rate is not known; they are drawn at the rate that they missed.
    """
    kept = [fleet for fleet in _shown(plan) if fleet.capacity is not None]
    points = sorted((fleet.capacity[0], fleet.usd_per_hour, fleet.name) for fleet in kept if fleet.capacity)
    if not points:
        return None
    xs, ys = [0.0], [min(cost for _, cost, _ in points)]
    reached = 0.0
    for cost in sorted({cost for _, cost, _ in points}):
        most = max(rate for rate, other, _ in points if other <= cost)
        if most > reached:
            xs += [reached, most]
            ys += [cost, cost]
            reached = most
    steps = {
        "type": "scatter",
        "mode": "lines",
        "name": "cheapest at this rate",
        "x": xs[1:],
        "y": ys[1:],
        "line": {"color": COLOURS[0], "width": 2},
        "hoverinfo": "skip",
    }
    dots = _dots("keeps the promise", COLOURS[0], [(rate, cost, name) for rate, cost, name in points])
    failed = _dots(
        "does not keep it",
        MISSED_COLOUR,
        [(plan.needed_rate, fleet.usd_per_hour, fleet.name) for fleet in plan.failed],
    )
    data = [steps, dots, *([failed] if plan.failed else [])]
    name = line_name(f"{plan.needed_rate:g} needed", 1, "paper")
    ends = {"x0": plan.needed_rate, "x1": plan.needed_rate, "y0": 0, "y1": 1, "yref": "paper"}
    layout = {
        "xaxis": {"title": {"text": "requests/s kept up"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "$ an hour"}, "rangemode": "tozero"},
        "annotations": [name | {"xref": "x", "x": plan.needed_rate}],
        "shapes": [{"type": "line", "line": {"color": MISSED_COLOUR, "width": 1, "dash": "dot"}, **ends}],
        "showlegend": True,
        "height": height_with_legend(data),
    }
    return {"title": "Cost over what it serves", "data": data, "layout": layout}


def objective_figure(plan: FleetPlan, limit: float | None, name: str) -> Figure | None:
    """Return the cost over the objectives as steps, by the estimates, and the fleet that was simulated.

    Parameters
    ----------
    limit : the promised objective that the axis shows, seconds; None shows how much longer all are.
    """
    if len(plan.costs) < 2 or plan.best is None:
        return None
    unit = 1.0 if limit is None else limit * 1e3
    title = (
        "objectives, of the promised ones"
        if limit is None
        else f"{name} objective (ms); others in proportion"
    )
    steps = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "by the estimates",
        "x": [each.scale * unit for each in plan.costs],
        "y": [each.usd_per_hour for each in plan.costs],
        "customdata": [each.fleet for each in plan.costs],
        "line": {"color": COLOURS[0], "width": 2, "shape": "hv"},
        "marker": {"size": 6},
        "hovertemplate": "%{customdata}: $%{y:.2f}<extra></extra>",
    }
    simulated = _dots("simulated", COLOURS[1], [(unit, plan.best.usd_per_hour, plan.best.name)])
    layout = {
        "xaxis": {"title": {"text": title}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "$ an hour"}, "rangemode": "tozero"},
        "showlegend": True,
        "height": height_with_legend([steps, simulated]),
    }
    return {"title": "Cost over the objective", "data": [steps, simulated], "layout": layout}


def _dots(name: str, colour: str, points: list[tuple[float, float, str]]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [x for x, _, _ in points],
        "y": [y for _, y, _ in points],
        "customdata": [text for _, _, text in points],
        "marker": {"color": colour, "size": 9},
        "hovertemplate": "%{customdata}<br>%{x:.3g}: $%{y:.2f}<extra></extra>",
    }


def mix_figure(plan: FleetPlan) -> Figure | None:
    """Return what each fleet's money goes to, by kind of replica."""
    fleets = _shown(plan)
    if not fleets:
        return None
    names = list(dict.fromkeys(unit.name for fleet in fleets for unit, _ in fleet.parts))
    bars = []
    for position, name in enumerate(names):
        costs = [
            sum(unit.usd_per_hour * count for unit, count in fleet.parts if unit.name == name)
            for fleet in fleets
        ]
        counts = [sum(count for unit, count in fleet.parts if unit.name == name) for fleet in fleets]
        bars.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [fleet.name for fleet in fleets],
                "x": costs,
                "customdata": counts,
                "marker": {"color": COLOURS[position % len(COLOURS)]},
                "hovertemplate": "%{customdata} of " + name + ": $%{x:.2f} an hour<extra></extra>",
            }
        )
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "$ an hour"}, "rangemode": "tozero"},
        "yaxis": {"type": "category", "autorange": "reversed", "automargin": True},
        "showlegend": len(bars) > 1,
        "height": max(240, 110 + 40 * len(fleets)),
    }
    return {"title": "The mix", "data": bars, "layout": layout}


def use_figure(plan: FleetPlan) -> Figure | None:
    """Return how much of the time replicas compute, of each fleet that keeps the promise."""
    fleets = [fleet for fleet in _shown(plan) if fleet.busy]
    if not fleets:
        return None
    rows = [
        (fleet.name if len(fleet.parts) == 1 else f"{fleet.name}: {name}", share)
        for fleet in fleets
        for name, share in fleet.busy.items()
    ]
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": [name for name, _ in rows],
        "x": [share * 100 for _, share in rows],
        "marker": {"color": COLOURS[2]},
        "hovertemplate": "%{x:.0f} % of the time<extra>%{y}</extra>",
    }
    layout = {
        "xaxis": {"title": {"text": "% of the time in a step"}, "range": [0, 100]},
        "yaxis": {"type": "category", "autorange": "reversed", "automargin": True},
        "height": max(240, 110 + 32 * len(rows)),
    }
    return {"title": "Use at the planned rate", "data": [bars], "layout": layout}


def units_figure(plan: FleetPlan) -> Figure | None:
    """Return what each kind of replica serves for its money, alone."""
    if not plan.units:
        return None
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": [each.unit.name for each in plan.units],
        "x": [each.rate(plan.buckets) / each.unit.usd_per_hour for each in plan.units],
        "marker": {"color": COLOURS[3]},
        "hovertemplate": "%{x:.3g} requests/s for a dollar an hour<extra>%{y}</extra>",
    }
    layout = {
        "xaxis": {"title": {"text": "requests/s for a dollar an hour"}, "rangemode": "tozero"},
        "yaxis": {"type": "category", "autorange": "reversed", "automargin": True},
        "height": max(240, 110 + 32 * len(plan.units)),
    }
    return {"title": "Kinds of replica, alone", "data": [bars], "layout": layout}


def bucket_figure(plan: FleetPlan) -> Figure:
    """Return the sizes of the requests, and which kind of replica serves each for the least money."""
    data = []
    best = {bucket.name: "none" for bucket in plan.buckets}
    for row, bucket in enumerate(plan.buckets):
        rated = [
            (each.rates[row] / each.unit.usd_per_hour, each.unit.name)
            for each in plan.units
            if each.rates[row] > 0
        ]
        best[bucket.name] = max(rated, default=(0.0, "none in time"))[1]
    for position, name in enumerate(dict.fromkeys(best.values())):
        own = [bucket for bucket in plan.buckets if best[bucket.name] == name]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [bucket.num_prompt_tokens for bucket in own],
                "y": [bucket.num_output_tokens for bucket in own],
                "customdata": [bucket.share * 100 for bucket in own],
                "marker": {
                    "color": COLOURS[position % len(COLOURS)],
                    "size": [6 + 60 * bucket.share**0.5 for bucket in own],
                    "opacity": 0.8,
                },
                "hovertemplate": "%{x} in, %{y} out: %{customdata:.1f} % of the requests<extra>"
                + name
                + "</extra>",
            }
        )
    layout = {
        "xaxis": {"title": {"text": "prompt tokens"}, **_POWERS},
        "yaxis": {"title": {"text": "output tokens"}, **_POWERS},
        "showlegend": True,
        "height": 420,
    }
    return {
        "title": "Sizes of requests, and who serves each for the least money",
        "data": data,
        "layout": layout,
    }
