"""What became of the jobs of a run: calls that have one deadline together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np

from onbeat.metrics.attainment import TOLERANCE
from onbeat.metrics.distribution import percentile
from onbeat.metrics.measured import MeasuredRequest

CACHE_BLOCK = 16
"""Tokens of the smallest KV blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """One job. Times are seconds."""

    kind: str
    deadline: float
    """From its start; infinite for none."""
    seconds: float | None
    """From its start to the end of its last call; None where a call failed, was refused or was never sent."""
    in_calls: float
    """In which at least one of its calls was open."""
    num_output_tokens: int
    """Of all its calls that came."""
    num_prompt_tokens: int = 0
    """Of those of them that came to their end."""
    num_computed_twice: int | None = None
    """Of these, tokens that an earlier call of the job had computed, and that were not cached any more; None
    where nobody says what is cached."""

    @property
    def is_kept(self) -> bool:
        """Whether all its calls ended by its deadline."""
        return self.seconds is not None and self.seconds <= self.deadline + TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """Jobs of one kind, under the keys by which they are saved."""

    offered: int
    kept: int
    late: int
    """Whose last call ended after the deadline."""
    lost: int
    """That did not come to their end: a call was refused, or the deadline passed before one."""
    attainment: float
    """Share of the jobs that were kept."""
    median_job_ms: float | None
    """Of those that came to their end; None without any, as is the next."""
    p99_job_ms: float | None
    time_in_calls_share: float
    """Share of the time of those jobs in which calls were open."""
    wasted_output_share: float
    """Output tokens of jobs that were not kept, of all."""
    prompt_computed_twice_share: float | None
    """Prompt tokens that were computed again, of all: an earlier call of their job had computed them. None
    where nobody says what is cached."""

    def __str__(self) -> str:
        """Return one line."""
        times = "no job ended"
        if self.median_job_ms is not None and self.p99_job_ms is not None:
            times = f"P50 {self.median_job_ms / 1e3:.3g} s, P99 {self.p99_job_ms / 1e3:.3g} s"
        twice = self.prompt_computed_twice_share
        return (
            f"{self.kept:,} of {self.offered:,} kept ({self.attainment:.1%}), {self.late:,} late, "
            f"{self.lost:,} lost; {times}, {self.time_in_calls_share:.0%} of it in calls"
            + ("" if twice is None else f"; {twice:.1%} of prompts computed twice")
        )


def summarise_jobs(outcomes: Iterable[JobOutcome]) -> dict[str, JobSummary]:
    """Return the summary of each kind of job, by its name."""
    by_kind: dict[str, list[JobOutcome]] = {}
    for outcome in outcomes:
        by_kind.setdefault(outcome.kind, []).append(outcome)
    return {kind: _summary(own) for kind, own in sorted(by_kind.items())}


def _summary(outcomes: Sequence[JobOutcome]) -> JobSummary:
    times_ms = np.array([each.seconds for each in outcomes if each.seconds is not None]) * 1e3
    num_kept = sum(each.is_kept for each in outcomes)
    in_calls = sum(each.in_calls for each in outcomes if each.seconds is not None)
    num_tokens = sum(each.num_output_tokens for each in outcomes)
    num_wasted = sum(each.num_output_tokens for each in outcomes if not each.is_kept)
    return JobSummary(
        offered=len(outcomes),
        kept=num_kept,
        late=times_ms.size - num_kept,
        lost=len(outcomes) - times_ms.size,
        attainment=num_kept / len(outcomes),
        median_job_ms=percentile(times_ms, 50) if times_ms.size else None,
        p99_job_ms=percentile(times_ms, 99) if times_ms.size else None,
        time_in_calls_share=in_calls / max(float(times_ms.sum()) / 1e3, 1e-9),
        wasted_output_share=num_wasted / max(num_tokens, 1),
        prompt_computed_twice_share=_twice_share(outcomes),
    )


def _twice_share(outcomes: Sequence[JobOutcome]) -> float | None:
    known = [each.num_computed_twice for each in outcomes if each.num_computed_twice is not None]
    if len(known) < len(outcomes):
        return None
    return sum(known) / max(sum(each.num_prompt_tokens for each in outcomes), 1)


class CallOfJob(MeasuredRequest, Protocol):
    """What became of a call of a job."""

    @property
    def num_cached_tokens(self) -> int | None:
        """Of the prompt; None where nobody says."""


def job_outcome(
    kind: str, deadline: float, continued: Sequence[int | None], calls: Mapping[int, CallOfJob], start: float
) -> JobOutcome:
    """Return what became of a job.

    Parameters
    ----------
    continued : for each of its calls, the one whose conversation it goes on with.
    calls : those that came.
    start : when it started, seconds.
    """
    times = list(calls.values())
    twice = [
        _computed_twice(call, calls[before])
        for index, call in calls.items()
        if call.is_completed and (before := continued[index]) is not None and before in calls
    ]
    is_whole = len(calls) == len(continued) and all(each.is_completed for each in times)
    return JobOutcome(
        kind=kind,
        deadline=deadline,
        seconds=max(each.end for each in times) - start if is_whole else None,
        in_calls=sum(end - begin for begin, end in _joined((each.arrival, each.end) for each in times)),
        num_output_tokens=sum(each.num_output_tokens for each in times),
        num_prompt_tokens=sum(each.num_prompt_tokens for each in times if each.is_completed),
        num_computed_twice=None if None in twice else sum(each for each in twice if each is not None),
    )


def _computed_twice(call: CallOfJob, before: CallOfJob) -> int | None:
    """Return the prompt tokens of a call that the call before it had computed, and the cache lacks.

    Whole blocks alone can be cached, and neither the last token of a prompt nor that of an answer.
    """
    if call.num_cached_tokens is None:
        return None
    common = min(before.num_prompt_tokens + before.num_output_tokens, call.num_prompt_tokens) - 1
    return max(0, common // CACHE_BLOCK * CACHE_BLOCK - call.num_cached_tokens)


def _joined(spans: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield spans of time that do not overlap and cover the same."""
    begin, last = -inf, -inf
    for start, end in sorted(spans):
        if start > last:
            if last > -inf:
                yield begin, last
            begin = start
        last = max(last, end)
    if last > -inf:
        yield begin, last


def lines_of_jobs(jobs: Mapping[str, JobSummary]) -> Iterator[str]:
    """Yield one line for each kind of job."""
    for kind, summary in jobs.items():
        yield f"jobs ({kind}): {summary}"
