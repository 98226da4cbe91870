"""What `onbeat capacity` found: tables, figures, and the answer in a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import numpy as np

from onbeat.cli.answers import COST, LIMIT, cost_text, gpus_text, limit_text, state_text, third_person
from onbeat.core.errors import ConfigError
from onbeat.planner.capacity import Capacity, SearchEnd
from onbeat.planner.cases import Labels, case_name, short_name
from onbeat.planner.prices import Price, Prices
from onbeat.report.charts import KEPT_TITLE, capacity_marks, with_promise
from onbeat.report.plot import QUEUE_COLOUR, Figure, axis, figure, latency_axis, rounded, series, with_limits
from onbeat.report.result import Column, Lines, Plots, Result, Section, Table
from onbeat.report.units import NOTHING, rate_text, significant, too_short

_OUTCOMES = {
    SearchEnd.FOUND: "found",
    SearchEnd.INFEASIBLE: "INFEASIBLE",
    SearchEnd.UNBOUNDED: "none missed",
    SearchEnd.INTERRUPTED: "at least",
}


def _rate(value: float) -> str:
    return significant(value, 4) if value else NOTHING


def _interval(ends: tuple[float, float]) -> str:
    low, high = ends
    if not low and high in (0, inf):  # none was found
        return NOTHING
    return f"{_rate(low)} to {_rate(high)}" if isfinite(high) else f"{_rate(low)} or more"


def _columns(unit: str) -> list[Column]:
    return [
        *(Column("name", "case", str), Column("outcome", "search", _OUTCOMES.__getitem__)),
        Column("request_rate", f"{unit}s/s", _rate),
        Column("request_rate_interval", "interval", _interval),
        *(Column("num_gpus", "GPUs"), Column("request_rate_per_gpu", "per GPU", _rate)),
        Column("reason", "what limits it", str),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityReport:
    """Everything that a run of the command found."""

    title: str
    lead: str
    """What was asked, in a sentence."""
    settings: dict[str, Any]
    """What was asked, for the saved file."""
    capacities: Sequence[Capacity]
    """One or more."""
    promises: Mapping[Labels, str]
    """What each case must keep, in words."""
    unit: str = "request"
    """What rates count: requests, or jobs of several."""

    @property
    def best(self) -> Capacity | None:
        """The case with the highest rate per device; None where none has a capacity."""
        found = [each for each in self.capacities if each.outcome is SearchEnd.FOUND]
        return max(found, key=lambda each: each.rate_per_device, default=None)

    @property
    def is_infeasible(self) -> bool:
        """Whether nothing that was asked for can run or keep the objective."""
        return all(each.outcome is SearchEnd.INFEASIBLE for each in self.capacities)

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C ended a search."""
        return any(each.outcome is SearchEnd.INTERRUPTED for each in self.capacities)


def capacity_result(report: CapacityReport) -> Result:
    """Return what is shown and saved."""
    cases = Table("Capacity", _columns(report.unit), [each.values for each in report.capacities], key="cases")
    # A rate that nothing limited says how far the search went; beside it no other could be seen.
    bounded = [each for each in report.capacities if each.outcome is not SearchEnd.UNBOUNDED]
    axes = dict.fromkeys(name for each in bounded for name, _ in each.labels)
    figures = Plots([capacity_over_figure(bounded, name, unit=report.unit) for name in axes], per_row=2)
    title = "Cases" if len(report.capacities) > 1 else "The numbers"
    return Result(
        kind="capacity",
        title=report.title,
        answer=[answer_of(report)],
        follows=facts_of(report),
        sections=[
            Section("", [Plots(search_figures(report.capacities, unit=report.unit), per_row=2)]),
            Section(title, [cases, figures], is_folded=True),
            Section("How it was found", [Lines([f"{report.lead}."])], "page"),
        ],
        warnings=list(_warnings(report)),
        settings=report.settings["flags"],
        values={"settings": report.settings},
        is_interrupted=report.is_interrupted,
    )


# ---- figures ----


def search_figures(capacities: Sequence[Capacity], *, unit: str = "request") -> list[Figure]:
    """Return what the objective limits over the request rate, by the runs of the searches, a line a case.

    Shares of good requests and latencies have a figure each, with the limit and the capacities.
    """
    named = (measure.name for each in capacities for _, verdict in each.curve for measure in verdict.measures)
    figures = (_search_figure(capacities, name, f"{unit}s/s") for name in dict.fromkeys(named))
    return [drawn for drawn in figures if drawn is not None]


