"""Step times with a draft model: the target's step, and the passes of the model that made the drafts."""

from __future__ import annotations

from dataclasses import replace

from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.perfmodel.predictor import Predictor
from onbeat.perfmodel.recent import Drift
from onbeat.perfmodel.shapes import ShapeRange


class SpeculativeStepTime(StepTimeModel):
    """A target model that verifies and a draft model that proposes, one after the other in the same step.

    time = target(step) + `num_draft_passes` x draft(a decode step of the rows that are drafted for); the
    first of these passes also has the tokens that the draft model has to read before.
    Quantiles add up as means do: what slows one of them, another program or heat, slows both. Drafts that are
    looked up (no passes) cost nothing here but their verification, which the target's model knows.

    Parameters
    ----------
    target : of the model whose tokens these are.
    draft : of the model that guesses them. It is asked for decodes alone.
    """

    __slots__ = ("_draft", "_target")

    def __init__(self, target: Predictor, draft: Predictor) -> None:
        self._target = target
        self._draft = draft

    def with_learning(self) -> SpeculativeStepTime:
        """Return the same models, but each learns from steps."""
        return SpeculativeStepTime(self._target.with_learning(), self._draft.with_learning())

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        """Return the expected time, or its q-quantile. See `core.StepTimeModel`."""
        return self._target.step_time(shape, q) + self.draft_time(shape, q)

    def draft_time(self, shape: BatchShape, q: float | None = None) -> float:
        """Return the draft model's share of `step_time`, seconds."""
        return sum(number * self._draft.step_time(each, q) for number, each in draft_passes(shape))

    def max_chunk_tokens(
        self, shape: BatchShape, cached_tokens: int, budget: float, q: float | None = None
    ) -> int:
        """Return the longest chunk that may join a batch within a time budget. See `core.StepTimeModel`.

        The draft model's passes come off the budget first: they are for decodes, whatever chunk joins.
        """
        draft_time = self.draft_time(shape, q)
        longest = self._target.max_chunk_tokens(shape, cached_tokens, budget - draft_time, q)
        if longest > 1 or not draft_time:
            return longest
        # A single token is a decode row, and moves the mean context that drafts are made at.
        with_token = shape.copy()
        with_token.add(cached_tokens, 1, samples=True)
        return int(self.step_time(with_token, q) <= budget)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Learn from a measured step: each model takes its predicted share of the time.

        Steps without drafts teach the target's model alone, so that the shares come right with time.
        """
        passes = draft_passes(shape)
        if not passes:
            self._target.observe(shape, seconds)
            return
        # All is predicted before anything is learnt: the shares are those of one state of both models.
        of_target = self._target.step_time(shape)
        of_passes = [(number, each, self._draft.step_time(each)) for number, each in passes]
        ratio = seconds / (of_target + sum(number * predicted for number, _, predicted in of_passes))
        self._target.observe(shape, ratio * of_target)
        for _, each, predicted in of_passes:
            self._draft.observe(each, ratio * predicted)

    def observe_guides(self, num_rows: int, seconds: float) -> None:
        """Learn what a row under a grammar takes. See `core.StepTimeModel`."""
        self._target.observe_guides(num_rows, seconds)

    @property
    def shape_range(self) -> ShapeRange | None:
        """The batches that the target's model was fitted to; None where it holds everywhere."""
        return self._target.shape_range

    @property
    def drift(self) -> Drift | None:
        """Whether the measured steps have left the target's model, which is part of each; see `Predictor`."""
        return self._target.drift


def draft_pass(shape: BatchShape) -> BatchShape:
    """Return one of the draft model's passes for a step: a decode for each row that still wants a draft.

    Rows want different numbers of drafts, of which the sums know the mean; and each row is taken to have the
    mean context.
    """
    num_rows = max(1, round(shape.num_draft_tokens / max(shape.num_draft_passes, 1)))
    context = round(num_rows * shape.decode_context_tokens / max(shape.num_decodes, 1))
    return BatchShape.of_decodes(num_rows, max(context, num_rows))


def draft_passes(shape: BatchShape) -> list[tuple[int, BatchShape]]:
    """Return the draft model's passes for a step, with the number of those that are alike.

    What it has to read is in the first one, as if it were one request's.
    """
    num_passes, num_read = shape.num_draft_passes, shape.num_catch_up_tokens
    decodes = draft_pass(shape) if num_passes else BatchShape()
    if not num_read:
        return [(num_passes, decodes)] if num_passes else []
    first = replace(
        decodes,
        num_new_tokens=decodes.num_new_tokens + num_read,
        num_sequences=decodes.num_sequences + 1,
        num_chunks=1,
        query_key_pairs=shape.catch_up_pairs,
        chunk_cached_tokens=max(0, round(shape.catch_up_pairs / num_read - (num_read + 1) / 2)),
        sum_chunk_squares=num_read * num_read,
    )
    return [(1, first), (num_passes - 1, decodes)] if num_passes > 1 else [(1, first)]
