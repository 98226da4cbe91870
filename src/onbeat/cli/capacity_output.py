"""What `onbeat capacity` found: tables, figures, and the answer in a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

from onbeat.cli.answers import COST, LIMIT, LOAD, OBJECTIVE, cost_text, gpus_text, limit_text, state_text
from onbeat.cli.outputs import is_given
from onbeat.core.errors import ConfigError
from onbeat.planner.capacity import TIGHTER, Capacity, Outcome
from onbeat.planner.cases import Labels, case_name
from onbeat.planner.charts import (
    axes_of,
    capacity_figure,
    capacity_over_figure,
    frontier_figures,
    search_figures,
)
from onbeat.planner.frontier import FrontierPoint
from onbeat.planner.prices import Price, Prices
from onbeat.report.plot import Figure
from onbeat.report.result import Column, Lines, Plots, Result, Section, Table
from onbeat.report.sweep_charts import group_by_load
from onbeat.report.units import NOTHING, exact_percent, significant

SHORT_LOAD = 30.0
"""Seconds: the delays that objectives limit take some of them to build up."""
_OUTCOMES = {
    Outcome.FOUND: "found",
    Outcome.INFEASIBLE: "INFEASIBLE",
    Outcome.UNBOUNDED: "none missed",
    Outcome.INTERRUPTED: "at least",
}


def _rate(value: float) -> str:
    return significant(value, 4) if value else NOTHING


def _interval(ends: tuple[float, float]) -> str:
    low, high = ends
    if not low and high in (0, inf):  # none was found
        return NOTHING
    return f"{_rate(low)} to {_rate(high)}" if isfinite(high) else f"{_rate(low)} or more"


CASE_COLUMNS = (
    *(Column("name", "case", str), Column("outcome", "search", _OUTCOMES.__getitem__)),
    *(Column("request_rate", "requests/s", _rate), Column("request_rate_interval", "interval", _interval)),
    *(Column("num_gpus", "GPUs"), Column("request_rate_per_gpu", "per GPU", _rate)),
    Column("reason", "what limits it", str),
)
FRONTIER_COLUMNS = (
    *(Column("name", "case", str), Column("level", "level", str)),
    *(Column("output_throughput_per_gpu", "tokens/s per GPU"), Column("request_throughput", "requests/s")),
    *(Column("median_tpot_ms", "TPOT P50 (ms)"), Column("p99_itl_ms", "TBT P99 (ms)")),
    *(Column("median_ttft_ms", "TTFT P50 (ms)"), Column("p99_ttft_ms", "TTFT P99 (ms)")),
    *(Column("attainment", "good", exact_percent), Column("error", "why not", str)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityReport:
    """Everything that a run of the command found."""

    title: str
    lead: str
    """What was asked, in a sentence."""
    settings: dict[str, Any]
    """What was asked, for the saved file."""
    capacities: Sequence[Capacity] = ()
    points: Sequence[FrontierPoint] = ()
    promises: Mapping[Labels, str] = field(default_factory=dict)
    """What each case must keep, in words."""
    share: float | None = None
    """Of good requests, that the objective asks for; None of one that names none."""
    is_interrupted: bool = False

    @property
    def best(self) -> Capacity | None:
        """The case with the highest rate per device; None where none has a capacity."""
        found = [each for each in self.capacities if each.outcome is Outcome.FOUND]
        return max(found, key=lambda each: each.rate_per_device, default=None)

    @property
    def is_infeasible(self) -> bool:
        """Whether nothing that was asked for can run or keep the objective."""
        if self.is_interrupted or not (self.capacities or self.points):
            return False
        no_capacity = all(each.outcome is Outcome.INFEASIBLE for each in self.capacities)
        return no_capacity and not any(point.run for point in self.points)


def capacity_result(report: CapacityReport) -> Result:
    """Return what is shown and saved."""
    sections = [Section("", [Plots(search_figures(report.capacities), per_row=2)])]
    cases = Table("Capacity", CASE_COLUMNS, [each.values for each in report.capacities], key="cases")
    figures = Plots(_capacity_figures(report.capacities), per_row=2)
    title = "Cases" if len(report.capacities) > 1 else "The numbers"
    sections.append(Section(title, [cases, figures], is_folded=True))
    loads = group_by_load(report.points, lambda point: point.level.is_closed)
    for load, points in loads.items():
        plots = Plots(frontier_figures(points, report.share), per_row=2)
        sections.append(Section(f"Latency and throughput: {load}", [plots], is_folded=True))
    rows = [point.values for point in report.points]
    columns = FRONTIER_COLUMNS if any(row["error"] for row in rows) else FRONTIER_COLUMNS[:-1]
    runs = Table("", columns, rows, key="frontier")
    sections.append(Section("Latency and throughput", [runs], is_folded=True))
    sections.append(Section("How it was found", [Lines([f"{report.lead}."])], "page"))
    return Result(
        kind="capacity",
        title=report.title,
        answer=[answer_of(report)],
        follows=facts_of(report),
        sections=sections,
        warnings=list(_warnings(report)),
        settings={name: each for name, each in report.settings.get("flags", {}).items() if is_given(each)},
        values={"settings": report.settings},
        is_interrupted=report.is_interrupted,
    )


def _capacity_figures(capacities: Sequence[Capacity]) -> list[Figure | None]:
    # A rate that nothing limited says how far the search went; beside it no other could be seen.
    bounded = [each for each in capacities if each.outcome is not Outcome.UNBOUNDED]
    axes = axes_of([each.labels for each in bounded])
    return [capacity_figure(bounded), *(capacity_over_figure(bounded, axis) for axis in axes)]


def _warnings(report: CapacityReport) -> Iterator[str]:
    for each in report.capacities:
        if each.outcome is Outcome.UNBOUNDED:
            yield (
                f"{case_name(each.labels)}: no rate missed the objective, so the load is too short to "
                "saturate it; raise --num-prompts"
            )
    yield from dict.fromkeys(each.beyond for each in report.capacities if each.beyond)
    highest = max((each.rate for each in report.capacities), default=0.0)
    if highest and (seconds := report.settings["load"]["num_requests"] / highest) < SHORT_LOAD:
        yield (
            f"at {significant(highest, 4)} requests/s the load lasts {seconds:.0f} s, in which queues hardly "
            "grow; raise --num-prompts for the rate that can be kept up"
        )


def answer_of(report: CapacityReport) -> str:
    """Return the answer in a sentence or two."""
    best = report.best or max(report.capacities, key=lambda each: each.rate_per_device, default=None)
    if best is None:
        runs = [point.run for point in report.points if point.run is not None]
        if not runs:
            why = f": {report.points[0].error}" if report.points else ""
            return f"INFEASIBLE: nothing that was asked for can run{why}."
        fastest = max(runs, key=lambda run: run.output_throughput_per_gpu)
        most = f"{fastest.output_throughput_per_gpu:,.0f} output tokens/s per GPU"
        return f"The most is {most}, with {fastest.level.name} ({fastest.series})."
    if best.outcome is Outcome.INFEASIBLE:
        return f"INFEASIBLE: no rate keeps the objective: {best.reason}."
    price = price_of(report, best)
    usd = "" if price is None else f"; ${price.usd_per_hour * best.num_devices:,.2f} an hour"
    gpus = gpus_text(device_of(report, best), best.num_devices)
    serve = "serves" if best.num_devices == 1 else "serve"
    rate = {Outcome.UNBOUNDED: "more than ", Outcome.INTERRUPTED: "at least "}.get(best.outcome, "")
    promise = report.promises.get(best.labels, "")
    kept = f" and {_third_person(promise) if best.num_devices == 1 else promise}" if promise else ""
    which = "" if len(report.capacities) == 1 else f" The best of {len(report.capacities)} cases: "
    which += case_name(best.labels) + "." if which else ""
    return f"{gpus} {serve} {rate}{significant(best.rate)} requests/s{kept}{usd}.{which}"


def _third_person(promise: str) -> str:
    verb, _, rest = promise.partition(" ")
    return f"{verb}s {rest}"


def facts_of(report: CapacityReport) -> list[tuple[str, str]]:
    """Return what follows from the best case, as (question, answer); nothing where none has a capacity."""
    best = report.best
    if best is None:
        return []
    facts = [(COST, _cost(report, best))]
    asides = list(best.asides)
    if asides:
        facts.append((LIMIT, limit_text(asides[0].rate, asides[0].verdict)))
    beyond = [aside for aside in asides[1:] if aside.objectives == 1]
    if beyond:
        most = beyond[-1]
        facts.append(
            (LOAD, f"At {significant(most.rate)} requests/s on the same GPUs, {state_text(most.verdict)}.")
        )
    facts.append((OBJECTIVE, _tighter(report, best)))
    return facts


def _tighter(report: CapacityReport, best: Capacity) -> str:
    for aside in best.asides:
        if aside.objectives == TIGHTER:
            return f"With objectives half as long, {state_text(aside.verdict)} at the same rate."
    own = dict(best.labels)
    tbt = own.pop("slo_tbt_ms", None)
    others = [
        (float(limit), each.rate)
        for each in report.capacities
        if tbt is not None and (labels := dict(each.labels)) and (limit := labels.pop("slo_tbt_ms"))
        if labels == own
    ]
    if len(others) > 1:
        words = [f"{significant(rate)} requests/s within {limit:g} ms" for limit, rate in sorted(others)]
        return f"The highest rate by the time between tokens: {', '.join(words)}."
    return "Nothing was searched. --vary slo-tbt-ms=25,50 compares objectives."


def _cost(report: CapacityReport, best: Capacity) -> str:
    device, price = device_of(report, best), price_of(report, best)
    if price is None:
        return f"No price of {device} is known."
    tokens = best.rate * float(report.settings["load"]["mean_output_tokens"])
    source = ", ".join(filter(None, (price.source, price.date)))
    return f"{cost_text(price.usd_per_hour * best.num_devices, tokens)} Price of a GPU: {source}."


def device_of(report: CapacityReport, each: Capacity) -> str:
    """Return the device of a case."""
    return dict(each.labels).get("device", str(report.settings["flags"]["device"]))


def price_of(report: CapacityReport, each: Capacity) -> Price | None:
    """Return the price of a GPU; None where the table has none."""
    try:
        return Prices().of(device_of(report, each))
    except ConfigError:
        return None
