"""How long a chunk may be that joins a batch within a time budget: the inverse of a step-time model."""

from __future__ import annotations

import math
from collections.abc import Callable

from onbeat.core.step import BatchShape

MAX_CHUNK_TOKENS = 1 << 22
"""The longest chunk that `Predictor.max_chunk_tokens` answers: the budget does not bind."""
_FIRST_PROBE = 256
_MOST_SECANTS = 6


def longest_chunk(seconds: Callable[[int], float], budget: float) -> int:
    """Return n in [0, MAX_CHUNK_TOKENS] with seconds(n) <= budget < seconds(n + 1)."""
    low, low_seconds = 1, seconds(1)
    # Written so that a budget of NaN admits nothing.
    if not low_seconds <= budget:
        return 0
    high = _FIRST_PROBE
    while (high_seconds := seconds(high)) <= budget:
        if high >= MAX_CHUNK_TOKENS:
            return MAX_CHUNK_TOKENS
        slope = (high_seconds - low_seconds) / (high - low)
        low, low_seconds = high, high_seconds
        # A little beyond where the line meets the budget: a narrow bracket saves more trials than it costs.
        beyond = 1.2 * (budget - low_seconds) / slope if slope > 0 else math.inf
        high = min(high + int(min(max(beyond, 16), 15 * high)), MAX_CHUNK_TOKENS)
    return _bisect(seconds, (low, low_seconds - budget), (high, high_seconds - budget), budget)


def _bisect(
    seconds: Callable[[int], float], low: tuple[int, float], high: tuple[int, float], budget: float
) -> int:
    """Return n with seconds(n) <= budget < seconds(n + 1) between two points (n, seconds(n) - budget).

    Step times are nearly linear in pieces, so that the Illinois method (a secant; an end that stays twice is
    halved) needs few trials; where the budget falls into a jump, the middle is tried after these.
    """
    (low_n, low_excess), (high_n, high_excess) = low, high
    trials = last_side = 0
    while (width := high_n - low_n) > 1:
        trials += 1
        share = 0.5 if trials > _MOST_SECANTS else low_excess / (low_excess - high_excess)
        guess = min(max(low_n + int(width * share), low_n + 1), high_n - 1)
        excess = seconds(guess) - budget
        side = 1 if excess > 0 else -1
        if side < 0:
            low_n, low_excess = guess, excess
            high_excess /= 2 if last_side == side else 1
        else:
            high_n, high_excess = guess, excess
            low_excess /= 2 if last_side == side else 1
        last_side = side
    return low_n


def chunk_seconds(
    step_time: Callable[[BatchShape], float], base: BatchShape, cached_tokens: int
) -> Callable[[int], float]:
    """Return the time of a batch as a function of one more chunk's length."""
    shape = base.copy()
    shape.add(cached_tokens, 2, samples=True)

    def seconds(num_tokens: int) -> float:
        if num_tokens == 1:  # a single token is a decode row
            single = base.copy()
            single.add(cached_tokens, 1, samples=True)
            return step_time(single)
        # Only these three sums change with the length; a fresh batch for each trial would cost more than the
        # model does.
        shape.num_new_tokens = base.num_new_tokens + num_tokens
        shape.query_key_pairs = (
            base.query_key_pairs + num_tokens * cached_tokens + num_tokens * (num_tokens + 1) // 2
        )
        shape.sum_chunk_squares = base.sum_chunk_squares + num_tokens * num_tokens
        return step_time(shape)

    return seconds
