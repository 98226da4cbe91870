"""vLLM's tokens, log-probabilities and embeddings, in onbeat's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onbeat.core.request import SamplingParams, TokenLogprobs
from onbeat.engine.pooling import Embeddings


def row_logprobs(params: SamplingParams, lists: Any, index: int, num_tokens: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of a row's tokens.

    Parameters
    ----------
    lists : vLLM's: first the sampled token, then the likeliest or those that were asked for.
    index : of the row among vLLM's.
    """
    part = lists.slice_request(index, num_tokens)
    num = len(params.logprob_token_ids) or params.num_logprobs or 0
    return [
        _logprobs(ids, values, num) for ids, values in zip(part.logprob_token_ids, part.logprobs, strict=True)
    ]


def prompt_logprobs(tensors: Any, num: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of a prompt's tokens but the first."""
    lists = tensors.tolists()
    return [
        _logprobs(ids, values, num, rank=int(rank))
        for ids, values, rank in zip(
            lists.logprob_token_ids, lists.logprobs, lists.sampled_token_ranks, strict=True
        )
    ]


def _logprobs(
    ids: NDArray[np.integer[Any]], values: NDArray[np.floating[Any]], num: int, rank: int | None = None
) -> TokenLogprobs:
    return TokenLogprobs(
        int(ids[0]),
        float(values[0]),
        tuple(map(int, ids[1 : 1 + num])),
        tuple(map(float, values[1 : 1 + num])),
        rank,
    )


def embeddings(theirs: Any) -> Embeddings:
    """Return the embeddings of prompts that a step has completed."""
    found = Embeddings({}, {})
    for name, index in theirs.req_id_to_index.items():
        if (tensor := theirs.pooler_output[index]) is not None:
            found.add(name, tensor.float().numpy().astype("<f4").tobytes())
    return found


def sampled(token_ids: Sequence[int]) -> list[int]:
    """Return a row's tokens as plain integers, without vLLM's placeholders."""
    return [int(each) for each in token_ids if each >= 0]
