"""Penalties, logit bias and banned tokens: changes of the logits before a token is chosen.

Each changes a few entries of a row, so the entries of all rows are gathered, changed and written back
together; the work grows with the tokens concerned, not with the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onbeat.engine.sampling_row import SamplingRow, TokenIds

_Floats = npt.NDArray[np.float64]


def edit_logits(logits: Tensor, rows: Mapping[int, SamplingRow]) -> None:
    """Apply penalties, then logit bias, then bans, in place.

    Parameters
    ----------
    logits : [rows, vocabulary], float32 or float64, contiguous.
    rows : the requests whose logits change, by row of `logits`.
    """
    _apply_penalties(logits, rows)
    _add_bias(logits, rows)
    _ban_tokens(logits, rows)


def _apply_penalties(logits: Tensor, rows: Mapping[int, SamplingRow]) -> None:
    """Repetition (prompt and output), then frequency and presence (output only) penalties.

    References
    ----------
    Keskar et al., "CTRL", 2019, section 4.1 (repetition penalty; its sign-dependent form is the one in use);
    the OpenAI API reference (frequency and presence).
    """
    indices, per_row = [], []
    for row_index, row in rows.items():
        if not row.has_penalties:
            continue
        params, counts = row.params, row.token_counts
        counts.update(row.output_token_ids)
        token_ids, token_counts = _in_vocabulary(logits, counts.token_ids, counts.counts)
        indices.append(row_index * logits.shape[1] + token_ids)
        lowered = params.frequency_penalty * token_counts + params.presence_penalty * (token_counts > 0)
        per_row.append(np.stack([np.full(len(token_ids), params.repetition_penalty), lowered]))
    if not indices:
        return
    flat, where = logits.view(-1), _to(logits, np.concatenate(indices))
    repetition, lowered_by = _to(logits, np.concatenate(per_row, axis=1)).to(logits.dtype)
    values = flat[where]
    values = torch.where(values > 0, values / repetition, values * repetition)
    # A tiny repetition penalty lifts a logit beyond the largest number: there it stays, ahead of all others.
    flat[where] = (values - lowered_by).clamp_(max=torch.finfo(logits.dtype).max)


def _add_bias(logits: Tensor, rows: Mapping[int, SamplingRow]) -> None:
    indices, values = [], []
    for row_index, row in rows.items():
        if row.params.logit_bias:
            token_ids, bias = _in_vocabulary(logits, *row.bias)
            indices.append(row_index * logits.shape[1] + token_ids)
            values.append(bias)
    if indices:
        added = _to(logits, np.concatenate(values)).to(logits.dtype)
        logits.view(-1)[_to(logits, np.concatenate(indices))] += added


def _ban_tokens(logits: Tensor, rows: Mapping[int, SamplingRow]) -> None:
    for row_index, row in rows.items():
        if row.params.allowed_token_ids:
            allowed = _to(logits, _in_vocabulary(logits, row.allowed_token_ids)[0])
            kept = logits[row_index, allowed]
            logits[row_index].fill_(-torch.inf)
            logits[row_index, allowed] = kept
        if row.params.bad_words:
            logits[row_index, _to(logits, _in_vocabulary(logits, row.banned_token_ids)[0])] = -torch.inf
        if row.holds_back_stops:
            logits[row_index, _to(logits, _in_vocabulary(logits, row.stop_token_ids)[0])] = -torch.inf


def _in_vocabulary(
    logits: Tensor, token_ids: TokenIds, values: _Floats | None = None
) -> tuple[TokenIds, _Floats]:
    """Drop ids that have no logit: nothing can sample them, so no change to them has a meaning."""
    values = np.zeros(len(token_ids)) if values is None else values
    inside = (token_ids >= 0) & (token_ids < logits.shape[1])
    return (token_ids, values) if inside.all() else (token_ids[inside], values[inside])


def _to(logits: Tensor, array: TokenIds | _Floats) -> Tensor:
    return torch.from_numpy(array).to(logits.device)
