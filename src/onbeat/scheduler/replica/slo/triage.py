"""Which of the waiting prompts can all be in time: the largest set, by Moore and Hodgson's rule."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from onbeat.core.slo import ShedMode
from onbeat.scheduler.replica.request_state import RequestState


class Job(NamedTuple):
    """A prompt, or what is left of it."""

    deadline: float
    """Of its first token, seconds."""
    seconds: float
    """Of prefill work that is left."""
    state: RequestState


class Worth:
    """What keeping a promise is worth: its weight, less for tenants that have had more than others."""

    def of(self, state: RequestState) -> float:
        return state.request.weight


def select_feasible(
    jobs: Sequence[Job], *, start: float, share: float, worth: Worth
) -> tuple[list[Job], list[Job]]:
    """Split jobs into those to serve, in order of their deadlines, and those to leave behind.

    Going through the jobs by deadline, whenever one would be late the one that takes the most time for its
    worth is left behind. With equal worths no other choice has more jobs in time (Moore, "An n job, one
    machine sequencing algorithm for minimizing the number of late jobs", Management Science 15, 1968).
    Jobs that keep their turn whatever happens (`ShedMode.OFF`) are never left behind.

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
        if state.request.shed is not ShedMode.OFF:
            heappush(heap, (-seconds / worth.of(state), index))
        if end > deadline and heap:
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
