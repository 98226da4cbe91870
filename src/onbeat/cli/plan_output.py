"""What `onbeat plan` found: tables, figures, sentences, and the answer."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from onbeat.cli.answers import COST, LIMIT, cost_text, gpus_text, promise_text, third_person
from onbeat.cli.outputs import shown_settings
from onbeat.planner.plan_charts import (
    bucket_figure,
    cost_figure,
    mix_figure,
    objective_figure,
    units_figure,
    use_figure,
)
from onbeat.planner.plan_task import Fleet, FleetPlan, PlanTask
from onbeat.planner.prices import Prices
from onbeat.planner.units import device_text
from onbeat.report.objectives import classes_text
from onbeat.report.result import Column, Lines, Part, Plots, Result, Section, Table
from onbeat.report.units import significant
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import POOL_BANDWIDTH

SHORT_RUN = 30.0
"""Seconds."""
FLEET_LEGEND = (
    "Watts: what the GPUs draw at most. In time: requests that keep their objectives. Most requests/s: up to "
    "here the fleet keeps the promise. Limit: what more load makes late first. Busy: share of the time in a "
    "step."
)
LEAST_HEADROOM = 0.1
"""Of the promised rate: with less, errors of predicted step times break the promise (docs/plan.md)."""
ROOM_CURE = "more --repeats narrow the interval, and a higher --headroom plans with room"
MOST_FAILED = 8
"""Rows of the table of fleets that do not do."""
LIMITS = {
    "TTFT": ("first token", "the time to the first token (TTFT)"),
    "TBT": ("later tokens", "the time between tokens (TBT)"),
    "E2E": ("last token", "the time to the last token (E2E)"),
    "refused": ("queue", "a place in the queue: they are refused"),
}
"""What requests miss, as `Fleet.binds` names it, for a cell and for a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Everything that a run of the command found."""

    args: argparse.Namespace
    base: Deployment
    """What all units have in common."""
    task: PlanTask
    plan: FleetPlan
    prices: Prices

    @property
    def title(self) -> str:
        return f"A fleet for {self.args.model}"

    @property
    def promise(self) -> str:
        """What is to be kept, in words."""
        classes = self.task.load.classes
        limits = classes_text({each.name: each.slo for each in classes})
        room = f", with {self.task.headroom * 100:g} % of headroom" if self.task.headroom else ""
        return f"{self.task.objective.share * 100:g} % of {self.task.rate:g} requests/s within {limits}{room}"

    @property
    def lead(self) -> str:
        load, runs = self.task.load, self.task.runs
        return (
            f"{self.promise}; {load.name} load, mean {load.num_prompt_tokens.mean():.0f} tokens in and "
            f"{load.num_output_tokens.mean():.0f} out; each fleet is simulated whole, {len(runs)} run(s) of "
            f"{len(runs[0])} requests, with the live router and scheduler"
        )


# ---- tables ----


def _range(low: float, high: float) -> str:
    return f"{significant(low)} " + (f"to {significant(high)}" if isfinite(high) else "or more")


def _ends(share: tuple[float, float, float]) -> str:
    return f"{share[1] * 100:.1f} to {share[2] * 100:.1f}"


FLEET_COLUMNS = (
    *(Column("name", "fleet", str), Column("usd_per_hour", "$/h", "{:.2f}".format)),
    *(Column("watts", "watts", "{:,.0f}".format), Column("attainment", "in time", lambda s: f"{s[0]:.1%}")),
    *(Column("attainment", "95 % interval", _ends),),
    *(Column("capacity", "most requests/s", lambda rates: significant(rates[0])),),
    *(Column("capacity", "95 % interval", lambda rates: _range(*rates[1:])),),
    *(Column("headroom", "headroom", "{:+.0%}".format), Column("limit", "limit", str)),
    *(Column("busy", "busy", lambda own: ", ".join(f"{share:.0%}" for share in own.values())),),
)
FAILED_COLUMNS = (
    *(Column("name", "fleet", str), Column("usd_per_hour", "$/h", "{:.2f}".format)),
    *(Column("reason", "why not", str),),
)
UNIT_COLUMNS = (
    *(Column("name", "replica", str), Column("usd_per_hour", "$/h", "{:.2f}".format)),
    *(Column("request_rate", "requests/s", significant), Column("per_usd", "per $/h", significant)),
    *(Column("why_not", "why not", str),),
)


def fleet_values(fleet: Fleet, rate: float) -> dict[str, Any]:
    """Return a fleet as a file has it.

    Parameters
    ----------
    rate : promised, requests per second.
    """
    return {
        "name": fleet.name,
        "fleet": {unit.name: count for unit, count in fleet.parts},
        "pools": None if fleet.pools is None else str(fleet.pools),
        "usd_per_hour": fleet.usd_per_hour,
        "watts": fleet.watts,
        "is_kept": fleet.is_kept,
        "attainment": fleet.attainment,
        "by_class": fleet.by_class,
        "capacity": fleet.capacity,
        "headroom": None if fleet.capacity is None else fleet.capacity[0] / rate - 1,
        "binds": fleet.binds,
        "limit": LIMITS[fleet.binds][0] if fleet.binds else None,
        "busy": fleet.busy,
        "reason": fleet.reason,
        "runs": fleet.runs,
    }


def unit_values(plan: FleetPlan) -> Iterator[dict[str, Any]]:
    """Yield the kinds of replica, alone; those that take no part say why."""
    for each in plan.units:
        rate, cost = each.rate(plan.buckets), each.unit.usd_per_hour
        yield {"name": each.unit.name, "usd_per_hour": cost, "request_rate": rate, "per_usd": rate / cost}
    for name, why in plan.left_out.items():
        yield {"name": name, "why_not": why}


def plan_result(report: PlanReport) -> Result:
    """Return what is shown and saved."""
    plan = report.plan
    fleets = [] if plan.best is None else [plan.best, *plan.alternatives]
    kept, failed = ([fleet_values(each, plan.rate) for each in own] for own in (fleets, plan.failed))
    dearest = sorted(failed, key=lambda fleet: -fleet["usd_per_hour"])[:MOST_FAILED]
    units = Table("", UNIT_COLUMNS, list(unit_values(plan)), key="units")
    keeping = Table("", FLEET_COLUMNS, kept, caption=FLEET_LEGEND)
    costs = Plots([objective_figure(plan, *_shown_objective(report)), cost_figure(plan)], per_row=2)
    mixes = Plots([mix_figure(plan), use_figure(plan)], per_row=2)
    folded: dict[str, list[Part]] = {
        "Kinds of replica, alone": [units, Plots([units_figure(plan)], per_row=2)],
        "Fleets that do not keep the promise": [Table("", FAILED_COLUMNS, dearest)],
        "Fleets that keep the promise": [keeping, mixes],
        "What the search says": [Lines(conclusions(report))],
        "The load": [Plots([bucket_figure(plan)], per_row=2)],
    }
    return Result(
        kind="plan",
        title=report.title,
        answer=[answer_of(report)],
        follows=facts_of(report),
        sections=[
            Section("", [costs]),
            *(Section(title, parts, is_folded=True) for title, parts in folded.items()),
            Section("How it was found", [Lines([f"{report.lead}."])], "page"),
        ],
        warnings=[*_short_run(report), *warnings_of(report)],
        settings=shown_settings(report.args, hidden=("json", "report", "config", "output")),
        values=_values(report, kept, failed),
    )


def _values(
    report: PlanReport, kept: list[dict[str, Any]], failed: list[dict[str, Any]]
) -> Mapping[str, Any]:
    plan, share = report.plan, report.task.objective.share
    return {
        "promise": {"request_rate": plan.rate, "attainment": share, "text": report.promise},
        "best": kept[0] if kept else None,
        "alternatives": kept[1:],
        "failed": failed,
        "costs_by_estimate": plan.costs,
        "cost_bound": plan.cost_bound,
        "is_exhausted": plan.is_exhausted,
        "warnings": warnings_of(report),
        "infeasible": plan.infeasible or None,
        "nearest": plan.nearest,
    }


def _shown_objective(report: PlanReport) -> tuple[float | None, str]:
    """Return the objective that an axis shows: the TBT of the only class, else its TTFT, else none."""
    classes = report.task.load.classes
    if len(classes) != 1:
        return None, ""
    slo = classes[0].slo
    return (slo.tbt, "TBT") if slo.tbt is not None else (slo.ttft, "TTFT")


# ---- sentences ----


def answer_of(report: PlanReport) -> str:
    """Return the answer in a sentence."""
    plan, task = report.plan, report.task
    promise = promise_text(task.objective, {each.name: each.slo for each in task.load.classes})
    if plan.best is None:
        return f"No fleet of these GPUs can serve {plan.rate:g} requests/s and {promise}: {plan.infeasible}."
    gpus = " and ".join(
        gpus_text(unit.device, unit.num_devices * count)
        + (f" ({count} replicas of {unit.num_devices})" if unit.num_devices > 1 and count > 1 else "")
        for unit, count in plan.best.parts
    )
    is_one = plan.best.num_replicas == 1 and plan.best.parts[0][0].num_devices == 1
    does = f"serve {plan.rate:g} requests/s", promise
    serve, keep = map(third_person, does) if is_one else does
    return f"{gpus} {serve} and {keep}; ${plan.best.usd_per_hour:,.2f} an hour."


def facts_of(report: PlanReport) -> list[tuple[str, str]]:
    """Return what follows, as (question, answer); of no fleet, what could be kept instead."""
    plan, best = report.plan, report.plan.best
    if best is None:
        return [("What could be kept", "; or ".join(plan.nearest) + ".")] if plan.nearest else []
    tokens = plan.rate * float(report.task.load.num_output_tokens.mean())
    cost = f"{cost_text(best.usd_per_hour, tokens)} The GPUs draw at most {best.watts:,.0f} watts."
    return [(COST, cost), (LIMIT, limit_of(best, plan.rate))]


def conclusions(report: PlanReport) -> list[str]:
    """Return what follows, in sentences."""
    plan = report.plan
    if plan.best is None:
        lines = [f"INFEASIBLE: {plan.infeasible}"]
        if plan.nearest:
            lines.append("Nearest promises that would be kept: " + "; or ".join(plan.nearest))
        return lines
    best = plan.best
    lines = [
        f"Plan: {best.name}, which is {_spelled(best)}. "
        f"The cost is ${best.usd_per_hour:.2f} an hour, and the GPUs draw at most {best.watts:,.0f} watts.",
        _verified(report, best),
        limit_of(best, plan.rate),
    ]
    lines += _classes(best, report.task.objective.share)
    alone = [fleet for fleet in plan.alternatives if len(fleet.parts) == 1]
    apart = [fleet for fleet in plan.failed if fleet.pools is not None]
    if best.pools is not None:
        other = next(fleet for fleet in plan.alternatives if fleet.pools is None)
        saved = 1 - best.usd_per_hour / other.usd_per_hour
        lines.append(
            f"Prompts and generation on replicas of their own cost {saved * 100:.0f} % less than "
            f"{other.name}, the cheapest fleet that does both everywhere, over a link of "
            f"{POOL_BANDWIDTH * 8e-9:g} Gbit/s."
        )
    elif best.num_replicas == 1:
        others = min((fleet.usd_per_hour for fleet in plan.alternatives), default=None)
        more = "" if others is None else f" The next fleet that keeps the promise costs ${others:.2f}."
        lines.append(f"This one replica is cheaper than every mix that keeps the promise.{more}")
    elif len(best.parts) > 1 and alone:
        saved = 1 - best.usd_per_hour / alone[0].usd_per_hour
        lines.append(
            f"The mix costs {saved * 100:.0f} % less than {alone[0].name}, the cheapest of equal replicas."
        )
    elif len(best.parts) > 1:
        lines.append("No fleet of equal replicas was found that keeps the promise.")
    elif len(plan.units) > 1:
        lines.append("No cheaper mix that was simulated keeps the promise.")
    if apart and best.pools is None:
        lines.append(
            f"Prompts and generation apart do not keep it with one replica fewer; {len(apart)} tried."
        )
    lines.append(
        "By the estimates, no cheaper fleet is left to try."
        if plan.is_exhausted
        else f"Cheaper mixes are left that nobody simulated, from ${plan.cost_bound:.2f} an hour on; "
        "raise --candidates to try them."
    )
    return lines


def warnings_of(report: PlanReport) -> list[str]:
    """Return why the chosen fleet may break its promise, in sentences."""
    best = report.plan.best
    if best is None:
        return []
    beyond = [run.beyond for run in best.runs if run.beyond]
    return [
        *beyond[:1],
        *_scarce(best, report.plan.rate),
        *_unsure(best, report.plan.rate, report.task.objective.share),
    ]


def _short_run(report: PlanReport) -> list[str]:
    """Say that runs are too short for queues to grow, if they are."""
    rate = report.plan.rate
    seconds = len(report.task.runs[0]) / rate
    if report.plan.best is None or seconds >= SHORT_RUN:
        return []
    return [
        f"at {rate:g} requests/s a run lasts {seconds:.0f} s, in which queues hardly grow; "
        "raise --num-prompts"
    ]


def _scarce(fleet: Fleet, rate: float) -> list[str]:
    """Say that a fleet has little headroom, if it has."""
    if fleet.capacity is None or fleet.capacity[0] >= rate * (1 + LEAST_HEADROOM) - 1e-9:
        return []
    return [
        f"the headroom is {(fleet.capacity[0] / rate - 1) * 100:.0f} %, below {LEAST_HEADROOM * 100:g} %. "
        f"Steps that take a little longer than predicted would break the promise; {ROOM_CURE}"
    ]


def _unsure(fleet: Fleet, rate: float, share: float) -> list[str]:
    """Say which intervals reach below what is promised."""
    lines = []
    if fleet.capacity is not None and fleet.capacity[1] < rate:
        interval = _range(fleet.capacity[1], fleet.capacity[2])
        lines.append(
            f"the promise is not sure: the 95 % interval of the rate that the fleet keeps up, {interval} "
            f"requests/s, begins below the promised {rate:g}; {ROOM_CURE}"
        )
    if fleet.attainment is not None and fleet.attainment[1] < share:
        low, high = (each * 100 for each in fleet.attainment[1:])
        lines.append(
            f"the promise is not sure: the 95 % interval of the good requests, {low:.1f} to {high:.1f} %, "
            f"begins below the promised {share * 100:g} %; {ROOM_CURE}"
        )
    return lines


def _classes(best: Fleet, share: float) -> list[str]:
    """Say how each of several classes of objectives fares; the promise is of all requests together."""
    shares = best.by_class
    if len(shares) < 2:
        return []
    each = ", ".join(f"{name} {good * 100:.1f} %" for name, good in shares.items())
    behind = [name for name, good in shares.items() if good < share]
    note = (
        f"; {' and '.join(behind)} alone would miss the promise, which is of all together" if behind else ""
    )
    return [f"In time by class: {each}{note}."]


def _spelled(fleet: Fleet) -> str:
    """Return a fleet in words: `3 replicas of 2 L4 each`."""
    return " and ".join(
        f"{count} replica{'s' * (count > 1)} of {unit.num_devices} {device_text(unit.device)}"
        + " each" * (count > 1)
        for unit, count in fleet.parts
    )


def _verified(report: PlanReport, fleet: Fleet) -> str:
    attainment = fleet.attainment
    assert attainment is not None, "a fleet that keeps the promise has finished its runs"
    mean, low, high = (share * 100 for share in attainment)
    runs = len(fleet.runs)
    where = (
        f"The 95 % interval over {runs} runs is {low:.1f} to {high:.1f} %."
        if runs > 1
        else "This is one run."
    )
    promised = report.task.objective.share * 100
    return f"Simulated, {mean:.1f} % of the requests are in time; {promised:g} % are promised. {where}"


def limit_of(fleet: Fleet, rate: float) -> str:
    """Return up to which rate a fleet keeps the promise, and what is missed beyond it."""
    what = LIMITS[fleet.binds][1] if fleet.binds else ""
    if fleet.capacity is None:
        return f"The first thing that more load would miss is {what}." if what else "Nothing was missed."
    most = fleet.capacity[0]
    more = f", {(most / rate - 1) * 100:.0f} % more than asked for" if most > rate else ""
    room = f"The fleet keeps the promise up to {significant(most)} requests/s{more}."
    return f"{room} Beyond that, most late requests miss {what}." if what else room
