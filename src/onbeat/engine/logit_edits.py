"""Penalties, logit bias and banned tokens: changes of a row's logits before its token is chosen.

The work grows with the tokens concerned, not with the vocabulary V.
"""

# ruff: noqa: N803 -- array names carry shape suffixes

from __future__ import annotations

import numpy as np

from onbeat.engine.draw import Floats, Logits
from onbeat.engine.sampling_row import SamplingRow, TokenIds


def edit_logits(logits_V: Logits, row: SamplingRow) -> None:
    """Apply penalties, then logit bias, then bans, in place.

    Parameters
    ----------
    logits_V : [vocabulary], float32 or float64.
    row : the request whose logits these are.
    """
    if row.has_penalties:
        _apply_penalties(logits_V, row)
    if row.params.logit_bias:
        token_ids, bias = _in_vocabulary(logits_V, *row.bias)
        logits_V[token_ids] += bias.astype(logits_V.dtype)
    _ban_tokens(logits_V, row)


def _apply_penalties(logits_V: Logits, row: SamplingRow) -> None:
    """Repetition (prompt and output), then frequency and presence (output only) penalties.

    References
    ----------
    Keskar et al., "CTRL", 2019, section 4.1 (repetition penalty; its sign-dependent form is the one in use);
    the OpenAI API reference (frequency and presence).
    """
    params, counts = row.params, row.token_counts
    counts.update(row.output_token_ids)
    token_ids, token_counts = _in_vocabulary(logits_V, counts.token_ids, counts.counts)
    lowered_by = params.frequency_penalty * token_counts + params.presence_penalty * (token_counts > 0)
    values = logits_V[token_ids]
    # A tiny repetition penalty lifts a logit beyond the largest number: there it stays, ahead of all others.
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        penalty = params.repetition_penalty
        values = np.where(values > 0, values / penalty, values * penalty)
        values -= lowered_by.astype(values.dtype)
    logits_V[token_ids] = np.minimum(values, np.finfo(values.dtype).max)


def _ban_tokens(logits_V: Logits, row: SamplingRow) -> None:
    if row.params.allowed_token_ids:
        allowed = _in_vocabulary(logits_V, row.allowed_token_ids)[0]
        kept = logits_V[allowed]
        logits_V.fill(-np.inf)
        logits_V[allowed] = kept
    if row.params.bad_words:
        logits_V[_in_vocabulary(logits_V, row.banned_token_ids)[0]] = -np.inf
    if row.holds_back_stops:
        logits_V[_in_vocabulary(logits_V, row.stop_token_ids)[0]] = -np.inf


def _in_vocabulary(
    logits_V: Logits, token_ids: TokenIds, values: Floats | None = None
) -> tuple[TokenIds, Floats]:
    """Drop ids that have no logit: nothing can sample them, so no change to them has a meaning."""
    values = np.zeros(len(token_ids)) if values is None else values
    inside = (token_ids >= 0) & (token_ids < len(logits_V))
    return (token_ids, values) if inside.all() else (token_ids[inside], values[inside])
