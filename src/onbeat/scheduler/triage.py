"""Which prompts can be in time, and when one has its first token: the same for a replica and for a router."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, exp
from typing import Generic, NamedTuple, TypeVar

StateT = TypeVar("StateT")

LEAST_SHARE = 0.05
"""Share of the time that prompts are counted on to get, however little is left beside the decodes: without a
bound the predicted wait would be infinite."""
_MEMORY_SECONDS = 10.0
"""Time constant of the pace at which requests end."""
_MEDIAN_SOONER = 1 / 3
"""Of mean gaps, how much sooner than the mean the median of events at random is: see `capacity_wait`."""


class PrefillShare(NamedTuple):
    """What prompts get of a step."""

    chunk: int
    """Tokens of all prompts together, beyond which a longer step gains nothing."""
    length: float
    """Seconds of the step with as many."""
    share: float
    """Of the time that goes into prefill work, in (0, 1]."""

    @property
    def fixed_seconds(self) -> float:
        """Seconds of the step that do not go into prefill work.

        Work w takes ceil(w / (share length)) steps, each with this time beside it. Where the last is ended
        for it, it is done after w / share + `fixed_seconds` at the latest.
        """
        return self.length * (1 - self.share)


class DueWork(NamedTuple, Generic[StateT]):
    """A prompt, or what is left of it."""

    deadline: float
    """Of its first token, seconds; of its next one where a preempted request computes its tokens again."""
    seconds: float
    """Of prefill work that is left."""
    state: StateT


def select_feasible(
    jobs: Sequence[DueWork[StateT]],
    *,
    start: float,
    share: float,
    cost: Callable[[DueWork[StateT]], float | None],
    leaves_last: bool = False,
) -> tuple[list[DueWork[StateT]], list[DueWork[StateT]]]:
    """Split jobs into those to serve, in order of their deadlines, and those to leave behind.

    Going through the jobs by deadline, whenever one would be late the one of those so far that costs most is
    left behind, until it is not. Where the cost is the work, no other choice has more jobs in time (Moore,
    "An n job, one machine sequencing algorithm for minimizing the number of late jobs", Management Science
    15, 1968; Hodgson's form). Where a job that may not be left behind would be late without any other, no job
    is left behind for it.

    Parameters
    ----------
    jobs : by ascending deadline.
    start : when the first begins, seconds.
    share : of the machine's time that goes into this work, in (0, 1].
    cost : of keeping a job; None where it may not be left behind.
    leaves_last : whether of those that cost the same the last is left behind; else the first.
    """
    end = start
    for job in jobs:
        end += job.seconds / share
        if end > job.deadline:
            break
    else:  # all can be in time, whatever they cost
        return list(jobs), []
    heap: list[tuple[float, int]] = []
    left_behind: set[int] = set()
    end, droppable = start, 0.0
    """When the jobs so far end, and the time in it of those that may be left behind."""
    for index, job in enumerate(jobs):
        taken, value = job.seconds / share, cost(job)
        if end - droppable + taken > job.deadline:  # whichever others go
            if value is None:
                end += taken
            else:
                left_behind.add(index)
            continue
        end += taken
        if value is not None:
            droppable += taken
            heappush(heap, (-value, -index if leaves_last else index))
        while end > job.deadline and heap:
            costliest = abs(heappop(heap)[1])
            left_behind.add(costliest)
            end -= jobs[costliest].seconds / share
            droppable -= jobs[costliest].seconds / share
    kept = [job for index, job in enumerate(jobs) if index not in left_behind]
    return kept, [jobs[index] for index in sorted(left_behind)]


def drain_seconds(prefill: PrefillShare, seconds: float) -> float:
    """Return how long so much prefill work takes in such steps."""
    return seconds + _num_steps(prefill, seconds) * prefill.fixed_seconds


def finish_seconds(prefill: PrefillShare, seconds: float, all_seconds: float) -> float:
    """Return when the first so much of all work is done: at the end of its last step.

    That step holds what comes behind, too, as far as there is anything.
    """
    latest = drain_seconds(prefill, max(seconds, all_seconds))
    return min(_num_steps(prefill, seconds) * prefill.length, latest)


def _num_steps(prefill: PrefillShare, seconds: float) -> int:
    return ceil(seconds / (prefill.length * prefill.share))


def seconds_before(
    own: DueWork[StateT], left_behind: Sequence[DueWork[StateT]], *, by_deadline: float
) -> float | None:
    """Return the seconds of work that are done before an arrival's own; None where it is left behind.

    Parameters
    ----------
    own : the arrival.
    left_behind : of it and the prompts with deadlines.
    by_deadline : seconds of work of those that are due before it or with it, whether they can all be in time
        or not.
    """
    if any(job is own for job in left_behind):
        return None
    return max(0.0, by_deadline - sum(job.seconds for job in left_behind if job.deadline <= own.deadline))


@dataclass(slots=True)
class Ends:
    """The pace at which running requests end, exponentially weighted."""

    num: float = 0.0
    stream_seconds: float = 0.0
    """That all of them ran meanwhile."""

    def count(self, seconds: float, num_running: int, num_ended: int) -> None:
        """Count a time in which so many ran, and those that ended with it."""
        decay = exp(-max(0.0, seconds) / _MEMORY_SECONDS)
        self.num = self.num * decay + num_ended
        self.stream_seconds = self.stream_seconds * decay + (1 - decay) * _MEMORY_SECONDS * num_running

    def gap(self, num_running: int, usual: float = 0.0) -> float:
        """Return the seconds between two ends, with so many that run; while none ends, those since then.

        Parameters
        ----------
        usual : seconds that a request runs, which counts as one that was seen; 0 where nobody knows.
        """
        return (self.stream_seconds + usual) / max(self.num + (usual > 0), 1.0) / max(num_running, 1)


class FreeCapacity(NamedTuple):
    """What there is for those who wait, and how it comes free."""

    num_free_slots: int
    num_free_blocks: float
    given_back: float
    """Blocks of one that ends."""
    gap: float
    """Seconds between two ends."""


class Demand(NamedTuple):
    """Prompts that wait for a slot and blocks, as one."""

    deadline: float
    num: int
    num_blocks: float
    """Of each."""


def capacity_wait(ahead: Iterable[Demand], own: Demand, capacity: FreeCapacity, start: float) -> float:
    """Return the seconds from `start` until a prompt gets a slot and its blocks, by the pace of ends.

    One that ends gives back a slot, and as many blocks as streams and prompts have on average. Those that are
    due before it get theirs first, unless it comes too late for them: the replica gives them up, and serves
    them behind all others. Streams end independently of each other, so the time of the k-th end has a gamma
    distribution: its median is (k - 1/3) mean gaps, but for 4 % of it (Choi, Proc. AMS 121, 1994).

    Parameters
    ----------
    ahead : by deadline.
    """
    num_free_slots, num_free_blocks, given_back, gap = capacity
    num_ends, num_lacking = 1.0 - num_free_slots, -num_free_blocks
    for deadline, num, each in ahead:
        if deadline > own.deadline:
            break
        for _ in range(num):
            before = max(num_ends, (num_lacking + each) / given_back)
            is_late = before > 0 and start + (before - _MEDIAN_SOONER) * gap > deadline
            if not is_late or deadline <= start:  # what is late and still there is protected
                num_ends += 1
                num_lacking += each
    num_ends = max(num_ends, ceil((num_lacking + own.num_blocks) / given_back))
    return max(0.0, (num_ends - _MEDIAN_SOONER) * gap) if num_ends > 0 else 0.0
