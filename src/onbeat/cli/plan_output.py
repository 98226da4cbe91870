"""What `onbeat plan` found: tables, figures, sentences, and the answer."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from onbeat.cli.answers import COST, LIMIT, cost_text, gpus_text, promise_text, third_person
from onbeat.cli.outputs import shown_settings
from onbeat.core.errors import counted
from onbeat.planner.plan_task import FleetPlan, PlannedFleet, PlanTask
from onbeat.planner.prices import Prices
from onbeat.report.objectives import classes_text
from onbeat.report.plot import CATEGORIES, COLOURS, MISSED_COLOUR, Figure, bars, figure
from onbeat.report.result import Column, Lines, Part, Plots, Result, Section, Table
from onbeat.report.units import rate_text, significant, too_short
from onbeat.simulator.deployment import Deployment

FLEET_LEGEND = (
    "Watts: what the GPUs draw at most. In time: requests that keep their objectives. Most requests/s: up to "
    "here the fleet keeps the promise. Limit: what more load makes late first. Busy: share of the time in a "
    "step."
)
LEAST_HEADROOM = 0.1
"""Of the promised rate: with less, errors of predicted step times break the promise (docs/plan.md)."""
ROOM_CURE = "more --repeats narrow the interval, and a higher --headroom plans with room"
MOST_FAILED = 8
"""Fleets that do not do, in a table and in a figure."""
LIMITS = {
    "TTFT": ("first token", "the time to the first token (TTFT)"),
    "TBT": ("later tokens", "the time between tokens (TBT)"),
    "E2E": ("last token", "the time to the last token (E2E)"),
    "refused": ("queue", "a place in the queue: they are refused"),
}
"""What requests miss, as `Fleet.binds` names it, for a cell and for a sentence."""
PER_HOUR = "$ an hour"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Everything that a run of the command found."""

    args: argparse.Namespace
    base: Deployment
    """What all units have in common."""
    task: PlanTask
    plan: FleetPlan
    prices: Prices
    is_interrupted: bool = False
    """Whether Ctrl-C came after the answer: what is told beside it is missing."""

    @property
    def promise(self) -> str:
        """What is to be kept, in words."""
        classes = self.task.load.classes
        limits = classes_text({each.name: each.slo for each in classes})
        room = f", with {self.task.headroom * 100:g} % of headroom" if self.task.headroom else ""
        return (
            f"{self.task.objective.share * 100:g} % of {rate_text(self.task.rate, 6)} within {limits}{room}"
        )

    @property
    def lead(self) -> str:
        load, runs = self.task.load, self.task.runs
        return (
            f"{self.promise}; {load.name} load, mean {load.num_prompt_tokens.mean():.0f} tokens in and "
            f"{load.num_output_tokens.mean():.0f} out; each fleet is simulated whole, "
            f"{counted(len(runs), 'run')} of {counted(len(runs[0]), 'request')}, with the live router and "
            "scheduler."
        )


# ---- tables and figures ----


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


def fleet_values(fleet: PlannedFleet, rate: float) -> dict[str, Any]:
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
    kept = [fleet_values(each, report.task.rate) for each in plan.kept]
    failed = [fleet_values(each, report.task.rate) for each in plan.failed]
    dearest = failed[::-1][:MOST_FAILED]
    short = too_short(len(report.task.runs[0]), report.task.rate) if kept else ()
    figures = Plots([fleets_figure(plan)], per_row=1)
    folded: dict[str, Part] = {
        "Kinds of replica, alone": Table("", UNIT_COLUMNS, list(unit_values(plan)), key="units"),
        "Fleets that do not keep the promise": Table("", FAILED_COLUMNS, dearest),
        "Fleets that keep the promise": Table("", FLEET_COLUMNS, kept, caption=FLEET_LEGEND),
        "What the search says": Lines(conclusions(report)),
    }
    return Result(
        kind="plan",
        title=f"A fleet for {report.args.model}",
        answer=answer_of(report),
        follows=facts_of(report),
        sections=[
            Section("", [figures]),
            *(Section(title, [part], is_folded=True) for title, part in folded.items()),
            Section("How it was found", [Lines([report.lead])], "page"),
        ],
        warnings=[*short, *warnings_of(report)],
        settings=shown_settings(report.args, hidden=("json", "report", "config", "output")),
        values=_values(report, kept, failed),
        is_interrupted=report.is_interrupted,
    )


def _values(
    report: PlanReport, kept: list[dict[str, Any]], failed: list[dict[str, Any]]
) -> Mapping[str, Any]:
    plan, share = report.plan, report.task.objective.share
    pools = {name: str(sizes) for name, sizes in plan.pools.items()}
    return {
        "promise": {"request_rate": report.task.rate, "attainment": share, "text": report.promise},
        "best": kept[0] if kept else None,
        "alternatives": kept[1:],
        "failed": failed,
        "pools_by_arithmetic": pools,
        "cost_bound": plan.cost_bound,
        "is_exhausted": plan.is_exhausted,
        "warnings": warnings_of(report),
        "infeasible": plan.infeasible or None,
        "nearest": plan.nearest,
    }


def fleets_figure(plan: FleetPlan) -> Figure | None:
    """Return the cost of the fleets that were simulated, and whether they keep the promise."""
    kinds = (
        ("keeps the promise", COLOURS[0], plan.kept),
        ("does not keep it", MISSED_COLOUR, plan.failed[::-1][:MOST_FAILED]),
    )
    data = [
        bars(
            [each.name for each in fleets],
            [each.usd_per_hour for each in fleets],
            colour,
            "$%{x:.2f}: %{customdata}",
            name=name,
            customdata=[each.reason for each in fleets],
            marker={"color": colour},
        )
        for name, colour, fleets in kinds
        if fleets
    ]
    if not data:
        return None
    height = max(240, 110 + 40 * sum(len(each["y"]) for each in data))
    return figure("Fleets that were simulated", data, PER_HOUR, CATEGORIES, height=height, barmode="stack")


