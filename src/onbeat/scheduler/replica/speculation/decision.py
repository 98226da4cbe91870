"""Writes what was decided on drafts into a plan."""

from __future__ import annotations

from onbeat.scheduler.replica.request_state import RequestStatus
from onbeat.scheduler.replica.speculation.acceptance import AcceptanceBook
from onbeat.scheduler.replica.speculation.goodput import expected_tokens
from onbeat.scheduler.replica.step_plan import StepPlan


def decide(plan: StepPlan, num_drafts: list[int], book: AcceptanceBook, *, runs_model: bool) -> None:
    """Give a plan its drafts and the output tokens that are expected of them.

    Parameters
    ----------
    num_drafts : of each of `plan.decodes`; blocks and tokens for them have been taken already.
    runs_model : whether a model makes them, one pass for each position.
    """
    deepest = max(num_drafts, default=0)
    if not deepest:
        decide_none(plan)
        return
    expected = 0.0
    for state, num in zip(plan.decodes, num_drafts, strict=True):
        if not num:
            expected += state.status is RequestStatus.RUNNING  # a padding row delivers nothing
            continue
        rate = book.of(state)
        num_sure = num if rate.num_available is None else min(num, rate.num_available)
        expected += expected_tokens(rate.acceptance, num_sure)
    plan.expected_tokens = expected
    plan.num_drafts = num_drafts
    plan.num_draft_passes = deepest if runs_model else 0


def decide_none(plan: StepPlan) -> None:
    """Leave a plan without drafts: each row that has not ended delivers a token."""
    plan.expected_tokens = float(sum([state.status is RequestStatus.RUNNING for state in plan.decodes]))
