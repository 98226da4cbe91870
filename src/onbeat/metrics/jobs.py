"""What became of the jobs of a run: calls that have one deadline together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

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
    """Jobs of one kind, or of all."""

    num_offered: int
    num_kept: int
    num_late: int
    """Whose last call ended after the deadline."""
    median_seconds: float | None
    """Of those that came to their end; None without any, as is the next."""
    p99_seconds: float | None
    in_calls: float
    """Share of the time of those jobs in which calls were open."""
    wasted_share: float
    """Output tokens of jobs that were not kept, of all."""
    twice_share: float | None
    """Prompt tokens that were computed again, of all: an earlier call of their job had computed them. None
    where nobody says what is cached."""

    @property
    def attainment(self) -> float:
        """Share of the jobs that were kept."""
        return self.num_kept / self.num_offered

    @property
    def num_lost(self) -> int:
        """Jobs that did not come to their end: a call was refused, or the deadline passed before one."""
        return self.num_offered - self.num_kept - self.num_late

    def keys(self) -> dict[str, Any]:
        """Return it as it is saved."""
        return {
            "offered": self.num_offered,
            "kept": self.num_kept,
            "late": self.num_late,
            "lost": self.num_lost,
            "attainment": self.attainment,
            "median_job_ms": None if self.median_seconds is None else self.median_seconds * 1e3,
            "p99_job_ms": None if self.p99_seconds is None else self.p99_seconds * 1e3,
            "time_in_calls_share": self.in_calls,
            "wasted_output_share": self.wasted_share,
            "prompt_computed_twice_share": self.twice_share,
        }

    def __str__(self) -> str:
        """Return one line."""
        times = "no job ended"
        if self.median_seconds is not None and self.p99_seconds is not None:
            times = f"P50 {self.median_seconds:.3g} s, P99 {self.p99_seconds:.3g} s"
        twice = "" if self.twice_share is None else f"; {self.twice_share:.1%} of prompts computed twice"
        return (
            f"{self.num_kept:,} of {self.num_offered:,} kept ({self.attainment:.1%}), "
            f"{self.num_late:,} late, {self.num_lost:,} lost; {times}, {self.in_calls:.0%} of it in calls"
            f"{twice}"
        )


def summarise_jobs(outcomes: Iterable[JobOutcome]) -> dict[str, JobSummary]:
    """Return the summary of each kind of job, by its name."""
    by_kind: dict[str, list[JobOutcome]] = {}
    for outcome in outcomes:
        by_kind.setdefault(outcome.kind, []).append(outcome)
    return {kind: _summary(own) for kind, own in sorted(by_kind.items())}


def _summary(outcomes: Sequence[JobOutcome]) -> JobSummary:
    ended = [each for each in outcomes if each.seconds is not None]
    seconds = np.array([each.seconds for each in ended], dtype=np.float64)
    num_tokens = sum(each.num_output_tokens for each in outcomes)
    num_kept = sum(each.is_kept for each in outcomes)
    return JobSummary(
        num_offered=len(outcomes),
        num_kept=num_kept,
        num_late=len(ended) - num_kept,
        median_seconds=percentile(seconds, 50) if ended else None,
        p99_seconds=percentile(seconds, 99) if ended else None,
        in_calls=sum(each.in_calls for each in ended) / max(float(seconds.sum()), 1e-9),
        wasted_share=sum(each.num_output_tokens for each in outcomes if not each.is_kept)
        / max(num_tokens, 1),
        twice_share=_twice_share(outcomes),
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
        ...


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
