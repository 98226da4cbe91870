"""Which of the waiting prompts can all be in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Generic, NamedTuple, Protocol, TypeVar

from onbeat.core.slo import ShedOrder


class Arrived(Protocol):
    """What triage looks at of a request."""

    @property
    def arrival(self) -> float:
        """When it came, seconds."""
        ...


class Prompt(Protocol):
    """A prompt on a replica, or as much as a router knows of one."""

    @property
    def request(self) -> Arrived:
        """Whose it is."""
        ...

    @property
    def keeps_turn(self) -> bool:
        """Whether it may not be left behind."""
        ...


PromptT = TypeVar("PromptT", bound=Prompt)


class Job(NamedTuple, Generic[PromptT]):
    """A prompt, or what is left of it."""

    deadline: float
    """Of its first token, seconds; of its next one where a preempted request computes its tokens again."""
    seconds: float
    """Of prefill work that is left."""
    state: PromptT


Worth = Callable[[PromptT], float]
"""What keeping a request's objective is worth beside others, above 0."""


def select_feasible(
    jobs: Sequence[Job[PromptT]],
    *,
    start: float,
    share: float,
    worth: Worth[PromptT],
    order: ShedOrder = "most",
) -> tuple[list[Job[PromptT]], list[Job[PromptT]]]:
    """Split jobs into those to serve, in order of their deadlines, and those to leave behind.

    Going through the jobs by deadline, whenever one would be late the one of those so far that costs most for
    its worth is left behind, until it is not. With `most` and equal worths no other choice has more jobs in
    time (Moore, "An n job, one machine sequencing algorithm for minimizing the number of late jobs",
    Management Science 15, 1968; Hodgson's form). Jobs that keep their turn whatever happens are never left
    behind; where one of them would be late without any other, no job is left behind for it.

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
    by_work = order == "most"
    for index, (deadline, seconds, state) in enumerate(jobs):
        taken = seconds / share
        is_droppable = not state.keeps_turn
        if end - droppable + taken > deadline:  # whichever others go
            if is_droppable:
                left_behind.add(index)
            else:
                end += taken
            continue
        end += taken
        if is_droppable:
            droppable += taken
            value = worth(state)
            key = -seconds / value if by_work else (start - state.request.arrival) * value
            # Of those that came at once the last goes, so that it is the same one at the next step.
            heappush(heap, (key, index if by_work else -index))
        while end > deadline and heap:
            costliest = abs(heappop(heap)[1])
            left_behind.add(costliest)
            end -= jobs[costliest].seconds / share
            droppable -= jobs[costliest].seconds / share
    if not left_behind:
        return list(jobs), []
    kept = [job for index, job in enumerate(jobs) if index not in left_behind]
    return kept, [jobs[index] for index in sorted(left_behind)]
