"""Lanes: chats and queries with objectives, and beside them a corpus of documents to embed, without any.

References
----------
Huang et al., "ScalingNote: Scaling up Retrievers with Large Language Models for Real-World Dense Retrieval"
(arXiv 2411.15766): queries are embedded while somebody waits, documents whenever there is room.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onbeat.core.slo import SLO
from onbeat.workload.job import Call, Job
from onbeat.workload.job_load import job_load
from onbeat.workload.lengths import LogNormalLength
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass

LANES = "lanes"
CHAT, QUERY, OFFLINE = "chat", "query", "offline"
LANE_CLASSES = (
    SLOClass(name=CHAT, slo=SLO(ttft=0.5, tbt=0.05), share=0.25),
    SLOClass(name=QUERY, slo=SLO(ttft=0.1), share=0.5),
    SLOClass(name=OFFLINE, slo=SLO(), share=0.25, weight=0.5),
)
"""Of lanes for which nobody states objectives; a request's class is that of its lane, whatever the shares."""
QUERIES_PER_CHAT = 2.5
NUM_CLIENTS = 64
"""Clients of the corpus: each sends its next document when the one before it is embedded."""
DOCUMENTS = 2.0
"""Documents of the corpus, for each chat or query, unless a number is given."""

_PROMPT, _ANSWER, _QUERY, _DOCUMENT = 512, 128, 30, 500
"""Mean tokens."""


def lane_load(
    starts: NDArray[np.float64],
    rng: np.random.Generator,
    *,
    num_documents: int | None = None,
    query_share: float = QUERIES_PER_CHAT / (1 + QUERIES_PER_CHAT),
) -> OfferedLoad:
    """Return chats and queries that arrive when they are told to, and documents as fast as they are embedded.

    Parameters
    ----------
    starts : when chats and queries arrive, seconds, ascending.
    num_documents : of the corpus, which begins at 0 seconds; None is twice the chats and queries.
    query_share : of these, that are queries.
    """
    is_query = rng.random(len(starts)) < query_share
    lengths = zip(
        _tokens(rng, _PROMPT, len(starts)),
        _tokens(rng, _ANSWER, len(starts)),
        _tokens(rng, _QUERY, len(starts)),
        is_query.tolist(),
        strict=True,
    )
    online = [
        _job(QUERY, [Call(input_tokens=words, output_tokens=0)])
        if asks
        else _job(CHAT, [Call(input_tokens=prompt, output_tokens=answer)])
        for prompt, answer, words, asks in lengths
    ]
    num_documents = int(DOCUMENTS * len(starts)) if num_documents is None else num_documents
    documents = _tokens(rng, _DOCUMENT, num_documents)
    clients = [documents[number::NUM_CLIENTS] for number in range(min(NUM_CLIENTS, num_documents))]
    corpus = [_job(OFFLINE, _one_by_one(own)) for own in clients]
    return job_load(LANES, [*corpus, *online], np.concatenate((np.zeros(len(corpus)), starts)))


def _job(kind: str, calls: list[Call]) -> Job:
    return Job(calls=tuple(calls), kind=kind)


def _one_by_one(lengths: list[int]) -> list[Call]:
    """Return documents of these tokens, each of which waits for the one before it."""
    return [
        Call(input_tokens=length, output_tokens=0, after=(index - 1,) if index else ())
        for index, length in enumerate(lengths)
    ]


def _tokens(rng: np.random.Generator, mean: int, num: int) -> list[int]:
    if not num:
        return []
    lengths = LogNormalLength(mean=mean, sigma=0.5, low=max(1, mean // 8), high=4 * mean)
    drawn: list[int] = lengths.draw(num, rng).tolist()
    return drawn
