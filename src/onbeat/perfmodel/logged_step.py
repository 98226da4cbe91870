"""Steps that a running engine has told of: what each computed, and how long it took.

An engine that schedules ahead plans a step while the one before it runs. What it measures of a step may then
be the wait for its result, or two steps at once. The distance from the end of one step to the end of the next
is what a client sees, so that counts where both are known and differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from onbeat.core.step import BatchShape
from onbeat.perfmodel.shapes import MeasuredStep

_SAME = 0.03
"""Relative difference up to which an engine's own times and the distances between its steps are the same."""
_A_PART = 2.0
"""Distance over an engine's own time from which on that is only a part of a step."""
_FEWEST_DISTANCES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrigin:
    """Whose steps they are; what the source does not say is None."""

    engine: str | None = None
    engine_version: str | None = None
    model: str | None = None
    device: str | None = None
    """A device id."""
    dtype: str | None = None
    """Format of the weights, as `Precision` names it."""


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One step as its engine told of it."""

    shape: BatchShape
    wall: float
    """The engine's own measure, seconds; 0 where it waited for nothing."""
    distance: float | None = None
    """Seconds since the end of the step before; None after idleness, and where nobody knows."""


@dataclass(frozen=True, slots=True)
class StepStream:
    """Steps from one source, in the order in which they ended."""

    origin: StepOrigin
    steps: Sequence[LoggedStep]
    num_heartbeats: int = 0
    """Messages of an idle engine."""
    num_lost: int = 0
    """Steps that the source counted but did not deliver."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What steps took, and how that was found."""

    steps: list[MeasuredStep]
    basis: str
    """For the reader: the engine's own times, or the distances between its steps."""


def step_times(steps: Sequence[LoggedStep]) -> StepTimes:
    """Return what each step took; steps of which nobody knows are left out."""
    pairs = [(step.distance, step.wall) for step in steps if step.distance and step.wall > 0]
    known = [step.distance for step in steps if step.distance]
    ratio = median(distance / wall for distance, wall in pairs) if pairs else 1.0
    if len(known) < _FEWEST_DISTANCES or (pairs and abs(ratio - 1) <= _SAME):
        timed = [MeasuredStep(step.shape, step.wall) for step in steps if step.wall > 0]
        return StepTimes(timed, "the engine's own times")
    # After idleness nothing overlaps: the engine's time holds, but for what its host does between two steps.
    # Where it measures far less than a step, it measures something else.
    host = max(0.0, median(distance - wall for distance, wall in pairs)) if pairs else 0.0
    measures_steps = ratio <= _A_PART
    timed = []
    for step in steps:
        seconds = step.distance
        if seconds is None and measures_steps and step.wall > 0:
            seconds = step.wall + host
        if seconds:
            timed.append(MeasuredStep(step.shape, seconds))
    own = f"its own times are {1 / ratio:.2f} of these" if pairs else "it gave no times of its own"
    return StepTimes(timed, f"the distances between steps ({own})")


def rows_shape(
    *,
    num_prompts: int,
    prompt_tokens: int,
    prompt_cached_tokens: int,
    num_decodes: int,
    decode_cached_tokens: int,
    prompt_variance: float = 0.0,
) -> BatchShape:
    """Return the batch of a step of which only sums are known.

    Parameters
    ----------
    num_prompts, prompt_tokens, prompt_cached_tokens : requests whose prompt goes on, tokens that the step
        computes of it, and tokens of it that were there before.
    num_decodes, decode_cached_tokens : requests that generate, and their tokens before this step.
    prompt_variance : of the prompts' whole lengths, in square tokens. It counts where nothing of the prompts
        was there before: they then come in one piece each, as far as a step can hold them.
    """
    shape = BatchShape.of_decodes(num_decodes, decode_cached_tokens + num_decodes)
    if not prompt_tokens:
        return shape
    num_prompts = max(1, min(num_prompts, prompt_tokens))
    squares = prompt_tokens * prompt_tokens / num_prompts
    if not prompt_cached_tokens:
        squares = min(squares + num_prompts * prompt_variance, float(prompt_tokens * prompt_tokens))
    shape.num_new_tokens += prompt_tokens
    shape.num_sequences += num_prompts
    shape.num_chunks = num_prompts
    shape.chunk_cached_tokens = prompt_cached_tokens
    shape.sum_chunk_squares = round(squares)
    shape.query_key_pairs = round(
        prompt_tokens * prompt_cached_tokens / num_prompts + (squares + prompt_tokens) / 2
    )
    shape.num_lm_head_rows += num_prompts
    return shape
