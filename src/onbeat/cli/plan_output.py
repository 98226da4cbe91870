"""The result of a plan as tables and sentences."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from math import isfinite

from rich.table import Table

from onbeat.planner.plan_task import Fleet, FleetPlan, PlanTask
from onbeat.planner.prices import Prices
from onbeat.planner.units import device_text
from onbeat.report.objectives import classes_text
from onbeat.report.table import filled_table
from onbeat.report.units import significant
from onbeat.simulator.settings import ReplicaSettings
from onbeat.simulator.setup import POOL_BANDWIDTH

FLEET_HEADER = (
    *("fleet", "$/h", "watts", "in time", "95 % interval", "most requests/s", "95 % interval"),
    *("headroom", "limit", "busy"),
)
FLEET_LEGEND = (
    "Watts: what the GPUs draw at most. In time: requests that keep their objectives. Most requests/s: up to "
    "here the fleet keeps the promise. Limit: what more load makes late first. Busy: share of the time in a "
    "step."
)
UNIT_HEADER = ("replica", "$/h", "requests/s", "per $/h", "why not")
FAILED_HEADER = ("fleet", "$/h", "why not")
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
    base: ReplicaSettings
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


# ---- tables and sentences ----


def fleet_row(fleet: Fleet, rate: float) -> tuple[str, ...]:
    """Return the cells of a fleet that keeps the promise, as `FLEET_HEADER` names them."""
    attainment, capacity = fleet.attainment, fleet.capacity
    return (
        fleet.name,
        f"{fleet.usd_per_hour:.2f}",
        f"{fleet.watts:,.0f}",
        "-" if attainment is None else f"{attainment[0] * 100:.1f} %",
        "-" if attainment is None else f"{attainment[1] * 100:.1f} to {attainment[2] * 100:.1f}",
        "-" if capacity is None else significant(capacity[0]),
        "-" if capacity is None else _range(capacity[1], capacity[2]),
        "-" if capacity is None else f"{(capacity[0] / rate - 1) * 100:+.0f} %",
        LIMITS[fleet.binds][0] if fleet.binds else "-",
        ", ".join(f"{share * 100:.0f} %" for share in fleet.busy.values()),
    )


def _range(low: float, high: float) -> str:
    return f"{significant(low)} " + (f"to {significant(high)}" if isfinite(high) else "or more")


def fleet_rows(plan: FleetPlan) -> list[tuple[str, ...]]:
    """Return the rows of the fleets that keep the promise, the chosen one first."""
    shown = [] if plan.best is None else [plan.best, *plan.alternatives]
    return [fleet_row(fleet, plan.rate) for fleet in shown]


def unit_rows(plan: FleetPlan) -> list[tuple[str, ...]]:
    """Return the rows of the kinds of replica."""
    rows: list[tuple[str, ...]] = []
    for each in plan.units:
        rate, cost = each.rate(plan.buckets), each.unit.usd_per_hour
        rows.append((each.unit.name, f"{cost:.2f}", significant(rate), significant(rate / cost), ""))
    return rows + [(name, "", "", "", why) for name, why in plan.left_out.items()]


def failed_rows(plan: FleetPlan) -> list[tuple[str, ...]]:
    """Return the rows of the dearest fleets that do not keep the promise."""
    nearest = sorted(plan.failed, key=lambda fleet: -fleet.usd_per_hour)[:MOST_FAILED]
    return [(fleet.name, f"{fleet.usd_per_hour:.2f}", fleet.reason) for fleet in nearest]


def plan_tables(report: PlanReport) -> list[Table]:
    """Return what the terminal shows."""
    plan = report.plan
    tables = []
    for title, header, rows, texts in (
        ("Kinds of replica, alone", UNIT_HEADER, unit_rows(plan), (0, 4)),
        ("Fleets that do not keep the promise", FAILED_HEADER, failed_rows(plan), (0, 2)),
        ("Fleets that keep the promise", FLEET_HEADER, fleet_rows(plan), (0, 8)),
    ):
        if not rows:
            continue
        shown = filled_table(title, header, rows, texts=texts, overflow="fold")
        if header is FLEET_HEADER:
            shown.caption, shown.caption_justify = FLEET_LEGEND, "left"
        tables.append(shown)
    return tables


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
    seconds = len(report.task.runs[0]) / plan.rate
    if seconds < 30:
        lines.append(
            f"note: at {plan.rate:g} requests/s a run lasts {seconds:.0f} s, in which queues hardly grow; "
            "raise --num-prompts"
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