# ---- sentences ----


def answer_of(report: PlanReport) -> list[str]:
    """Return the answer in a sentence; of no fleet, why, and what could be kept instead."""
    plan, task = report.plan, report.task
    if plan.best is None:
        nearest = [f"Nearest promises that would be kept: {'; or '.join(plan.nearest)}"]
        return [f"INFEASIBLE: {plan.infeasible}", *(nearest if plan.nearest else [])]
    gpus = " and ".join(
        gpus_text(unit.device, unit.num_devices * count)
        + (f" ({count} replicas of {unit.num_devices})" if unit.num_devices > 1 and count > 1 else "")
        for unit, count in plan.best.parts
    )
    promise = promise_text(task.objective, {each.name: each.slo for each in task.load.classes})
    does = f"serve {rate_text(report.task.rate, 6)}", promise
    is_one = plan.best.num_replicas == 1 and plan.best.parts[0][0].num_devices == 1
    serve, keep = map(third_person, does) if is_one else does
    return [f"{gpus} {serve} and {keep}; ${plan.best.usd_per_hour:,.2f} an hour."]


def facts_of(report: PlanReport) -> list[tuple[str, str]]:
    """Return what follows, as (question, answer); nothing of no fleet."""
    best = report.plan.best
    if best is None:
        return []
    tokens = report.task.rate * float(report.task.load.num_output_tokens.mean())
    cost = f"{cost_text(best.usd_per_hour, tokens)} The GPUs draw at most {best.watts:,.0f} watts."
    return [(COST, cost), (LIMIT, limit_of(best, report.task.rate))]


def conclusions(report: PlanReport) -> list[str]:
    """Return what follows, in sentences; nothing of no fleet."""
    plan, best = report.plan, report.plan.best
    if best is None:
        return []
    lines = [
        f"Plan: {best.name}. The cost is ${best.usd_per_hour:.2f} an hour, and the GPUs draw at most "
        f"{best.watts:,.0f} watts.",
        _verified(report, best),
        limit_of(best, report.task.rate),
        *_classes(best, report.task.objective.share),
    ]
    if plan.alternatives:
        other = plan.alternatives[0]
        lines.append(
            f"The next cheapest fleet that keeps the promise is {other.name}, at ${other.usd_per_hour:.2f}."
        )
    lines += _apart(plan)
    lines.append(
        "By the estimates, no cheaper fleet is left to try."
        if plan.is_exhausted
        else f"Cheaper mixes are left that nobody simulated, from ${plan.cost_bound:.2f} an hour on; "
        "raise --candidates to try them."
    )
    return lines


def warnings_of(report: PlanReport) -> list[str]:
    """Return why the chosen fleet may break its promise, in sentences."""
    best, rate, share = report.plan.best, report.task.rate, report.task.objective.share
    if best is None:
        return []
    lines = [run.beyond for run in best.runs if run.beyond][:1]
    unsure = "the promise is not sure: the 95 % interval of the"
    if best.capacity is not None:
        most, low, high = best.capacity
        if most < rate * (1 + LEAST_HEADROOM) - 1e-9:
            lines.append(
                f"the headroom is {(most / rate - 1) * 100:.0f} %, below {LEAST_HEADROOM * 100:g} %. Steps "
                f"that take a little longer than predicted would break the promise; {ROOM_CURE}"
            )
        if low < rate:
            lines.append(
                f"{unsure} rate that the fleet keeps up, {_range(low, high)} requests/s, begins below the "
                f"promised {rate:g}; {ROOM_CURE}"
            )
    if best.attainment is not None and best.attainment[1] < share:
        lines.append(
            f"{unsure} good requests, {_ends(best.attainment)} %, begins below the promised "
            f"{share * 100:g} %; {ROOM_CURE}"
        )
    return lines


def _classes(best: PlannedFleet, share: float) -> list[str]:
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


def _apart(plan: FleetPlan) -> list[str]:
    """Say which fleets with prompts and generation apart were simulated."""
    tried = [each.name for each in (*plan.kept, *plan.failed) if each.pools is not None]
    return [f"Prompts and generation apart were simulated as {'; '.join(tried)}."] if tried else []


def _verified(report: PlanReport, fleet: PlannedFleet) -> str:
    attainment = fleet.attainment
    assert attainment is not None, "a fleet that keeps the promise has finished its runs"
    runs = len(fleet.runs)
    where = (
        f"The 95 % interval over {runs} runs is {_ends(attainment)} %." if runs > 1 else "This is one run."
    )
    return (
        f"Simulated, {attainment[0] * 100:.1f} % of the requests are in time; "
        f"{report.task.objective.share * 100:g} % are promised. {where}"
    )


def limit_of(fleet: PlannedFleet, rate: float) -> str:
    """Return up to which rate a fleet keeps the promise, and what is missed beyond it."""
    what = LIMITS[fleet.binds][1] if fleet.binds else ""
    if fleet.capacity is None:
        return f"The first thing that more load would miss is {what}." if what else "Nothing was missed."
    most = fleet.capacity[0]
    more = f", {(most / rate - 1) * 100:.0f} % more than asked for" if most > rate else ""
    room = f"The fleet keeps the promise up to {rate_text(most)}{more}."
    return f"{room} Beyond that, most late requests miss {what}." if what else room