def _search_figure(capacities: Sequence[Capacity], name: str, rate: str) -> Figure | None:
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
        xs, ys = [each_rate for each_rate, _ in own], [measure.value * scale for _, measure in own]
        hover = f"%{{y:.4g}} {unit} at %{{x:.4g}} {rate}"
        lines.append(series(case_name(each.labels), position, rounded(xs), rounded(ys), hover=hover))
        limits.add(own[0][1].limit)
        if each.outcome is SearchEnd.FOUND:
            found.append((each.rate, float(np.interp(each.rate, xs, ys))))
    if not lines:
        return None
    if is_share:
        return with_promise(figure(KEPT_TITLE, lines, rate, "%"), max(limits), found)
    drawn_ms = [value for line in lines for value in line["y"]]
    ms = axis("ms", **latency_axis([*drawn_ms, *(limit * 1e3 for limit in limits)]))
    drawn = figure(f"{name} over the request rate", lines, rate, ms)
    drawn["data"].append(capacity_marks(found))
    return with_limits(drawn, {limit * 1e3: "limit" for limit in sorted(limits)})


def capacity_over_figure(
    capacities: Sequence[Capacity], name: str, *, unit: str = "request"
) -> Figure | None:
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
        if value is not None and each.outcome is not SearchEnd.INTERRUPTED:
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
        hover = f"%{{y:.3f}} {unit}s/s per GPU at %{{x}}<br>%{{customdata}}"
        lines.append(series(others, position, xs, ys, hover=hover, **told))
    title = short_name(name)
    return figure(f"Capacity over {title}", lines, axis(title, **_ticks(values)), f"{unit}s/s per GPU")


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


# ---- sentences ----


def _warnings(report: CapacityReport) -> Iterator[str]:
    for each in report.capacities:
        if each.outcome is SearchEnd.UNBOUNDED:
            yield (
                f"{case_name(each.labels)}: no rate missed the objective, so the load is too short to "
                "saturate it; raise --num-prompts"
            )
    yield from dict.fromkeys(each.warning for each in report.capacities if each.warning)
    rates = (each.rate for each in report.capacities if each.outcome is not SearchEnd.UNBOUNDED)
    highest = max(rates, default=0.0)
    load = report.settings["load"]
    yield from too_short(load["num_requests"] / load.get("requests_per_job", 1), highest, of=report.unit)


def answer_of(report: CapacityReport) -> str:
    """Return the answer in a sentence or two."""
    best = report.best or max(report.capacities, key=lambda each: each.rate_per_device)
    if best.outcome is SearchEnd.INFEASIBLE:
        return f"INFEASIBLE: no rate keeps the objective: {best.reason}."
    price = price_of(report, best)
    usd = "" if price is None else f"; ${price.usd_per_hour * best.num_devices:,.2f} an hour"
    gpus = gpus_text(device_of(report, best), best.num_devices)
    if best.outcome is SearchEnd.UNBOUNDED:
        return f"No rate missed the objective: the load is too short to tell what {gpus} can serve."
    rate = "at least " if best.outcome is SearchEnd.INTERRUPTED else ""
    does = f"serve {rate}{rate_text(best.rate, of=report.unit)}", report.promises[best.labels]
    serve, keep = map(third_person, does) if best.num_devices == 1 else does
    which = "" if len(report.capacities) == 1 else f" The best of {len(report.capacities)} cases: "
    which += case_name(best.labels) + "." if which else ""
    return f"{gpus} {serve} and {keep}{usd}.{which}"


def facts_of(report: CapacityReport) -> list[tuple[str, str]]:
    """Return what follows from the best case, as (question, answer); nothing where none has a capacity."""
    best = report.best
    if best is None:
        return []
    facts = [(COST, _cost(report, best))]
    if best.beyond:
        missed, *_, most = best.beyond[0], *best.beyond
        text = limit_text(missed.rate, missed.verdict, of=report.unit)
        if most is not missed:
            text += f" At {rate_text(most.rate, of=report.unit)}, {state_text(most.verdict)}."
        facts.append((LIMIT, text))
    return facts


def _cost(report: CapacityReport, best: Capacity) -> str:
    device, price = device_of(report, best), price_of(report, best)
    if price is None:
        return f"No price of {device} is known."
    load = report.settings["load"]
    tokens = best.rate * load.get("requests_per_job", 1) * load["mean_output_tokens"]
    return f"{cost_text(price.usd_per_hour * best.num_devices, tokens)} Price of a GPU: {price.text}."


def device_of(report: CapacityReport, each: Capacity) -> str:
    """Return the device of a case."""
    return dict(each.labels).get("device", str(report.settings["flags"]["device"]))


def price_of(report: CapacityReport, each: Capacity) -> Price | None:
    """Return the price of a GPU; None where the table has none."""
    try:
        return Prices().of(device_of(report, each))
    except ConfigError:
        return None
