"""Log-probabilities of sampled tokens and their most likely alternatives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from onbeat.core.request import TokenLogprobs

_CHUNK_ROWS = 32
"""Rows whose log-probabilities exist at once, so that their scratch memory stays in the cache."""


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_alternatives: Sequence[int], *, with_ranks: bool = False
) -> list[TokenLogprobs]:
    """Report each row's token under the softmax of its logits.

    Parameters
    ----------
    logits : [rows, vocabulary], as the model made them: before penalties and temperature.
    token_ids : the token that was sampled, per row.
    num_alternatives : how many of the most likely tokens to report with it, per row.
    with_ranks : whether to count the tokens that are likelier.
    """
    reports: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        logprobs = torch.log_softmax(logits[rows], dim=-1)
        report = _report(logprobs, token_ids[rows], num_alternatives[rows])
        if with_ranks:
            values = logprobs.gather(1, torch.tensor(token_ids[rows], device=logprobs.device).unsqueeze(1))
            ranks = (logprobs > values).sum(dim=-1).tolist()
            report = [replace(each, rank=1 + rank) for each, rank in zip(report, ranks, strict=True)]
        reports += report
    return reports


def with_tokens(report: TokenLogprobs, logits: Tensor, token_ids: Sequence[int]) -> TokenLogprobs:
    """Return a report with certain tokens as its alternatives, behind the token itself.

    Parameters
    ----------
    logits : of its row, [vocabulary].
    token_ids : the alternatives.
    """
    others = [token_id for token_id in token_ids if token_id != report.token_id]
    values = torch.log_softmax(logits, dim=-1)[others].tolist()
    return replace(report, top_token_ids=(report.token_id, *others), top_logprobs=(report.logprob, *values))


def _report(
    logprobs: Tensor, token_ids: Sequence[int], num_alternatives: Sequence[int]
) -> list[TokenLogprobs]:
    num_rows, vocab_size = logprobs.shape
    values = logprobs[range(num_rows), token_ids].tolist()
    # Rows that want the same number go together: which of equally likely tokens make up a row's list then
    # depends on the row's own number, not on the largest in the batch.
    rows_by_count: dict[int, list[int]] = defaultdict(list)
    for row, count in enumerate(num_alternatives):
        rows_by_count[min(count, vocab_size)].append(row)
    alternatives: dict[int, tuple[list[int], list[float]]] = {}
    for count, rows in rows_by_count.items():
        top = (logprobs if len(rows) == num_rows else logprobs[rows]).topk(count, dim=-1)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        alternatives.update(zip(rows, pairs, strict=True))
    return [
        TokenLogprobs(token_id, value, tuple(alternatives[row][0]), tuple(alternatives[row][1]))
        for row, (token_id, value) in enumerate(zip(token_ids, values, strict=True))
    ]
