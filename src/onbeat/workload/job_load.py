"""From jobs to the load that a simulation runs: one row a call, with prompts that contain earlier answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.metrics.jobs import CallOfJob, JobOutcome, JobSummary, job_outcome, summarise_jobs
from onbeat.workload.job import Job
from onbeat.workload.offered import JobRows, OfferedLoad

JOB_BLOCK = 16
"""Tokens of a block that prompts of jobs may share: the smallest of KV blocks."""

_Part = tuple[tuple[object, ...], int]
"""(name of a text, its tokens)"""


def job_load(name: str, jobs: Sequence[Job], starts: NDArray[np.float64] | None) -> OfferedLoad:
    """Return the calls of jobs as a load, those of a job one behind another.

    Parameters
    ----------
    starts : when each job starts, seconds, ascending; None is a closed loop.

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
        jobs=JobRows(jobs=tuple(jobs), firsts=firsts),
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
