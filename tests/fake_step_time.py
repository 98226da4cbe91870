"""A step-time model for tests of schedulers: linear in tokens, learns nothing."""

from __future__ import annotations

from dataclasses import replace

from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel


class LinearStepTime(StepTimeModel):
    """Seconds of a step: `fixed + per_token x new tokens`, whatever the quantile."""

    def __init__(self, *, fixed: float = 2e-3, per_token: float = 1e-4) -> None:
        self.fixed = fixed
        self.per_token = per_token

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        return self.fixed + self.per_token * shape.num_new_tokens if shape.num_new_tokens else 0.0

    def max_chunk_tokens(
        self, shape: BatchShape, cached_tokens: int, budget: float, q: float | None = None
    ) -> int:
        trial = replace(shape)
        trial.add(cached_tokens, 1, samples=True)
        return max(0, 1 + int((budget - self.step_time(trial, q)) / self.per_token + 1e-9))

    def observe(self, shape: BatchShape, seconds: float) -> None: ...
