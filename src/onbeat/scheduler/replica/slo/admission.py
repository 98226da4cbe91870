"""Whether an arrival is taken: how long best effort waits, and when a prompt would have its first token."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from math import exp, inf, nextafter
from typing import NoReturn

from onbeat.core.errors import Overloaded, SLOUnattainable
from onbeat.core.slo import DEFAULT_QUEUE_SECONDS, ShedMode
from onbeat.scheduler.replica.queues import QueuedWork, WaitingQueue
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.deadlines import BEST_EFFORT_RANK
from onbeat.scheduler.replica.slo.filler import RESERVATION
from onbeat.scheduler.replica.slo.history import SLOTracker
from onbeat.scheduler.replica.slo.rules import StepRules
from onbeat.scheduler.replica.slo.triage import (
    Ends,
    Held,
    Job,
    Wanted,
    room_wait,
    seconds_before,
)
from onbeat.scheduler.replica.slo.view import MOST_JOBS, PromptJob, RunningView, decode_shape, prefill_jobs
from onbeat.scheduler.replica.slo.work import Room
from onbeat.scheduler.replica.step_plan import StepPlan

REFUSED = "queue_too_long"
"""Reason of a rejection, in the counts."""
SHORTEST_RETRY = 0.05
"""Seconds; a client that comes back sooner finds the same step under way."""
_TRY_AGAIN_SECONDS = 30.0
"""How often an idle replica takes a request that it predicts to be infeasible: otherwise a model that is too
pessimistic would reject what could correct it."""
_MEMORY_SECONDS = 30.0
"""Time constant of the pace."""
_PRIOR_SECONDS = 0.1
"""What "prompts get all the time" weighs before anything was seen."""
_SLOWEST = 1 / 100
"""The pace that best effort is taken to have at least: else its wait would be infinite."""
OVERDUE = 1.5
"""Times the bound that a request waits before it is ended. Above the errors of predictions: only requests
that prompts with deadlines have overtaken wait so long."""


class _Pace:
    """Seconds of prefill work that are begun in a second in which some waits, exponentially weighted.

    While none waits it returns to "all the time": what held prompts up then is over, for all that is known.
    """

    __slots__ = ("_begun", "_last", "_watched", "some_wait")

    def __init__(self) -> None:
        self._begun = self._watched = _PRIOR_SECONDS
        self._last = 0.0
        """Until when it has counted, seconds."""
        self.some_wait = False
        """Whether prompts have waited since then."""

    def count(self, now: float, begun: float) -> None:
        """Count the time until now, and the work begun at its end, seconds."""
        seconds = max(0.0, now - self._last)
        self._last = max(now, self._last)
        decay = exp(-seconds / _MEMORY_SECONDS)
        forgotten = (1 - decay) * _PRIOR_SECONDS
        self._begun = self._begun * decay + (begun if self.some_wait else forgotten)
        self._watched = self._watched * decay + (seconds if self.some_wait else forgotten)

    @property
    def rate(self) -> float:
        return max(self._begun / self._watched, _SLOWEST)


class Backlog:
    """Predicts how long an arrival waits as best effort, and rejects it where that is too long.

    The prompt work that waits, by predicted step times, over the pace at which such work was begun of late.
    The pace holds all that stands between them: streams and their slots, memory, prompts with deadlines that
    overtake. Each call costs O(1). Prompts that can be in time are never refused here: the deadlines bound
    how many of them there are.

    Parameters
    ----------
    seconds : the longest wait for which another is taken; infinite takes all.
    num_slots : with fewer requests waiting, one is taken whatever is predicted.
    """

    def __init__(self, tracker: SLOTracker, rules: StepRules, seconds: float, num_slots: int) -> None:
        self._tracker = tracker
        self._work = rules.work
        self._longest, self._num_slots = seconds, num_slots
        self._all, self._best_effort = _Pace(), _Pace()

    def on_plan(self, plan: StepPlan) -> None:
        """Learn from a plan that is carried out; the queue still holds those that it admits."""
        begun = begun_best_effort = 0.0
        num_best_effort = plan.waiting.best_effort.num_requests
        for admission in plan.admissions:
            seconds = self._work.of_sums(*admission.state.queued_work)
            begun += seconds
            if admission.state.sort_key[0] >= BEST_EFFORT_RANK:
                begun_best_effort += seconds
                num_best_effort -= 1
        self._all.count(plan.now, begun)
        self._best_effort.count(plan.now, begun_best_effort)
        self._all.some_wait = len(plan.waiting) > len(plan.admissions)
        self._best_effort.some_wait = num_best_effort > 0

    def on_arrival(self, waiting: WaitingQueue, now: float) -> None:
        """Hear of an arrival that does not wait yet. Where nobody does, nobody has since the last plan.

        Those who waited then have left (aborted, or ended for being late), and the time since says nothing of
        how fast prompts are begun.
        """
        if not waiting.best_effort.num_requests:
            self._best_effort.some_wait = False
            self._best_effort.count(now, 0.0)
            if not waiting.ranked.num_requests:
                self._all.some_wait = False
                self._all.count(now, 0.0)

    def wait(self, waiting: WaitingQueue) -> float:
        """Return how long best effort that came now would wait until it is begun, seconds."""
        best_effort, ranked = self._seconds(waiting.best_effort), self._seconds(waiting.ranked)
        return max(best_effort / self._best_effort.rate, (best_effort + ranked) / self._all.rate)

    def overdue(self, states: Iterable[RequestState], now: float) -> list[RequestState]:
        """Return those of some waiting requests that have waited for too long.

        They were taken, but have had to let others go first ever since. None has begun.
        """
        latest = now - OVERDUE * self._longest
        return [
            state
            for state in states
            if _waits_since(state) < latest and not (state.has_run or state.output_token_ids)
        ]

    def is_starved(self, state: RequestState, now: float) -> bool:
        """Whether best effort that has begun gets no further, for lack of memory or time.

        Its last token is as long ago as a request may wait to be begun. Nobody ends it, as its client has
        read what there is.
        """
        slo = state.slo
        longest = self._longest if self._longest < inf else DEFAULT_QUEUE_SECONDS
        return (
            state.has_run
            and slo.runs_as_best_effort
            and now - max(slo.last_delivery, _waits_since(state)) > longest
        )

    def is_too_long(self, waiting: WaitingQueue, *, keeps_turn: bool = False) -> bool:
        """Whether another would wait for longer than one may; see `refusal`."""
        if self._longest == inf or len(waiting) < self._num_slots:
            return False
        return self._wait(waiting, keeps_turn=keeps_turn) > self._longest

    def refusal(
        self, waiting: WaitingQueue, *, keeps_turn: bool = False, is_overdue: bool = False
    ) -> Overloaded:
        """Return why another prompt is not taken; counts it.

        Parameters
        ----------
        keeps_turn : whether it goes by its deadline even once that has passed (`ShedMode.OFF`).
        is_overdue : whether it was taken, and has waited for too long.
        """
        wait = self._wait(waiting, keeps_turn=keeps_turn)
        # How long it takes until another is taken, if no other arrives.
        until_short = wait * (len(waiting) - self._num_slots + 1) / max(len(waiting), 1)
        retry_after = max(min(wait - self._longest, until_short), SHORTEST_RETRY)
        why = (
            f"the request has waited {OVERDUE:g} times as long as may be (max_queue_seconds "
            f"{self._longest:g}), as others that can be in time left nothing over; try again later"
            if is_overdue
            else f"{len(waiting)} requests wait; one more that cannot be in time would be begun in "
            f"{wait:.0f} s, later than may be (max_queue_seconds {self._longest:g}); try again later"
        )
        self._tracker.reject(REFUSED)
        return Overloaded(why, code="server_overloaded", retry_after=retry_after, reason=REFUSED)

    def _wait(self, waiting: WaitingQueue, *, keeps_turn: bool) -> float:
        return self._seconds(waiting.ranked) / self._all.rate if keeps_turn else self.wait(waiting)

    def _seconds(self, work: QueuedWork) -> float:
        return self._work.of_sums(work.num_tokens, work.num_pairs)


def _waits_since(state: RequestState) -> float:
    """Return when its wait as best effort has begun: at its arrival, or when its objective passed."""
    due = state.slo.ttft_deadline
    return state.request.arrival if due == inf else due


class Admission:
    """Rejects arrivals that ask to be rejected rather than served late, and those who would wait too long.

    A TTFT is predicted by fluid replay, only for who needs it: the prompts ahead, in the policy's own order,
    drain at the rate that the running streams leave to prefill, and room comes at the pace at which requests
    ended of late.

    Attributes
    ----------
    backlog : how long best effort waits.
    """

    def __init__(self, tracker: SLOTracker, rules: StepRules, backlog: Backlog) -> None:
        self.backlog = backlog
        self._tracker = tracker
        self._rules = rules
        self._work = rules.work
        self._last_try = -inf
        self._ends, self._num_ended, self._num_running = Ends(), 0, 0
        self._last_change = 0.0
        """When a plan last found another number of them, seconds."""

    def on_plan(self, plan: StepPlan) -> None:
        """Learn from a plan that is carried out."""
        self.backlog.on_plan(plan)
        num_ended, num_running = self._tracker.num_ended - self._num_ended, len(plan.running)
        if (
            num_ended or num_running != self._num_running
        ):  # the same whether each step between was planned or not
            self._ends.count(plan.now - self._last_change, self._num_running, num_ended)
            self._num_ended, self._num_running, self._last_change = (
                self._tracker.num_ended,
                num_running,
                plan.now,
            )

    def decide(self, state: RequestState, plan: StepPlan, busy_until: float) -> None:
        """Take an arrival, or not. A stream that is resumed has had its first token, and is always taken.

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
        slo, waiting, work = state.slo, plan.waiting, self._work
        objective = slo.ttft_deadline - state.request.arrival
        keeps_turn = state.request.shed is ShedMode.OFF and objective < inf
        is_too_long = self.backlog.is_too_long(waiting, keeps_turn=keeps_turn)
        rejects = state.request.shed is ShedMode.REJECT
        if not (is_too_long or (rejects and slo.has_objective)):
            return
        ttft, delays_others = self._predict(state, plan, max(plan.now, busy_until))
        slo.predicted_ttft = None if ttft == inf else ttft
        if is_too_long and (ttft == inf or (keeps_turn and ttft > objective)):
            raise self.backlog.refusal(waiting, keeps_turn=keeps_turn)
        if not rejects:
            return
        is_out_of_reach = _will_stream(state) and slo.tbt_objective < work.alone_seconds
        if not plan.running and not len(waiting) and plan.now - self._last_try > _TRY_AGAIN_SECONDS:
            if ttft > objective or is_out_of_reach:
                self._last_try = plan.now
                slo.relegate()
            return
        if is_out_of_reach:
            self._refuse(
                f"a step of one token takes {work.alone_seconds * 1e3:.3g} ms, longer than the TBT "
                f"objective of {slo.tbt_objective * 1e3:.3g} ms",
                ttft,
                retry_after=_TRY_AGAIN_SECONDS,
            )
        late = ttft - objective
        if late > 0 or delays_others:
            reason = (
                "it would come in time, but make requests late that have been accepted"
                if late <= 0
                else f"the objective is {objective * 1e3:.0f} ms"
            )
            first = f"the first token is predicted {ttft * 1e3:.0f} ms after arrival; {reason}"
            self._refuse(first, ttft, retry_after=late)
        if self._slows_streams(state, plan):
            self._refuse(
                "with this request the running streams would no longer keep their TBT objective; try again "
                "when some have ended",
                ttft,
                retry_after=ttft,
            )

    def _refuse(self, message: str, ttft: float, *, retry_after: float) -> NoReturn:
        self._tracker.reject("slo_unattainable")
        raise SLOUnattainable(message, predicted_ttft=ttft, retry_after=max(retry_after, SHORTEST_RETRY))

    def _predict(self, state: RequestState, plan: StepPlan, start: float) -> tuple[float, bool]:
        """Return the TTFT of an arrival, and whether prompts behind it that would be in time were late.

        Infinite where it would be served as best effort.
        """
        work, rules, waiting, deadline = self._work, self._rules, plan.waiting, state.slo.ttft_deadline
        if deadline == inf:
            return inf, False
        view = RunningView(plan.running, start, work.alone_seconds)
        jobs, _ = prefill_jobs(plan, start, view.prefills, work)
        seconds = work.seconds(state.num_tokens - state.num_hit_tokens, state.num_hit_tokens)
        own = Job(deadline, seconds, state)
        index = bisect_right(jobs, deadline, key=_deadline)
        # By the time that it is served, those ahead of it decode, too.
        decodes = view.decode_shape([job.state for job in jobs[:index]])
        limit = rules.limit(view, work.of(decodes), start) if view.streams else inf
        room = work.room_beside(decodes, limit, deadline - state.request.arrival)
        before = sum([job.seconds for job in jobs[:index]])
        is_cut = waiting.ranked.num_requests > MOST_JOBS  # more wait than a plan looks at
        if index == len(jobs) and is_cut:
            running = sum(job.seconds for job in jobs if job.state.block_ids)
            before = running + work.of_sums(*waiting.work_below(nextafter(state.slo.rank, inf)))

        late = rules.split([*jobs[:index], own, *jobs[index:]], room, start)[1]
        turn, delays_others = seconds_before(own, late, by_deadline=before), False
        if state.request.shed is ShedMode.REJECT and late:
            # Accepted requests stay: the arrival must find its place among them.
            others = {id(job.state) for job in rules.split(jobs, room, start)[1]}
            delays_others = any(id(job.state) not in others for job in late)
            turn = before if turn is None else turn
        if turn is None:
            return inf, False
        until_done = turn + seconds
        wait = room.finish_seconds(until_done, seconds + sum([job.seconds for job in jobs]))
        if plan.running or jobs:
            wait = max(wait, room.promised_seconds(until_done))
        ahead = [job for job in jobs[:index] if not job.state.block_ids]
        wait = max(wait, self._until_room(own, ahead, plan, room, work.of(view.decode_shape())))
        return start - state.request.arrival + wait, delays_others

    def _until_room(
        self, own: PromptJob, ahead: list[PromptJob], plan: StepPlan, room: Room, step_seconds: float
    ) -> float:
        """Return the seconds until an arrival that lacks a slot or blocks is done; 0 where these are there.

        Requests without objectives are preempted for it.
        """
        num_running, num_held = len(plan.running), plan.num_blocks - plan.num_blocks_left
        staying = [state for state in plan.running if state.num_preemptions or state.slo.has_objective]
        given_back = max(num_held / max(num_running, 1), 1.0)
        usual = self._tracker.lengths.remaining(None, 0, q=0.5, limit=own.state.max_total_tokens)
        held = Held(
            num_free_slots=plan.max_num_seqs - len(staying),
            num_free_blocks=plan.num_blocks_left
            - RESERVATION.num_spare_blocks(plan.num_blocks)
            + given_back * (num_running - len(staying)),
            given_back=given_back,
            gap=self._ends_until(plan.now).gap(len(staying), step_seconds * usual),
        )
        wanted = [Wanted(job.deadline, 1, -(-job.state.queued_work[0] // plan.block_size)) for job in ahead]
        num_blocks = plan.num_blocks_wanted(own.state, RESERVATION)
        wait = room_wait(wanted, Wanted(own.deadline, 1, num_blocks), held, plan.now)
        # Room comes free at the end of a step.
        return wait + room.finish_seconds(own.seconds, own.seconds) + 0.5 * room.length if wait else 0.0

    def _ends_until(self, now: float) -> Ends:
        """Return the ends with the time counted in which none came since the last."""
        ends = replace(self._ends)
        ends.count(now - self._last_change, self._num_running, 0)
        return ends

    def _slows_streams(self, state: RequestState, plan: StepPlan) -> bool:
        """Whether one more stream breaks the tightest TBT objective."""
        view = RunningView(plan.running, plan.now, self._work.alone_seconds)
        tightest = min(view.tightest, state.slo.tbt_objective)
        if tightest == inf or not (view.streams and _will_stream(state)):
            return False
        shape = decode_shape(view.streams)
        shape.add(state.num_tokens, 1, samples=True)
        return self._work.of(shape) > tightest


def _deadline(job: PromptJob) -> float:
    return job.deadline


def _will_stream(state: RequestState) -> bool:
    """Whether it may have a token behind the first."""
    return state.max_total_tokens - state.num_tokens > 1
