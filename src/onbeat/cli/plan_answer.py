"""What the page of `onbeat plan` says first."""

from __future__ import annotations

from onbeat.cli.answers import COST, LIMIT, LOAD, OBJECTIVE, cost_text, gpus_text, promise_text
from onbeat.cli.plan_output import PlanReport, limit_of

HALF = 0.5
"""Times the objectives."""


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
    verb, _, rest = promise.partition(" ")
    serve, keep = ("serves", f"{verb}s") if is_one else ("serve", verb)
    cost = f"${plan.best.usd_per_hour:,.2f} an hour"
    return f"{gpus} {serve} {plan.rate:g} requests/s and {keep} {rest}; {cost}."


def facts_of(report: PlanReport) -> list[tuple[str, str]]:
    """Return what follows, as (question, answer); of no fleet, what could be kept instead."""
    plan, best = report.plan, report.plan.best
    if best is None:
        return [("What could be kept", "; or ".join(plan.nearest) + ".")] if plan.nearest else []
    tokens = plan.rate * float(report.task.load.num_output_tokens.mean())
    cost = f"{cost_text(best.usd_per_hour, tokens)} The GPUs draw at most {best.watts:,.0f} watts."
    facts = [(COST, cost), (LIMIT, limit_of(best, plan.rate))]
    doubled = plan.doubled
    facts.append(
        (
            LOAD,
            f"{2 * plan.rate:g} requests/s cost about ${doubled.usd_per_hour:,.2f} an hour: {doubled.fleet}. "
            "This is estimated, not simulated."
            if doubled
            else "The GPUs that were offered do not serve twice the load, by the estimates.",
        )
    )
    half = next((each for each in plan.costs if each.scale == HALF), None)
    facts.append(
        (
            OBJECTIVE,
            f"With objectives half as long, the fleet costs about ${half.usd_per_hour:,.2f} an hour: "
            f"{half.fleet}. This is estimated, not simulated."
            if half
            else "No fleet of these GPUs keeps objectives half as long, by the estimates.",
        )
    )
    return facts
