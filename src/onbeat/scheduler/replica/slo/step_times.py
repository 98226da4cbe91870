"""What steps take, asked of the step-time model at the quantile to plan with."""

from __future__ import annotations

from math import ceil, inf

from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.slo.prefill_work import PrefillWork
from onbeat.scheduler.replica.slo.view import RunningView

LEAST_SHARE = 0.05
"""Share of the time that prompts are counted on to get, however little is left beside the decodes."""


class StepTimes:
    """Times of steps with decodes, with and without prompts beside them; seconds.

    Parameters
    ----------
    model, q : predicts, at which quantile.
    work : what prompts cost.
    """

    def __init__(self, model: StepTimeModel, work: PrefillWork, q: float | None) -> None:
        self._model = model
        self._q = q
        self.work = work

    def of(self, shape: BatchShape) -> float:
        """Return the time of a step."""
        return self._model.step_time(shape, self._q)

    def max_chunk(self, shape: BatchShape, num_cached: int, limit: float) -> int:
        """Return the longest chunk that may join within a limit."""
        return self._model.max_chunk_tokens(shape, num_cached, limit, self._q)

    def with_prompt(self, shape: BatchShape, num_tokens: int) -> float:
        """Return the time of a step with so many prompt tokens more."""
        trial = shape.copy()
        trial.add(0, num_tokens, samples=True)
        return self.of(trial)

    def with_chunk(self, shape: BatchShape) -> float:
        """Return the time of a step with one efficient chunk more."""
        return self.with_prompt(shape, self.work.efficient_chunk)

    def fixed(self, shape: BatchShape) -> float:
        """Return the time that decodes take of a step that is long enough to be bound by arithmetic."""
        return max(0.0, self.with_chunk(shape) - self.work.seconds(self.work.efficient_chunk, 0))

    def prefill_share(self, shape: BatchShape, budget: float) -> float:
        """Return the share of a step's time that goes into prefill work beside these decodes."""
        fixed = self.fixed(shape)
        if budget == inf:
            budget = self.with_chunk(shape)
        return max(0.0, 1 - fixed / budget) if budget > 0 else 0.0

    def natural_budget(self, view: RunningView, slack: float) -> float:
        """Return the time that a step may take without spending slack that streams have earned."""
        return min(slack, view.tightest)

    def drain_seconds(self, seconds: float, shape: BatchShape, budget: float) -> float:
        """Return how long so much prefill work takes in steps of this length, beside these decodes."""
        fixed = self.fixed(shape)
        if budget == inf:
            budget = self.with_chunk(shape)
        left = max(budget - fixed, LEAST_SHARE * budget)
        return seconds + ceil(seconds / left) * fixed
