"""What a planned step takes, and what drafts add to it."""

from __future__ import annotations

from math import inf

from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.slo.view import decode_shape
from onbeat.scheduler.replica.step_plan import StepPlan


class StepCost:
    """The time of a step as a function of its drafts.

    Parameters
    ----------
    shape : the step without drafts; at least one decode row.
    model : predicts.
    limit : seconds that the step may take; infinite where nothing binds it.
    quantile : of the step time that must be within the limit; None is the mean.

    Attributes
    ----------
    shape : the step without drafts.
    plain : seconds without drafts.
    """

    def __init__(
        self, shape: BatchShape, model: StepTimeModel, *, limit: float = inf, quantile: float | None = None
    ) -> None:
        self._model = model
        self._limit = limit
        self._quantile = quantile
        self.shape = shape
        self._trial = shape.copy()
        self.plain = model.step_time(shape)

    def seconds(
        self, num_drafts: int, num_rows: int, num_passes: int, catch_up: tuple[int, int] = (0, 0)
    ) -> float:
        """Return the step's time with drafts; infinite where that is above its limit.

        Parameters
        ----------
        num_drafts : of all rows together.
        num_rows : rows that have any.
        num_passes : of the proposer's model.
        catch_up : what that reads before, as `BatchShape.num_catch_up_tokens` and `catch_up_pairs`.
        """
        base, trial = self.shape, self._trial
        trial.num_new_tokens = base.num_new_tokens + num_drafts
        trial.decode_context_tokens = base.decode_context_tokens + num_drafts
        trial.num_lm_head_rows = base.num_lm_head_rows + num_drafts
        trial.num_draft_tokens = num_drafts
        trial.num_verify_rows = num_rows
        trial.num_draft_passes = num_passes
        trial.num_catch_up_tokens, trial.catch_up_pairs = catch_up
        if self._limit < inf and self._model.step_time(trial, self._quantile) > self._limit:
            return inf
        return self._model.step_time(trial)


def step_costs(plan: StepPlan, model: StepTimeModel, quantile: float | None) -> tuple[StepCost, StepCost]:
    """Return the cost of a plan's whole step, within its budget, and that of its decode rows alone.

    The two are one object where the step has no prompts.
    """
    # What the budget is below the slack is for prompts, and drafts are weighed against them.
    bound = plan.budget if plan.slack is None else plan.slack
    limit = inf if bound is None else bound
    shape = decode_shape(plan.decodes)
    if not (plan.chunks or plan.admissions):
        whole = StepCost(shape, model, limit=limit, quantile=quantile)
        return whole, whole
    alone = StepCost(shape.copy(), model)
    _add_prompts(plan, shape)
    return StepCost(shape, model, limit=limit, quantile=quantile), alone


def _add_prompts(plan: StepPlan, shape: BatchShape) -> None:
    """Count a plan's chunks and admissions as the scheduler will."""
    for state, num_new in plan.chunks:
        shape.add(state.num_computed_tokens, num_new, samples=num_new == state.num_wanted_tokens)
    for admission in plan.admissions:
        num_cached = len(admission.cached_block_ids) * plan.block_size
        num_new = admission.num_new_tokens
        shape.add(num_cached, num_new, samples=num_cached + num_new == admission.state.num_tokens)
