"""What a planned step takes, and what drafts add to it."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.slo.view import decode_shape
from onbeat.scheduler.replica.step_plan import StepPlan


class StepCost:
    """The time of a plan's whole step - decodes, chunks and admissions - as a function of its drafts.

    Parameters
    ----------
    plan : with at least one decode row.
    model : predicts.
    quantile : of the step time that must be within the plan's time budget; None is the mean.

    Attributes
    ----------
    plain : seconds of the step without drafts.
    decodes : seconds of its decode rows alone.
    """

    def __init__(self, plan: StepPlan, model: StepTimeModel, quantile: float | None) -> None:
        self._model = model
        self._quantile = quantile
        self._limit = inf if plan.budget is None else plan.budget
        shape = decode_shape(plan.decodes)
        self.plain = self.decodes = model.step_time(shape)
        if plan.chunks or plan.admissions:
            _add_prompts(plan, shape)
            self.plain = model.step_time(shape)
        self._base = shape
        self._trial = replace(shape)

    def seconds(self, num_drafts: int, num_rows: int, num_passes: int) -> float:
        """Return the step's time with drafts; infinite where that is above the plan's budget.

        Parameters
        ----------
        num_drafts : of all rows together.
        num_rows : rows that have any.
        num_passes : of the proposer's model.
        """
        base, trial = self._base, self._trial
        trial.num_new_tokens = base.num_new_tokens + num_drafts
        trial.decode_context_tokens = base.decode_context_tokens + num_drafts
        trial.num_lm_head_rows = base.num_lm_head_rows + num_drafts
        trial.num_draft_tokens = num_drafts
        trial.num_verify_rows = num_rows
        trial.num_draft_passes = num_passes
        if self._limit < inf and self._model.step_time(trial, self._quantile) > self._limit:
            return inf
        return self._model.step_time(trial)


def _add_prompts(plan: StepPlan, shape: BatchShape) -> None:
    """Count a plan's chunks and admissions as the scheduler will."""
    for state, num_new in plan.chunks:
        shape.add(state.num_computed_tokens, num_new, samples=num_new == state.num_wanted_tokens)
    for admission in plan.admissions:
        num_cached = len(admission.cached_block_ids) * plan.block_size
        num_new = admission.num_new_tokens
        shape.add(num_cached, num_new, samples=num_cached + num_new == admission.state.num_tokens)
