"""What an arriving request may expect, and whether it is taken.

The wait of an arrival is predicted by fluid replay: the prompts ahead of it, in the policy's own order, drain
at the rate that the running streams leave to prefill.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from math import inf, nextafter
from typing import NamedTuple, NoReturn

from onbeat.core.errors import SLOUnattainable
from onbeat.core.slo import ShedMode, ShedOrder
from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.backlog import SHORTEST_RETRY, Backlog
from onbeat.scheduler.replica.slo.outlook import Triage, longest_wait_seconds, seconds_before
from onbeat.scheduler.replica.slo.triage import Job
from onbeat.scheduler.replica.slo.turnover import Turnover
from onbeat.scheduler.replica.slo.view import MOST_JOBS, PromptJob, RunningView, decode_shape, prefill_jobs
from onbeat.scheduler.replica.slo.work import PrefillWork, Room
from onbeat.scheduler.replica.step_plan import StepPlan

_TRY_AGAIN_SECONDS = 30.0
"""How often an idle replica takes a request that it predicts to be infeasible: otherwise a model that is too
pessimistic would reject what could correct it."""

FindRoom = Callable[[RunningView, BatchShape, float, float, float], Room]
"""(running requests, decodes, seconds of work, shortest TTFT objective, start) -> what prompts get."""


class Outlook(NamedTuple):
    """What an arrival may expect.

    Attributes
    ----------
    ttft : seconds from its arrival, were it taken in its turn.
    delays_others : whether prompts behind it that would be in time no longer were.
    slows_streams : whether the running streams with it no longer fit the tightest TBT objective.
    runs_as_best_effort : whether it would be served as best effort.
    """

    ttft: float
    delays_others: bool
    slows_streams: bool
    runs_as_best_effort: bool


class _Queue(NamedTuple):
    """What an arrival finds."""

    plan: StepPlan
    view: RunningView
    jobs: list[PromptJob]
    """Prompts with deadlines that a plan looks at, without those that cannot be in time any more."""
    start: float
    """When their work begins, seconds."""
    room: Room

    @property
    def is_cut(self) -> bool:
        """Whether more prompts with deadlines wait than a plan looks at."""
        return self.plan.waiting.ranked.num_requests > MOST_JOBS


class _Place(NamedTuple):
    """Where an arrival stands among the prompts."""

    seconds_before: float
    """Of work that is done before its own."""
    delays_others: bool = False
    runs_as_best_effort: bool = False


class Admission:
    """Predicts the TTFT of every arrival, and rejects those that ask to be rejected rather than served late.

    Those that would be served as best effort are rejected where too many wait for that already.

    Parameters
    ----------
    backlog : how long these wait.
    find_room : what prompts get of steps, as the policy plans them.
    """

    def __init__(
        self, backlog: Backlog, work: PrefillWork, shed_order: ShedOrder, find_room: FindRoom
    ) -> None:
        self._tracker = backlog.tracker
        self._backlog = backlog
        self._work = work
        self._shed_order = shed_order
        self._find_room = find_room
        self._last_try = -inf

    def decide(self, state: RequestState, plan: StepPlan, busy_until: float) -> None:
        """Predict an arrival's TTFT and set `predicted_ttft`.

        A stream that is resumed has had its first token, and is taken whatever is predicted.

        Parameters
        ----------
        plan : the queues as they are, at the time of the arrival.
        busy_until : when the step under way is expected to end, seconds.

        Raises
        ------
        SLOUnattainable : it asks to be rejected where its objective cannot be kept, and that is so.
        Overloaded : it would be served as best effort, and too many wait for that.
        """
        if state.output_token_ids:
            return
        outlook = self._look(state, plan, max(plan.now, busy_until))
        slo = state.slo
        slo.note_prediction(outlook.ttft)
        objective = slo.ttft_deadline - state.request.arrival
        keeps_turn = state.request.shed is ShedMode.OFF and objective < inf
        if outlook.runs_as_best_effort or (keeps_turn and outlook.ttft > objective):
            refusal = self._backlog.refusal(plan.waiting, keeps_turn=keeps_turn)
            if refusal is not None:
                raise refusal
        if state.request.shed is not ShedMode.REJECT:
            return
        is_out_of_reach = _will_stream(state) and slo.tbt_objective < self._work.alone_seconds
        if not plan.running and not len(plan.waiting) and plan.now - self._last_try > _TRY_AGAIN_SECONDS:
            if outlook.ttft > objective or is_out_of_reach:
                self._last_try = plan.now
                slo.relegate()
            return
        if is_out_of_reach:
            self._refuse(
                f"a step of one token takes {self._work.alone_seconds * 1e3:.3g} ms, longer than the TBT "
                f"objective of {slo.tbt_objective * 1e3:.3g} ms",
                outlook,
                retry_after=_TRY_AGAIN_SECONDS,
            )
        late = outlook.ttft - objective
        if late > 0 or outlook.delays_others:
            reason = (
                "it would come in time, but make requests late that have been accepted"
                if late <= 0
                else f"the objective is {objective * 1e3:.0f} ms"
            )
            self._refuse(
                f"the first token is predicted {outlook.ttft * 1e3:.0f} ms after arrival; {reason}",
                outlook,
                retry_after=late,
            )
        if outlook.slows_streams:
            self._refuse(
                "with this request the running streams would no longer keep their TBT objective; try again "
                "when some have ended",
                outlook,
                retry_after=outlook.ttft,
            )

    def _refuse(self, message: str, outlook: Outlook, *, retry_after: float) -> NoReturn:
        self._tracker.reject("slo_unattainable")
        raise SLOUnattainable(
            message, predicted_ttft=outlook.ttft, retry_after=max(retry_after, SHORTEST_RETRY)
        )

    def _look(self, state: RequestState, plan: StepPlan, start: float) -> Outlook:
        work = self._work
        view = RunningView(plan.running, start, work.alone_seconds)
        jobs, _ = prefill_jobs(plan, start, view.prefills, work)
        # By the time that it is served, those ahead of it decode, too.
        ahead = [job.state for job in jobs if job.deadline <= state.slo.ttft_deadline]
        decodes = view.decode_shape(ahead)
        num_cached = state.num_hit_tokens
        seconds = work.seconds(state.num_tokens - num_cached, num_cached)
        all_seconds = seconds + sum([job.seconds for job in jobs])
        ttft = state.slo.ttft_deadline - state.request.arrival
        room = self._find_room(view, decodes, all_seconds, ttft, start)
        queue = _Queue(plan, view, jobs, start, room)
        own = Job(state.slo.ttft_deadline, seconds, state)
        place = self._place(own, queue)
        until_done = place.seconds_before + seconds
        wait = room.finish_seconds(until_done, all_seconds)
        if plan.running or jobs:
            wait = max(wait, longest_wait_seconds(until_done, room))
        if not place.runs_as_best_effort and start + wait <= own.deadline:  # else it is late by work alone
            wait = max(wait, self._until_room(own, queue, until_done))
        ttft = start - state.request.arrival + wait
        return Outlook(ttft, place.delays_others, self._slows_streams(state, view), place.runs_as_best_effort)

    def _until_room(self, own: PromptJob, queue: _Queue, until_done: float) -> float:
        """Return the seconds until an arrival that waits for slot or memory is done; 0 where they are there.

        Streams go on while the prompts before it are worked on, so their steps come on top of all work.

        Parameters
        ----------
        until_done : seconds of work with its own.
        """
        plan = queue.plan
        ahead = [job for job in queue.jobs if job.deadline <= own.deadline and not job.state.block_ids]
        turnover = Turnover(plan, self._work, self._tracker.lengths)
        room_wait = turnover.wait(own.state, ahead, queue.start)
        if not room_wait:
            return 0.0
        if queue.is_cut:  # those at which no plan looks yet get theirs first, too
            num_before = plan.waiting.num_below(nextafter(own.state.slo.rank, inf))
            room_wait *= max(1.0, (num_before + 1) / (len(ahead) + 1))
        # Room comes free at the end of a step.
        return room_wait + until_done + 0.5 * queue.room.length

    def _place(self, own: PromptJob, queue: _Queue) -> _Place:
        """Return where an arrival stands among the prompts."""
        jobs, room = queue.jobs, queue.room
        if own.deadline == inf:
            return _Place(self._all_work(queue), runs_as_best_effort=True)
        index = bisect_right(jobs, own.deadline, key=lambda job: job.deadline)
        everyone = [*jobs[:index], own, *jobs[index:]]
        before = sum([job.seconds for job in everyone[:index]])
        if index == len(jobs) and queue.is_cut:  # those in the queue at which no plan looks yet count, too
            running = sum(job.seconds for job in jobs if job.state.block_ids)
            before = running + self._queued_work(queue, nextafter(own.state.slo.rank, inf))
        start = queue.start + room.fixed_seconds  # as the policy plans
        triage = Triage(start, room.share, self._tracker.worth, self._shed_order)
        left_behind = triage.left_behind(everyone)
        turn = seconds_before(own, left_behind, by_deadline=before)
        if own.state.request.shed is ShedMode.REJECT:
            # Accepted requests stay: the arrival must find its place among them.
            others = {id(job.state) for job in triage.left_behind(jobs)} if left_behind else set()
            delays_others = any(id(job.state) not in others for job in left_behind)
            return _Place(before if turn is None else turn, delays_others=delays_others)
        if turn is None:
            return _Place(self._all_work(queue), runs_as_best_effort=True)
        return _Place(turn)

    def _all_work(self, queue: _Queue) -> float:
        """Return the seconds of work of all prompts that run or wait."""
        work = self._work
        running = sum(
            work.seconds(state.num_wanted_tokens, state.num_computed_tokens) for state in queue.view.prefills
        )
        return running + self._queued_work(queue, inf)

    def _queued_work(self, queue: _Queue, rank: float) -> float:
        """Return the seconds of work of the prompts of a lower rank that wait."""
        return self._work.of_sums(*queue.plan.waiting.work_below(rank))

    def _slows_streams(self, state: RequestState, view: RunningView) -> bool:
        """Whether one more stream breaks the tightest TBT objective."""
        tightest = min(view.tightest, state.slo.tbt_objective)
        if tightest == inf or not (view.streams and _will_stream(state)):
            return False
        shape = decode_shape(view.streams)
        shape.add(state.num_tokens, 1, samples=True)
        return self._work.of(shape) > tightest


def _will_stream(state: RequestState) -> bool:
    """Whether it may have a token behind the first."""
    return state.max_total_tokens - state.num_tokens > 1
