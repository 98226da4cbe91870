"""Which prompts can all be in time: the same for a replica and for a router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

StateT = TypeVar("StateT")


class Job(NamedTuple, Generic[StateT]):
    """A prompt, or what is left of it."""

    deadline: float
    """Of its first token, seconds; of its next one where a preempted request computes its tokens again."""
    seconds: float
    """Of prefill work that is left."""
    state: StateT


def select_feasible(
    jobs: Sequence[Job[StateT]],
    *,
    start: float,
    share: float,
    cost: Callable[[Job[StateT]], float | None],
    leaves_last: bool = False,
) -> tuple[list[Job[StateT]], list[Job[StateT]]]:
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
