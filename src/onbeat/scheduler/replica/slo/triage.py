"""Which of the waiting prompts can all be in time: the largest set, by Moore and Hodgson's rule."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from onbeat.scheduler.replica.request_state import RequestState


class Job(NamedTuple):
    """A prompt, or what is left of it."""

    deadline: float
    """Of its first token, seconds."""
    seconds: float
    """Of prefill work that is left."""
    state: RequestState


def select_feasible(jobs: Sequence[Job], *, start: float, share: float) -> tuple[list[Job], list[Job]]:
    """Split jobs into those to serve, in order of their deadlines, and those to leave behind.

    Going through the jobs by deadline, whenever one would be late the one that takes the most time for its
    weight is left behind. With equal weights no other choice has more jobs in time (Moore, "An n job, one
    machine sequencing algorithm for minimizing the number of late jobs", Management Science 15, 1968).

    Parameters
    ----------
    jobs : by ascending deadline.
    start : when the first begins, seconds.
    share : of the machine's time that goes into this work, in (0, 1].
    """
    heap: list[tuple[float, int]] = []
    left_behind: set[int] = set()
    end = start
    for index, (deadline, seconds, state) in enumerate(jobs):
        end += seconds / share
        heappush(heap, (-seconds / state.request.weight, index))
        if end > deadline:
            costliest = heappop(heap)[1]
            left_behind.add(costliest)
            end -= jobs[costliest].seconds / share
    if not left_behind:
        return list(jobs), []
    kept = [job for index, job in enumerate(jobs) if index not in left_behind]
    return kept, [jobs[index] for index in sorted(left_behind)]


def needed_share(jobs: Sequence[Job], start: float) -> float:
    """Return the share of the machine's time that the jobs need to be in time; infinite where one is late.

    Parameters
    ----------
    jobs : by ascending deadline.
    start : when the first may begin, seconds.
    """
    work = most = 0.0
    for deadline, seconds, _ in jobs:
        work += seconds
        left = deadline - start
        if left <= 0:
            return float("inf")
        if work > most * left:
            most = work / left
    return most
