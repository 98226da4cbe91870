"""Jobs that are drawn, and the load of jobs that a simulation runs: one row a call.

Those drawn are chats, agents with tools, retrieval in steps or by one plan, map and reduce. And lanes: chats
and queries with objectives, and beside them a corpus of documents to embed, without any.

References
----------
Joshi et al., "REAPER: Reasoning based Retrieval Planning for Complex RAG Systems" (arXiv 2407.18553): one
call that plans all retrievals, in place of a chain that decides on them one by one.
Huang et al., "ScalingNote: Scaling up Retrievers with Large Language Models for Real-World Dense Retrieval"
(arXiv 2411.15766): queries are embedded while somebody waits, documents whenever there is room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO
from onbeat.metrics.jobs import CallOfJob, JobOutcome, JobSummary, job_outcome, summarise_jobs
from onbeat.workload.arrivals import LogNormalLength
from onbeat.workload.job import Call, Job
from onbeat.workload.offered import JobRows, OfferedLoad
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
        _lengths(rng, _PROMPT, len(starts)),
        _lengths(rng, _ANSWER, len(starts)),
        _lengths(rng, _QUERY, len(starts)),
        is_query.tolist(),
        strict=True,
    )
    online = [
        Job(kind=QUERY, calls=(Call(input_tokens=words, output_tokens=0),))
        if asks
        else Job(kind=CHAT, calls=(Call(input_tokens=prompt, output_tokens=answer),))
        for prompt, answer, words, asks in lengths
    ]
    num_documents = int(DOCUMENTS * len(starts)) if num_documents is None else num_documents
    documents = _lengths(rng, _DOCUMENT, num_documents)
    clients = [documents[number::NUM_CLIENTS] for number in range(min(NUM_CLIENTS, num_documents))]
    corpus = [Job(kind=OFFLINE, calls=_one_by_one(own)) for own in clients]
    starts = np.concatenate((np.zeros(len(corpus)), starts))
    return job_load(LANES, [*corpus, *online], starts, num_clients=len(corpus))


def _one_by_one(lengths: list[int]) -> tuple[Call, ...]:
    """Return documents of these tokens, each of which waits for the one before it."""
    return tuple(
        Call(input_tokens=length, output_tokens=0, after=(index - 1,) if index else ())
        for index, length in enumerate(lengths)
    )


JobKind = Literal["chat-sessions", "agents", "retrieval-chain", "retrieval-plan", "map-reduce"]
JOB_KINDS: tuple[JobKind, ...] = get_args(JobKind)


def unit_of(load: OfferedLoad) -> str:
    """Return what a load's rate counts: requests, or the jobs that they are calls of."""
    return "request" if load.jobs is None or load.name == LANES else "job"


TOKEN_SECONDS = 0.02
"""What a deadline allows for a token of an answer before it is stretched."""
STRETCHES = (3.0, 5.0, 8.0)
"""How many times the time that a job takes alone its deadline is: one of these, drawn."""


