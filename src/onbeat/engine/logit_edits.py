"""Penalties, logit bias and banned tokens: changes of a row's logits before its token is chosen.

The work grows with the tokens concerned, not with the vocabulary V.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from onbeat.engine.draw import Floats, Logits, TokenIds
from onbeat.engine.sampling_row import SamplingRow


class LogitEdits(NamedTuple):
    """What a row's parameters change of its logits, in this order. In each part an id stands once."""

    penalised: TokenIds
    lowered_by: Floats
    """What frequency and presence take from each of `penalised`, behind the repetition penalty."""
    biased: TokenIds
    bias: Floats
    allowed: TokenIds | None
    """None: all are."""
    banned: TokenIds


def logit_edits(row: SamplingRow, vocab_size: int) -> LogitEdits:
    """Return penalties, then logit bias, then bans, of the token that is to come.

    Repetition penalizes prompt and output, frequency and presence the output alone.

    References
    ----------
    Keskar et al., "CTRL", 2019, section 4.1 (repetition penalty; its sign-dependent form is the one in use);
    the OpenAI API reference (frequency and presence).
    """
    params, none = row.params, np.zeros(0, np.int64)
    seen, times, allowed = none, np.zeros(0), None
    if row.has_penalties:
        row.token_counts.update(row.output_token_ids)
        seen, times = _in_vocabulary(vocab_size, row.token_counts.token_ids, row.token_counts.counts)
    lowered_by = params.frequency_penalty * times + params.presence_penalty * (times > 0)
    if params.allowed_token_ids:
        allowed = _in_vocabulary(vocab_size, row.allowed_token_ids)[0]
    banned = row.banned_token_ids if params.bad_words else none
    if row.holds_back_stops:
        banned = np.concatenate([banned, row.stop_token_ids])
    biased, bias = _in_vocabulary(vocab_size, *row.bias) if params.logit_bias else (none, np.zeros(0))
    return LogitEdits(seen, lowered_by, biased, bias, allowed, _in_vocabulary(vocab_size, banned)[0])


def edit_logits(logits_V: Logits, row: SamplingRow) -> None:
    """Apply `logit_edits` in place.

    Parameters
    ----------
    logits_V : [vocabulary], float32 or float64.
    row : the request whose logits these are.
    """
    edits = logit_edits(row, len(logits_V))
    if len(edits.penalised):
        values = logits_V[edits.penalised]
        # A tiny repetition penalty lifts a logit beyond the largest number: there it stays, ahead of others.
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            penalty = row.params.repetition_penalty
            values = np.where(values > 0, values / penalty, values * penalty)
            values -= edits.lowered_by.astype(values.dtype)
        logits_V[edits.penalised] = np.minimum(values, np.finfo(values.dtype).max)
    logits_V[edits.biased] += edits.bias.astype(logits_V.dtype)
    if edits.allowed is not None:
        kept = logits_V[edits.allowed]
        logits_V.fill(-np.inf)
        logits_V[edits.allowed] = kept
    logits_V[edits.banned] = -np.inf


def _in_vocabulary(
    vocab_size: int, token_ids: TokenIds, values: Floats | None = None
) -> tuple[TokenIds, Floats]:
    """Drop ids that have no logit: nothing can sample them, so no change to them has a meaning."""
    values = np.zeros(len(token_ids)) if values is None else values
    inside = (token_ids >= 0) & (token_ids < vocab_size)
    return (token_ids, values) if inside.all() else (token_ids[inside], values[inside])
