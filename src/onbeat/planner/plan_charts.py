"""Figures of a plan, as plain Plotly descriptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onbeat.planner.buckets import Bucket
from onbeat.planner.plan_task import Fleet, FleetPlan
from onbeat.report.plot import (
    CATEGORIES,
    COLOURS,
    MISSED_COLOUR,
    Figure,
    Trace,
    axis,
    bars,
    figure,
    line_name,
    series,
    trace,
)

_POWERS = {
    "type": "log",
    "tickvals": [2**power for power in range(2, 18, 2)],
    "ticktext": [f"{2**power:,}" for power in range(2, 18, 2)],
}
"""An axis of tokens."""
_COST = "$ an hour"


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
    steps = trace("cheapest at this rate", xs[1:], ys[1:], colour=COLOURS[0], hoverinfo="skip")
    data = [steps, _dots("keeps the promise", COLOURS[0], points)]
    if plan.failed:
        missed = [(plan.needed_rate, fleet.usd_per_hour, fleet.name) for fleet in plan.failed]
        data.append(_dots("does not keep it", MISSED_COLOUR, missed))
    name = line_name(f"{plan.needed_rate:g} needed", 1, "paper") | {"xref": "x", "x": plan.needed_rate}
    ends = {"x0": plan.needed_rate, "x1": plan.needed_rate, "y0": 0, "y1": 1, "yref": "paper"}
    line = {"type": "line", "line": {"color": MISSED_COLOUR, "width": 1, "dash": "dot"}, **ends}
    look: dict[str, Any] = {"annotations": [name], "shapes": [line]}
    return figure("Cost over what it serves", data, "requests/s kept up", _COST, **look)


def objective_figure(plan: FleetPlan, limit: float | None, name: str) -> Figure | None:
    """Return the cost over the objectives as steps, by the estimates, and the fleet that was simulated.

    Parameters
    ----------
    limit : the promised objective that the axis shows, seconds; None shows how much longer all are.
    """
    if len(plan.costs) < 2 or plan.best is None:
        return None
    unit = 1.0 if limit is None else limit * 1e3
    title = f"{name} objective (ms); others in proportion" if limit else "objectives, of the promised ones"
    look = {"customdata": [each.fleet for each in plan.costs], "line": {"shape": "hv"}, "marker": {"size": 6}}
    xs, ys = [each.scale * unit for each in plan.costs], [each.usd_per_hour for each in plan.costs]
    steps = series("by the estimates", 0, xs, ys, hover="%{customdata}: $%{y:.2f}", **look)
    simulated = _dots("simulated", COLOURS[1], [(unit, plan.best.usd_per_hour, plan.best.name)])
    return figure("Cost over the objective", [steps, simulated], title, _COST)


def _dots(name: str, colour: str, points: Sequence[tuple[float, float, str]]) -> Trace:
    xs, ys, texts = ([point[place] for point in points] for place in range(3))
    hover, marker = "%{customdata}<br>%{x:.3g}: $%{y:.2f}", {"color": colour, "size": 9}
    return trace(name, xs, ys, "markers", hover=hover, customdata=texts, marker=marker)


def mix_figure(plan: FleetPlan) -> Figure | None:
    """Return what each fleet's money goes to, by kind of replica."""
    fleets = _shown(plan)
    if not fleets:
        return None
    names = list(dict.fromkeys(unit.name for fleet in fleets for unit, _ in fleet.parts))
    data = []
    for position, name in enumerate(names):
        own = [[(unit, count) for unit, count in fleet.parts if unit.name == name] for fleet in fleets]
        costs = [sum(unit.usd_per_hour * count for unit, count in parts) for parts in own]
        told = {"name": name, "customdata": [sum(count for _, count in parts) for parts in own]}
        colour, hover = COLOURS[position % len(COLOURS)], f"%{{customdata}} of {name}: $%{{x:.2f}} an hour"
        data.append(bars([fleet.name for fleet in fleets], costs, colour, hover, **told))
    height = max(240, 110 + 40 * len(fleets))
    return figure("The mix", data, _COST, CATEGORIES, height=height, barmode="stack")


def use_figure(plan: FleetPlan) -> Figure | None:
    """Return how much of the time replicas compute, of each fleet that keeps the promise."""
    rows = {
        fleet.name if len(fleet.parts) == 1 else f"{fleet.name}: {name}": share * 100
        for fleet in _shown(plan)
        for name, share in fleet.busy.items()
    }
    share = axis("% of the time in a step", range=[0, 100])
    return _bars("Use at the planned rate", rows, COLOURS[2], "%{x:.0f} % of the time", share)


def units_figure(plan: FleetPlan) -> Figure | None:
    """Return what each kind of replica serves for its money, alone."""
    rows = {each.unit.name: each.rate(plan.buckets) / each.unit.usd_per_hour for each in plan.units}
    what = "requests/s for a dollar an hour"
    return _bars("What each serves for its money", rows, COLOURS[3], f"%{{x:.3g}} {what}", what)


def _bars(title: str, rows: dict[str, float], colour: str, hover: str, x: Any) -> Figure | None:
    if not rows:
        return None
    data = [bars(list(rows), list(rows.values()), colour, hover)]
    return figure(title, data, x, CATEGORIES, height=max(240, 110 + 32 * len(rows)))


def bucket_figure(plan: FleetPlan) -> Figure:
    """Return the sizes of the requests, and which kind of replica serves each for the least money."""
    best: dict[str, list[Bucket]] = {}
    for row, bucket in enumerate(plan.buckets):
        rated = [
            (each.rates[row] / each.unit.usd_per_hour, each.unit.name)
            for each in plan.units
            if each.rates[row] > 0
        ]
        best.setdefault(max(rated, default=(0.0, "none in time"))[1], []).append(bucket)
    data = []
    for position, (name, own) in enumerate(best.items()):
        xs, ys = [each.num_prompt_tokens for each in own], [each.num_output_tokens for each in own]
        sizes = [6 + 60 * each.share**0.5 for each in own]
        marker = {"color": COLOURS[position % len(COLOURS)], "size": sizes, "opacity": 0.8}
        look = {"marker": marker, "customdata": [each.share * 100 for each in own]}
        hover = "%{x} in, %{y} out: %{customdata:.1f} % of the requests"
        data.append(trace(name, xs, ys, "markers", hover=hover, **look))
    axes = axis("prompt tokens", **_POWERS), axis("output tokens", **_POWERS)
    title = "Sizes of requests, and who serves each for the least money"
    return figure(title, data, *axes, height=420, showlegend=True)
