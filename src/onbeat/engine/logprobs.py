"""Log-probabilities of sampled tokens and their most likely alternatives."""

# ruff: noqa: N803, N806 -- array names carry shape suffixes

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from onbeat.core.request import TokenLogprobs
from onbeat.engine.draw import Logits, TokenIds, top_k_bound


def token_logprobs(
    logits_V: Logits, token_id: int, alternatives: int | Sequence[int], *, with_rank: bool = False
) -> TokenLogprobs:
    """Report a row's token under the softmax of its logits.

    Parameters
    ----------
    logits_V : [vocabulary], as the model made them: before penalties and temperature.
    token_id : the token that was sampled.
    alternatives : how many of the most likely tokens to report with it, the lowest ids of equals; or which
        tokens to report behind the token itself.
    with_rank : whether to count the tokens that are likelier.
    """
    if isinstance(alternatives, int):
        shown = _most_likely(logits_V, min(alternatives, len(logits_V))).tolist()
    else:
        shown = [token_id, *(other for other in alternatives if other != token_id)]
    with np.errstate(invalid="ignore", over="ignore"):  # of a row that is not finite: its reports are NaN
        peak = float(logits_V.max())
        weights_V = logits_V - peak
        log_mass = peak + math.log(np.exp(weights_V, out=weights_V).sum())
    values = [value - log_mass for value in logits_V[shown].tolist()]
    rank = 1 + int(np.count_nonzero(logits_V > logits_V[token_id])) if with_rank else None
    return TokenLogprobs(token_id, float(logits_V[token_id]) - log_mass, tuple(shown), tuple(values), rank)


def _most_likely(logits_V: Logits, count: int) -> TokenIds:
    if not count:
        return np.zeros(0, np.int64)
    candidates = np.flatnonzero(logits_V >= top_k_bound(logits_V, count))
    return candidates[np.argsort(-logits_V[candidates], kind="stable")[:count]]
