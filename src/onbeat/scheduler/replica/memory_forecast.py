"""The most KV that running requests will need at once, from how long each of them still goes on.

All running requests grow by a token a step, and each frees all it holds when it ends. Sorted by remaining
tokens, the longest first, the first i of them are alive when the i-th is about to end, and each has grown by
the i-th one's remaining tokens:

    peak = max over i of (held_1 + ... + held_i) + i * remaining_i

Nothing higher lies between two ends, since held KV only grows there. A request that skips steps ends later
than the others expect; its share is then underestimated by the steps skipped.

Tokens here are KV slots. Where they come in blocks, a request holds up to block_size - 1 slots more than its
tokens: round `held` up to whole blocks and keep one spare block for each request.

References
----------
Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS 2025. There the remaining
tokens are sampled from the history of lengths; here the caller gives a quantile (`lengths.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter

_REMAINING = itemgetter(1)


def peak_tokens(rows: Iterable[tuple[int, int]]) -> int:
    """Return the most KV slots that requests will hold at once.

    Parameters
    ----------
    rows : (tokens held, tokens still to come) of each request, in any order.
    """
    peak = sum_held = 0
    for num_alive, (held, remaining) in enumerate(sorted(rows, key=_REMAINING, reverse=True), start=1):
        sum_held += held
        at_end = sum_held + num_alive * remaining
        if at_end > peak:
            peak = at_end
    return peak


def fits(rows: Sequence[tuple[int, int]], newcomer: tuple[int, int], capacity: int) -> bool:
    """Return whether the peak with one more request stays within the capacity.

    Two sums settle most cases: what all would hold if each kept its KV to the last end, and what they hold
    at once now.

    Parameters
    ----------
    rows : (tokens held, tokens still to come) of the running requests.
    newcomer : the same of the one that asks.
    capacity : KV slots in all.
    """
    sum_held = newcomer[0] + sum([held for held, _ in rows])
    if sum_held > capacity:
        return False
    if sum_held + newcomer[1] + sum([remaining for _, remaining in rows]) <= capacity:
        return True
    return peak_tokens([*rows, newcomer]) <= capacity
