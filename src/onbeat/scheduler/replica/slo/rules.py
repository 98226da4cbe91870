"""What a step of the SLO policy may take, and what prompts get of it: the rule, without the queues."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf
from typing import NamedTuple

from onbeat.core.slo import ShedOrder, SLOMode
from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.backlog import BEST_EFFORT_STEPS
from onbeat.scheduler.replica.slo.stalls import Stalls
from onbeat.scheduler.replica.slo.triage import Worth, select_feasible
from onbeat.scheduler.replica.slo.view import PromptJob, RunningView
from onbeat.scheduler.replica.slo.work import CERTAIN, PrefillWork, Room

GAP_QUANTILE = CERTAIN
"""Of the step time, to plan with in `gap` mode: nothing earned makes up for a longer step there, and one in a
hundred is what a request's P99 gap allows. In `stream` mode longer and shorter steps even out: the mean."""
EARNED_SHARE = 1 / 32
"""Of a TBT objective that a step leaves to its streams: they earn the time to outlast a stall."""
SPENT_SHARE = 1 / 4
"""Of the time that the most urgent stream has in hand, what one step may take."""
LONGEST_GAP = 2.0
"""The longest step that time in hand may be spent on, TBT objectives."""
PACED_SHARE = 2 / 3
"""Of a step, what is left to prompts whatever e2e objectives ask for: a prompt that waits has one too."""
SPARE_TOKENS = 20
"""A stream that has the time of so many tokens in hand may sit out a step for prompts that would be late."""


class LongSteps(NamedTuple):
    """Steps of decodes alone, and a long one with prompts behind them."""

    room: Room
    """What prompts get of all of them together."""
    limit: float
    """What the next one may take, seconds: no more than its decodes, if it is one of decodes alone."""


