"""The one question that everything asks: how long a step will take."""

# ruff: noqa: ARG002 -- a model need not look at all that it is told

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NoReturn, Protocol

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape


class StepTimeModel(Protocol):
    """Predicts the time of one step of one replica, seconds, from the sums of its batch.

    With pipeline parallelism this is the time through all stages, transfers included. What follows from the
    time of one step those that inherit from it need not say again; they may be quicker about it.
    """

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        """Return the expected time, or its q-quantile.

        Parameters
        ----------
        shape : the batch; an empty one takes no time.
        q : in (0, 1); None is the mean.

        Returns
        -------
        Seconds, above 0 for any batch with a row.
        """

    def max_chunk_tokens(
        self, shape: BatchShape, cached_tokens: int, budget: float, q: float | None = None
    ) -> int:
        """Return the longest chunk that may join a batch within a time budget: the inverse of `step_time`.

        Parameters
        ----------
        shape : the batch so far; it is left as it is.
        cached_tokens : context that the chunk reads.
        budget : seconds for the whole step.
        q : as in `step_time`.

        Returns
        -------
        Tokens; 0 where even one is too many.
        """

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Learn from a measured step. `Scheduler.update` calls it, so that a replay sees the same model."""

    def observe_guides(self, num_rows: int, seconds: float) -> None:
        """Learn from the part of a measured step that grammars took; by itself a model has no such part."""
        return

    def times_of(self, shapes: tuple[BatchShape, ...], q: float | None = None) -> list[float]:
        """Return `step_time` of batches that never change, seconds."""
        return [self.step_time(shape, q) for shape in shapes]

    def step_times(self, shape: BatchShape, contexts: Sequence[int]) -> Sequence[float]:
        """Return the expected times of steps that differ in what their decodes read, seconds.

        Parameters
        ----------
        shape : of any of the steps; it is left as it is.
        contexts : `decode_context_tokens` of each.
        """
        return seconds_of_each(self.step_time, shape, contexts)

    def observe_run(
        self,
        shape: BatchShape,
        begun: float,
        ends: Sequence[float],
        limit: float = inf,
        q: float | None = None,
    ) -> tuple[int, bool]:
        """Learn from steps that followed one another, in each of which every row read a token more.

        Parameters
        ----------
        shape : of the step before the first of them; afterwards that of the last that was learnt from.
        begun : when the first began, seconds.
        ends : when each of them ended, which is when the next began.
        limit, q : seconds; after a step beyond which the next is predicted to take longer, by this quantile,
            nothing is learnt.

        Returns
        -------
        From how many steps it has learnt, and whether the next is within the limit.
        """
        rows = shape.num_lm_head_rows
        for num, end in enumerate(ends, 1):
            shape.decode_context_tokens += rows
            self.observe(shape, end - begun)
            begun = end
            if limit < inf:
                shape.decode_context_tokens += rows
                seconds = self.step_time(shape, q)
                shape.decode_context_tokens -= rows
                if seconds > limit:
                    return num, False
        return len(ends), True

    def is_within(
        self, shape: BatchShape, begun: float, ends: Sequence[float], limit: float, q: float | None = None
    ) -> bool:
        """Return whether each of some steps and the next are sure to be predicted within a limit, seconds.

        Whatever `observe_run` has learnt by then; nothing is learnt here. False where that is not plain.
        """
        return False


def seconds_of_each(
    seconds: Callable[[BatchShape], float], shape: BatchShape, contexts: Sequence[int]
) -> list[float]:
    """Return the times of steps by asking for one after another; see `StepTimeModel.step_times`."""
    before, times = shape.decode_context_tokens, []
    for context in contexts:
        shape.decode_context_tokens = context
        times.append(seconds(shape))
    shape.decode_context_tokens = before
    return times


def predict_step(model: StepTimeModel, shape: BatchShape) -> float:
    """Return the predicted seconds of a step, for those who reckon with nothing but predictions.

    Raises
    ------
    ConfigError : the prediction is not a finite time above 0.
    """
    seconds = model.step_time(shape)
    if not 0.0 < seconds < inf:
        refuse_prediction(seconds, shape)
    return seconds


def refuse_prediction(seconds: float, shape: BatchShape) -> NoReturn:
    """Raise ConfigError for a prediction with which virtual time would stand still or end."""
    raise ConfigError(
        f"the step-time model predicts {seconds} s for {shape}; a step must take a finite time above 0: "
        "check the profile or the model's parameters"
    )