def _object(properties: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of an object that has these properties and no others."""
    about = {"properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "object", **about}


_STEP = _object(
    {"tool": {"enum": ["search", "lookup", "orders"]}, "query": {"type": "string", "maxLength": 80}}
)
PLAN_SCHEMA = _object({"steps": {"type": "array", "minItems": 1, "maxItems": 5, "items": _STEP}})
"""Of a plan of retrievals."""


def draw_jobs(
    kind: JobKind, num_jobs: int, rng: np.random.Generator, *, deadline: float | None = None
) -> list[Job]:
    """Return jobs of a kind.

    Parameters
    ----------
    deadline : of each, seconds; None stretches the time that a job takes alone. Chats have none unless it is
        given: each of their answers has a reader of its own.
    """
    draw = _DRAWS[kind]
    jobs = [replace(draw(rng), kind=kind) for _ in range(num_jobs)]
    if deadline is not None:
        return [replace(job, deadline=deadline) for job in jobs]
    if kind == "chat-sessions":
        return jobs
    stretches = rng.choice(STRETCHES, size=num_jobs)
    return [
        replace(job, deadline=float(stretch) * seconds_alone(job, TOKEN_SECONDS))
        for job, stretch in zip(jobs, stretches, strict=True)
    ]


def seconds_alone(job: Job, token_seconds: float) -> float:
    """Return how long a job takes if only the tokens of its answers and its think times do."""
    ends = list[float]()
    for call in job.calls:
        start = max((ends[each] for each in call.needs), default=0.0)
        ends.append(start + call.think + call.output_tokens * token_seconds)
    return max(ends)


def _chat(rng: np.random.Generator) -> Job:
    """Return a chat of 2 to 8 turns, between which a person reads and types."""
    turns = [
        _turn(_tokens(rng, 60), _tokens(rng, 180), index, think=float(rng.exponential(8.0)))
        for index in range(int(rng.integers(2, 9)))
    ]
    return Job(calls=tuple(turns), system_tokens=200)


def _agent(rng: np.random.Generator) -> Job:
    """Return an agent that calls a tool after each answer but the last: 5 to 12 calls."""
    calls = [_turn(_tokens(rng, 400), _tokens(rng, 110), 0)]
    for index in range(1, int(rng.integers(5, 13))):
        think = float(rng.uniform(0.2, 1.5))
        calls.append(_turn(_tokens(rng, 300), _tokens(rng, 110), index, think=think))
    return Job(calls=tuple(calls), system_tokens=800)


_QUESTION, _PASSAGE, _THOUGHT, _PLAN_STEP, _ANSWER = 60, 500, 50, 25, 150


def _chain(rng: np.random.Generator) -> Job:
    """Return a chain of 2 to 4 calls that each choose a retrieval, and one that answers."""
    num_retrievals = int(rng.integers(2, 5))
    calls = [_turn(_tokens(rng, _QUESTION), _tokens(rng, _THOUGHT), 0)]
    for index in range(1, num_retrievals + 1):
        size = _ANSWER if index == num_retrievals else _THOUGHT
        think = float(rng.uniform(0.1, 0.4))
        calls.append(_turn(_tokens(rng, _PASSAGE), _tokens(rng, size), index, think=think))
    return Job(calls=tuple(calls), system_tokens=600)


def _plan(rng: np.random.Generator) -> Job:
    """Return one call that plans 2 to 4 retrievals, which run at once, and one that answers."""
    num_retrievals = int(rng.integers(2, 5))
    plan = Call(
        input_tokens=_tokens(rng, _QUESTION), output_tokens=_PLAN_STEP * num_retrievals, schema=PLAN_SCHEMA
    )
    found = sum(_tokens(rng, _PASSAGE) for _ in range(num_retrievals))
    slowest = max(float(rng.uniform(0.1, 0.4)) for _ in range(num_retrievals))
    return Job(calls=(plan, _turn(found, _tokens(rng, _ANSWER), 1, think=slowest)), system_tokens=600)


def _map_reduce(rng: np.random.Generator) -> Job:
    """Return 4 to 16 calls that each sum up a document at once, and one that joins what they say."""
    num_documents = int(rng.integers(4, 17))
    maps = [
        Call(input_tokens=_tokens(rng, 1000), output_tokens=_tokens(rng, 80)) for _ in range(num_documents)
    ]
    joined = Call(input_tokens=50, output_tokens=_tokens(rng, 250), quotes=tuple(range(num_documents)))
    return Job(calls=(*maps, joined), system_tokens=150)


def _turn(input_tokens: int, output_tokens: int, index: int, *, think: float = 0.0) -> Call:
    """Return a call that goes on with the one before it."""
    if not index:
        return Call(input_tokens=input_tokens, output_tokens=output_tokens)
    return Call(input_tokens=input_tokens, output_tokens=output_tokens, think=think, continues=index - 1)


def _tokens(rng: np.random.Generator, mean: int) -> int:
    return _lengths(rng, mean, 1)[0]


def _lengths(rng: np.random.Generator, mean: int, num: int) -> list[int]:
    """Draw log-normal numbers of tokens, from an eighth of the mean to four times it."""
    lengths = LogNormalLength(mean=mean, sigma=0.5, low=max(1, mean // 8), high=4 * mean)
    drawn: list[int] = lengths.draw(num, rng).tolist()
    return drawn


_DRAWS: Mapping[JobKind, Callable[[np.random.Generator], Job]] = {
    "chat-sessions": _chat,
    "agents": _agent,
    "retrieval-chain": _chain,
    "retrieval-plan": _plan,
    "map-reduce": _map_reduce,
}


JOB_BLOCK = 16
"""Tokens of a block that prompts of jobs may share: the smallest of KV blocks."""

_Part = tuple[tuple[object, ...], int]
"""(name of a text, its tokens)"""


def job_load(
    name: str, jobs: Sequence[Job], starts: NDArray[np.float64] | None, *, num_clients: int = 0
) -> OfferedLoad:
    """Return the calls of jobs as a load, those of a job one behind another.

    Parameters
    ----------
    starts : when each job starts, seconds, ascending; None is a closed loop.
    num_clients : see `JobRows`.

    Raises
    ------
    ConfigError : there are no jobs.
    """
    if not jobs:
        raise ConfigError(f"the {name} load has no jobs")
    sizes = [len(job.calls) for job in jobs]
    firsts = np.concatenate(([0], np.cumsum(sizes[:-1]))).astype(np.int64)
    prompts, blocks = _Prompts(), list[tuple[int, ...]]()
    lengths = list[int]()
    for number, job in enumerate(jobs):
        for num_tokens, own in prompts.of(number, job):
            lengths.append(num_tokens)
            blocks.append(own)
    return OfferedLoad(
        name=name,
        num_prompt_tokens=np.array(lengths, dtype=np.int64),
        num_output_tokens=np.array(
            [call.output_tokens for job in jobs for call in job.calls], dtype=np.int64
        ),
        arrivals=None if starts is None else np.repeat(starts, sizes),
        block_ids=tuple(blocks),
        block_size=JOB_BLOCK,
        ids_cover_output=True,
        tenants=tuple(job.tenant for job in jobs for _ in job.calls),
        jobs=JobRows(jobs=tuple(jobs), firsts=firsts, num_clients=num_clients),
    )


def given_starts(jobs: Sequence[Job]) -> NDArray[np.float64] | None:
    """Return the times at which jobs say that they start; None where none says so."""
    known = [job.start for job in jobs if job.start is not None]
    return np.array(known, dtype=np.float64) if len(known) == len(jobs) else None


class _Prompts:
    """Names the blocks of prompts and answers: equal texts at equal places have equal names."""

    def __init__(self) -> None:
        self._ids: dict[tuple[object, ...], int] = {}

    def of(self, number: int, job: Job) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield (prompt tokens, ids of the blocks of prompt and answer) of each call of a job."""
        wholes: list[list[_Part]] = []
        blocks: list[tuple[int, ...]] = []
        for index, call in enumerate(job.calls):
            parts: list[_Part] = []
            known: tuple[int, ...] = ()
            if call.continues is not None:
                parts, known = list(wholes[call.continues]), blocks[call.continues]
            elif job.system_tokens:
                parts.append((("system", job.kind), job.system_tokens))
            parts += [(("answer", number, each), job.calls[each].output_tokens) for each in call.quotes]
            own: tuple[object, ...] = ("input", number, index) if call.text is None else ("text", call.text)
            parts.append((own, call.input_tokens))
            num_tokens = sum(size for _, size in parts)
            parts.append((("answer", number, index), call.output_tokens))
            wholes.append(parts)
            blocks.append(self._extended(known, parts))
            yield num_tokens, blocks[-1]

    def _extended(self, known: tuple[int, ...], parts: Sequence[_Part]) -> tuple[int, ...]:
        """Return the blocks of a text of which the first are known."""
        found = list(known)
        skipped, block, filled = len(known) * JOB_BLOCK, list[object](), 0
        for name, size in parts:
            start = min(size, skipped)
            skipped -= start
            while start < size:
                taken = min(size - start, JOB_BLOCK - filled)
                block += (name, start, taken)
                start, filled = start + taken, filled + taken
                if filled == JOB_BLOCK:
                    found.append(self._id((found[-1] if found else -1, *block)))
                    block, filled = [], 0
        return tuple(found)

    def _id(self, content: tuple[object, ...]) -> int:
        return self._ids.setdefault(content, len(self._ids))


def summarise_calls(rows: JobRows, calls: Mapping[int, CallOfJob]) -> dict[str, JobSummary]:
    """Return what became of each kind of job, of those that had begun.

    Parameters
    ----------
    calls : those that came, by their rows.
    """
    outcomes = list[JobOutcome]()
    for job, first in zip(rows.jobs, rows.firsts.tolist(), strict=True):
        own = {index: calls[first + index] for index in range(len(job.calls)) if first + index in calls}
        if own:
            start = min(each.arrival for each in own.values())
            continued = [call.continues for call in job.calls]
            outcomes.append(job_outcome(job.kind, job.deadline, continued, own, start))
    return summarise_jobs(outcomes)