class StepRules:
    """The decisions of a step, each of which a study can replace.

    Parameters
    ----------
    work : what prompts cost.
    stalls : what streams should have in hand for the next step that takes far longer than predicted.
    mode : what keeping a TBT objective means.
    shed_order : whom to leave behind where not all can be in time.
    worth : of keeping a request's objective.
    """

    def __init__(
        self,
        work: PrefillWork,
        stalls: Stalls,
        mode: SLOMode,
        shed_order: ShedOrder,
        worth: Worth[RequestState],
    ) -> None:
        self.work, self.stalls, self.worth = work, stalls, worth
        self.mode, self.shed_order = mode, shed_order

    def limit(self, view: RunningView, decode_seconds: float, start: float) -> float:
        """Return the time that a step may take, seconds; infinite where no stream has an objective."""
        ahead = view.due - start
        pace = max(view.pace, decode_seconds / (1 - PACED_SHARE))
        objective = self.objective_limit(view, decode_seconds, start)
        return min(objective, max(ahead, decode_seconds), pace)

    def objective_limit(self, view: RunningView, decode_seconds: float, start: float) -> float:
        """Return what TBT objectives allow a step, seconds; infinite without any."""
        limit = self.tightest_limit(view.tightest)
        if self.mode == "gap" or limit == inf:
            return limit
        ahead = view.due - start
        stalls = self.stalls
        if stalls.share:
            # Not at once: many streams that were begun with longer steps would leave prompts nothing.
            limit = min(limit, max(limit * (1 - stalls.share), (limit + decode_seconds) / 2))
            ahead -= stalls.reserve(start)
        return max(limit, min(SPENT_SHARE * ahead, LONGEST_GAP * view.tightest))

    def tightest_limit(self, tightest: float) -> float:
        """Return what TBT objectives allow without time in hand, seconds; infinite without any.

        Parameters
        ----------
        tightest : the shortest of them, seconds; infinite without any.
        """
        return tightest if self.mode == "gap" else tightest * (1 - EARNED_SHARE)

    def room(self, decodes: BatchShape, limit: float, jobs: Sequence[PromptJob]) -> Room:
        """Return what prompts get of a step beside some decodes, within a limit."""
        ttfts = [job.state.slo.ttft_deadline - job.state.request.arrival for job in jobs]
        return self.work.room_beside(decodes, limit, min(ttfts, default=inf))

    def find_room(
        self, view: RunningView, decodes: BatchShape, seconds: float, ttft: float, start: float
    ) -> Room:
        """Return what prompts get of steps from some time on.

        Parameters
        ----------
        seconds : of prefill work.
        ttft : the shortest objective of the prompts, seconds; infinite without any.
        """
        limit = self.limit(view, self.work.of(decodes), start) if view.streams else inf
        room = self.work.room_beside(decodes, limit, ttft)
        if seconds <= room.share * room.length:
            return room
        long = self.long_steps(view, decodes, room, limit, start)
        return room if long is None else long.room

    def long_steps(
        self, view: RunningView, decodes: BatchShape, room: Room, limit: float, start: float
    ) -> LongSteps | None:
        """Return how prompts get more if they are in long steps, and decodes run alone before each.

        A step with prompts costs something beside them, and where decodes take less time alone than beside
        prompts more still. Steps of decodes alone, each shorter than the objective, earn the time for one
        that takes about two objectives. At least one has to, and as many as make the long step certain to
        end in time.

        Parameters
        ----------
        room : what prompts get if all steps are alike.
        limit : of such a step, seconds.
        start : when the next step may start, seconds.

        Returns
        -------
        None where they get no more, or where no stream can earn.
        """
        work = self.work
        if self.mode == "gap" or view.tightest == inf or view.pace < inf:
            return None
        decode_seconds = work.of(decodes)
        longest = LONGEST_GAP * self.tightest_limit(view.tightest)
        length = longest - decode_seconds
        if length <= limit or limit < self.objective_limit(view, decode_seconds, start):
            return None  # steps are as long, or somebody is behind
        long = work.room_beside(decodes, length, inf)
        seconds, prompt_seconds = decode_seconds + long.length, long.share * long.length
        if prompt_seconds <= room.share * seconds:
            return None
        spread, ahead = work.spread(), view.due - start - self.stalls.reserve(start)
        missing = spread * long.length - ahead
        if missing > 0:
            if missing == inf:
                return None
            num_more = ceil(missing / (view.tightest - decode_seconds)) - 1
            seconds += num_more * decode_seconds
            if prompt_seconds <= room.share * seconds:
                return None
        room = Room(long.chunk, seconds, prompt_seconds / seconds)
        return LongSteps(room, decode_seconds if missing > 0 else min(longest, ahead / spread))

    def in_turn(self, jobs: list[PromptJob], room: Room, now: float) -> tuple[list[PromptJob], int]:
        """Return prompts in the order in which they are served, and how many are left behind at its end."""
        kept, left_behind = select_feasible(
            jobs,
            start=now + room.fixed_seconds,  # whatever part of its last step a prompt needs
            share=room.share,
            worth=self.worth,
            order=self.shed_order,
        )
        # Time that the others leave is theirs before it is best effort's.
        return kept + left_behind, len(left_behind)

    def due(self, kept: Sequence[PromptJob], now: float) -> dict[str, float]:
        """Return by when a step has to end that ends one of these prompts: request id -> seconds from now."""
        return {job.state.request_id: job.deadline - now for job in kept}

    def may_sit_out(self, state: RequestState, due: float, start: float) -> bool:
        """Whether a stream has the time to let prompts go first.

        Parameters
        ----------
        due : the deadline of its next token, seconds. An e2e objective makes it for an answer of usual
            length, and what a stream is ahead of it a longer answer needs: then it never sits out.
        start : when the next step may start, seconds.
        """
        slo = state.request.slo
        spare = SPARE_TOKENS * state.slo.tbt
        if self.stalls.share:
            spare += self.stalls.reserve(start)
        return due - start > spare and slo is not None and slo.e2e is None

    def is_late_if_it_waits(self, kept: Sequence[PromptJob], room: Room, now: float) -> bool:
        """Whether one of the prompts that wait is late if they do for another step.

        Parameters
        ----------
        kept : prompts that can all be in time, in the order of their deadlines.
        """
        end = now + room.length
        for deadline, seconds, state in kept:
            end += seconds / room.share
            if end >= deadline and not state.block_ids:
                return True
        return False

    def is_for_best_effort(self, step_id: int) -> bool:
        """Whether best effort goes first in a step."""
        return step_id % BEST_EFFORT_STEPS == 0
