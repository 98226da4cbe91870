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

    Going through the jobs by deadline, whenever one would be late those that take the most time for their
    worth are left behind, until it is not. With equal worths it is one, and no other choice has more jobs in
    time (Moore, "An n job, one machine sequencing algorithm for minimizing the number of late jobs",
    Management Science 15, 1968). Jobs that keep their turn whatever happens (`ShedMode.OFF`) are never left
    behind; where one of them would be late without any other, nobody is left behind for it.

    Parameters
    ----------
    jobs : by ascending deadline.
    start : when the first begins, seconds.
    share : of the machine's time that goes into this work, in (0, 1].
    """
    heap: list[tuple[float, int]] = []
    left_behind: set[int] = set()
    end, droppable = start, 0.0
    """When the jobs so far end, and the time in it of those that may be left behind."""
    keeps_turn, worth_of = ShedMode.OFF, worth.of
    for index, (deadline, seconds, state) in enumerate(jobs):
        taken = seconds / share
        is_droppable = state.request.shed is not keeps_turn
        if end - droppable + taken > deadline:  # whoever else goes
            if is_droppable:
                left_behind.add(index)
            else:
                end += taken
            continue
        end += taken
        if is_droppable:
            droppable += taken
            heappush(heap, (-seconds / worth_of(state), index))
        while end > deadline and heap:
            costliest = heappop(heap)[1]
            left_behind.add(costliest)
            end -= jobs[costliest].seconds / share
            droppable -= jobs[costliest].seconds / share
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


_MOST_COMPARED = 32
_PLACES_SETTLED = 4


def shortest_first(
    jobs: Sequence[Job], *, start: float, share: float, caution: float, places: int = _PLACES_SETTLED
) -> list[Job]:
    """Let short prompts go ahead of long ones as far as these can spare the time.

    A prompt may pass those with earlier deadlines if what they could wait, times `caution`, is more than its
    work. Under little load that is shortest-remaining-first, near the capacity nothing but the deadlines
    counts.

    Parameters
    ----------
    jobs : by ascending deadline, all of them in time in this order.
    start, share : as in `select_feasible`.
    caution : share of a prompt's slack that others may use up.
    places : how many to settle; the next step asks again.
    """
    queue, spare, end = list(jobs[:_MOST_COMPARED]), [], start
    for deadline, seconds, _ in queue:
        end += seconds / share
        spare.append((deadline - end) * caution)
    order: list[Job] = []
    while queue and len(order) < places:
        pick, least = 0, spare[0]
        for index in range(1, len(queue)):
            seconds = queue[index].seconds
            if seconds / share < least and seconds < queue[pick].seconds:
                pick = index
            least = min(least, spare[index])
        job = queue.pop(pick)
        spare.pop(pick)
        for index in range(pick):
            spare[index] -= job.seconds / share
        order.append(job)
    return [*order, *queue, *jobs[_MOST_COMPARED:]]
