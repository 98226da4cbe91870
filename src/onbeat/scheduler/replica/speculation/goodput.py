"""The tokens that speculation is expected to deliver: what goodput has over the step's time.

The model is SmartSpec's (Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models
Using Goodput", arXiv 2406.14066): each draft is accepted with probability alpha if those before it were.
"""

from __future__ import annotations


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
