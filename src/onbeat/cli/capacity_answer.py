"""What the page of `onbeat capacity` says first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onbeat.cli.answers import COST, LIMIT, LOAD, OBJECTIVE, cost_text, gpus_text, limit_text, state_text
from onbeat.core.errors import ConfigError
from onbeat.planner.capacity import TIGHTER, Capacity, Outcome
from onbeat.planner.cases import case_name
from onbeat.planner.prices import Price, Prices
from onbeat.report.units import significant

if TYPE_CHECKING:
    from onbeat.cli.capacity_output import CapacityReport


def answer_of(report: CapacityReport) -> str:
    """Return the answer in a sentence or two."""
    best = report.best or max(report.capacities, key=lambda each: each.rate_per_device, default=None)
    if best is None:
        runs = [point.run for point in report.points if point.run is not None]
        if not runs:
            return "Nothing that was asked for can run."
        fastest = max(runs, key=lambda run: run.output_throughput_per_gpu)
        most = f"{fastest.output_throughput_per_gpu:,.0f} output tokens/s per GPU"
        return f"The most is {most}, with {fastest.level} ({fastest.series})."
    if best.outcome is Outcome.INFEASIBLE:
        return f"No rate keeps the objective: {best.reason}."
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
