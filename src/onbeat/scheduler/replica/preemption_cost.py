"""Whom to take out of the batch: the one whose blocks are the cheapest to win back.

A victim's tokens are computed again when it resumes, save for those that the prefix cache still holds.
Moving KV to the host's memory and back (swapping) is not implemented: nothing below the scheduler can do it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel

NEARLY_DONE = 0.95
"""Share of its predicted output from which a request is let finish: its blocks come back by themselves."""

RECENT_SECONDS = 2.0
"""A request that was preempted less than this ago is spared."""

MISS_SECONDS = 10.0
"""Seconds of computation that a broken promise of weight 1 counts as."""


class Candidate(NamedTuple):
    """A running request that could be preempted."""

    context_tokens: int
    """Tokens whose KV it holds now."""
    cached_tokens: int
    """Of these, tokens that the prefix cache is expected to hold still when it resumes."""
    freed_blocks: int
    """KV blocks that nobody else holds."""
    arrival: float
    """Seconds."""
    is_best_effort: bool = False
    progress: float = 0.0
    """Output tokens so far / predicted in all, in [0, 1]."""
    was_preempted_recently: bool = False
    """Within `RECENT_SECONDS`."""
    weight: float = 1.0
    slack_after_resume: float = float("inf")
    """Seconds from its expected resumption, recomputation included, to its next deadline; negative where it
    would miss it because of this, infinite where there is nothing left to miss."""


def recompute_seconds(
    model: StepTimeModel, cached_tokens: int, num_tokens: int, q: float | None = None
) -> float:
    """Return the time to compute lost tokens again, alone and in one chunk, the rest being cached; seconds.

    Parameters
    ----------
    cached_tokens : context that needs no computation.
    num_tokens : tokens lost; at least one is computed, since without it there is nothing to sample from.
    """
    shape = BatchShape()
    shape.add(cached_tokens, max(num_tokens, 1), samples=True)
    return model.step_time(shape, q)


def choose_victim(
    candidates: Sequence[Candidate],
    seconds: Callable[[int, int], float],
    *,
    miss_seconds: float = MISS_SECONDS,
) -> int | None:
    """Return the index of the request to preempt, or None where none would free a block.

    Spared, unless nobody else is left: who is nearly done, and who was preempted a moment ago. Best effort
    goes before requests with objectives. Then the highest score goes,

        score = freed blocks / (weight * (seconds to recompute + miss_seconds if it then misses its deadline))

    and of equal scores the latest arrival; of equal arrivals the last in `candidates`.

    Parameters
    ----------
    seconds : (cached tokens, tokens to compute) -> time; `recompute_seconds` of a model, or an estimate that
        is cheaper to ask (`slo.prefill_work.PrefillWork.recompute_seconds`).
    miss_seconds : what a miss of weight 1 costs, seconds.
    """
    useful = [index for index, candidate in enumerate(candidates) if candidate.freed_blocks > 0]
    pool = [index for index in useful if not _is_spared(candidates[index])] or useful
    pool = [index for index in pool if candidates[index].is_best_effort] or pool
    best, best_key = None, (-1.0, 0.0)
    for index in pool:
        candidate = candidates[index]
        num_lost = max(candidate.context_tokens - candidate.cached_tokens, 1)
        cost = seconds(candidate.cached_tokens, num_lost)
        if candidate.slack_after_resume < 0:
            cost += miss_seconds
        key = (candidate.freed_blocks / (candidate.weight * cost), candidate.arrival)
        if key >= best_key:
            best, best_key = index, key
    return best


def _is_spared(candidate: Candidate) -> bool:
    return candidate.progress >= NEARLY_DONE or candidate.was_preempted_recently
