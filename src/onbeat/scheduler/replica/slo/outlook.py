"""How long an arrival waits: one prediction for a replica's own queue and for what a router knows of it.

The prompts ahead of it, in the policy's own order, drain at the rate that the running streams leave to
prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple

from onbeat.core.slo import ShedOrder
from onbeat.scheduler.replica.slo.triage import Job, PromptT, Worth, select_feasible
from onbeat.scheduler.replica.slo.work import Room


class Triage(NamedTuple, Generic[PromptT]):
    """How prompts are sorted out, as in `select_feasible`."""

    start: float
    share: float
    worth: Worth[PromptT]
    order: ShedOrder = "most"

    def left_behind(self, jobs: Sequence[Job[PromptT]]) -> list[Job[PromptT]]:
        """Return those of some prompts, by deadline, that are left behind."""
        start, share, worth, order = self
        return select_feasible(jobs, start=start, share=share, worth=worth, order=order)[1]


def seconds_before(
    own: Job[PromptT], left_behind: Sequence[Job[PromptT]], *, by_deadline: float
) -> float | None:
    """Return the seconds of work that are done before an arrival's own; None where it is left behind.

    Parameters
    ----------
    own : the arrival.
    left_behind : of it and the prompts with deadlines.
    by_deadline : seconds of work of those that are due before it or with it, whether they can all be in time
        or not.
    """
    if own in left_behind:
        return None
    return max(0.0, by_deadline - sum(job.seconds for job in left_behind if job.deadline <= own.deadline))


def longest_wait_seconds(seconds: float, room: Room) -> float:
    """Return when so much work is done where later arrivals fill its last step: what a replica can promise.

    `Room.finish_seconds` counts on nobody to come. Both are from the start of the next step.
    """
    return 0.5 * room.length + room.drain_seconds(seconds)
