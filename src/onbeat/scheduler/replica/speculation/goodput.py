"""Goodput of speculation: tokens that a step is expected to deliver, over the time that it takes.

The model is SmartSpec's (Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models
Using Goodput", arXiv 2406.14066): each draft is accepted with probability alpha if those before it were.
"""

from __future__ import annotations

from collections.abc import Callable


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Return how many tokens a row with drafts delivers on average, the target's own one included.

    `1 + a + a^2 + ... + a^k = (1 - a^(k+1)) / (1 - a)`; 1 without drafts, k + 1 where all are accepted.

    Parameters
    ----------
    acceptance : a, the share of drafts that are accepted of those whose predecessors were; in [0, 1].
    num_drafts : k.
    """
    if acceptance >= 1.0:
        return 1.0 + num_drafts
    return float((1.0 - acceptance ** (num_drafts + 1)) / (1.0 - acceptance))


def batch_goodput(
    acceptance: float, num_drafts: int, *, num_drafting: int, num_rows: int, seconds: float
) -> float:
    """Return tokens per second of a batch in which some rows verify the same number of drafts.

    Parameters
    ----------
    num_drafting : rows that have drafts.
    num_rows : all decode rows; the others deliver one token each.
    seconds : the step's time, drafts included; above 0.
    """
    tokens = expected_tokens(acceptance, num_drafts) * num_drafting + (num_rows - num_drafting)
    return tokens / seconds


def best_draft_length(goodput: Callable[[int], float], most: int) -> int:
    """Return the k in 0..most with the largest goodput, the smallest of equals.

    All are looked at: where drafts have a fixed cost, one can be worse than none and two better than both,
    so a search that stops at the first drop would miss it.

    Parameters
    ----------
    goodput : tokens per second as a function of k.
    most : largest k, at least 0.
    """
    best, highest = 0, goodput(0)
    for num_drafts in range(1, most + 1):
        value = goodput(num_drafts)
        if value > highest:
            best, highest = num_drafts, value
    return best
