"""Whether an arrival is taken: how long best effort waits, and when a prompt would have its first token.

Waiting does not help with objectives that even an idle replica cannot keep: clients hear what would.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from math import inf, nextafter
from operator import itemgetter
from typing import NoReturn

from onbeat.core.errors import Overloaded, SLOUnattainable, counted
from onbeat.core.slo import ShedMode
from onbeat.core.step_stats import SchedulerState
from onbeat.scheduler import triage
from onbeat.scheduler.replica.idle_check import explain, idle_misses, may_be_kept, will_stream
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.composer import OVERDUE, SLOComposer
from onbeat.scheduler.replica.slo.view import MOST_JOBS, Jobs, RunningView, decode_shape, prefill_jobs
from onbeat.scheduler.replica.step_plan import SPARE_SHARE, QueuedWork, StepPlan, WaitingQueue
from onbeat.scheduler.scheduler_config import SchedulerConfig

TRY_AGAIN_SECONDS = 30.0
"""How often an idle replica takes a request that it predicts to be late, where that may be wrong: otherwise a
model that is too pessimistic would reject what could correct it."""
REFUSED = "queue_too_long"
"""Reason of a rejection, in the counts."""
SHORTEST_RETRY = 0.05
"""Seconds; a client that comes back sooner finds the same step under way."""


class Admission:
    """Rejects arrivals that ask to be rejected rather than served late, and those who would wait too long.

    How long an arrival waits as best effort is the prompt work that waits, by predicted step times, over the
    pace at which such work was begun of late. The pace holds all that stands between them: streams and their
    slots, memory, prompts with deadlines that overtake. That costs O(1). Prompts that can be in time are
    never refused for it: the deadlines bound how many of them there are.

    A TTFT is predicted by fluid replay, only for who needs it: the prompts ahead, in the policy's own order,
    drain at the rate that the running streams leave to prefill. Slots and blocks come free at the pace at
    which requests ended of late.

    Parameters
    ----------
    config : limits.
    slo : plans the steps.

    Attributes
    ----------
    num_rejected : reason -> requests rejected on arrival or ended in the queue.
    """

    def __init__(self, config: SchedulerConfig, slo: SLOComposer) -> None:
        self._longest, self._num_slots = slo.rules.longest_wait, config.max_num_seqs
        """Wait for which another is taken, seconds; with fewer that wait, it is whatever is predicted."""
        self.num_rejected: Counter[str] = Counter()
        self._slo, self._tracker, self._rules, self._cost_model = slo, slo.tracker, slo.rules, slo.cost_model
        self._last_try = -inf

    def on_arrival(self, state: RequestState, plan: StepPlan, busy_until: float, num_steps: int) -> None:
        """Set the deadlines of an arrival, and take it or not.

        Parameters
        ----------
        plan : the queues as they are, at the time of the arrival.
        busy_until : when the step under way is expected to end, seconds.
        num_steps : that were planned so far.

        Raises
        ------
        SLOUnattainable : it asks to be rejected where its objective cannot be kept, and that is so.
        Overloaded : it would be served as best effort, and too many wait for that.
        """
        # Where none waits, none has since the last plan: those who did then have left (aborted, or ended
        # for being late), and the time since says nothing of how fast prompts are begun.
        waiting, begun = plan.waiting, (self._tracker.best_effort_begun, self._tracker.begun)
        for pace, num in zip(begun, (waiting.best_effort.num_requests, waiting.length), strict=True):
            if not num:
                pace.some_wait = False
                pace.count(plan.now, 0.0, some_wait=False)
        self._slo.on_arrival(state, plan)
        if state.num_tokens == state.num_prompt_tokens:  # a stream that is resumed has had its first token
            self._decide(state, plan, busy_until, num_steps)
        self._tracker.tenants.on_arrival(state.request.tenant)

    def report(self, plan: StepPlan, num_relegated: int) -> SchedulerState:
        """Return how queues and objectives stand.

        Parameters
        ----------
        plan : the queues as they are, at the time when the next step may start.
        """
        view = RunningView(plan.running, plan.now, self._cost_model.shortest_tbt)
        return SchedulerState(
            num_best_effort=plan.waiting.best_effort.num_requests
            + len(view.best_effort_decodes)
            + sum(state.slo.next_deadline == inf for state in view.prefills),
            num_relegated=num_relegated,
            num_missed=self._tracker.num_missed,
            num_rejected=dict(self.num_rejected),
            predicted_wait=self._slo.predicted_wait,
            queue_seconds=self.wait(plan.waiting),
            decode_slacks=[deadline - plan.now for deadline in view.deadlines],
        )

    def wait(self, waiting: WaitingQueue, *, is_protected: bool = False) -> float:
        """Return how long an arrival would wait until it is begun, seconds.

        Parameters
        ----------
        is_protected : whether it goes by its deadline even once that has passed; else as best effort.
        """
        best_effort, ranked = self._seconds(waiting.best_effort), self._seconds(waiting.ranked)
        if is_protected:
            return ranked / self._tracker.begun.rate
        pace = self._tracker.best_effort_begun.rate
        return max(best_effort / pace, (best_effort + ranked) / self._tracker.begun.rate)

    def refusal(self, waiting: WaitingQueue, *, is_protected: bool = False) -> Overloaded | None:
        """Return why another is not taken that would be late; None where it is."""
        if waiting.length < self._num_slots:
            return None
        wait = self.wait(waiting, is_protected=is_protected)
        if wait <= self._longest:
            return None
        return self._overloaded(
            f"the queue is full: it holds {counted(len(waiting), 'request')}, and one more of best effort "
            f"would begin in {wait:.0f} s, later than max_queue_seconds ({self._longest:g}); try again later",
            waiting,
            wait,
        )

    def overdue(self, waiting: WaitingQueue) -> Overloaded:
        """Return why one is ended that was taken."""
        return self._overloaded(
            f"the request has waited {OVERDUE:g} times max_queue_seconds ({self._longest:g}), because "
            "requests that can be in time took all the capacity; try again later",
            waiting,
            self.wait(waiting),
        )

    def _overloaded(self, message: str, waiting: WaitingQueue, wait: float) -> Overloaded:
        # How long it takes until another is taken, if no other arrives.
        until_short = wait * (len(waiting) - self._num_slots + 1) / max(len(waiting), 1)
        retry_after = max(min(wait - self._longest, until_short), SHORTEST_RETRY)
        return Overloaded(message, retry_after=retry_after, reason=REFUSED)

    def _seconds(self, queued: QueuedWork) -> float:
        """Return the work of some that wait."""
        return self._cost_model.of_sums(queued.num_tokens, queued.num_pairs)

    def _decide(self, state: RequestState, plan: StepPlan, busy_until: float, num_steps: int) -> None:
        """Raise where an arrival is not taken."""
        slo = state.slo
        objective = slo.ttft_deadline - state.request.arrival
        is_protected = state.request.shed is ShedMode.OFF and objective < inf
        refusal = self.refusal(plan.waiting, is_protected=is_protected)
        rejects = state.request.shed is ShedMode.REJECT
        if refusal is None and not (rejects and slo.has_objective):
            return
        plan.tell_apart()
        ttft, delays_others = self._predict(state, plan, max(plan.now, busy_until))
        slo.predicted_ttft = None if ttft == inf else ttft
        if refusal is not None and (ttft == inf or (is_protected and ttft > objective)):
            self.num_rejected[refusal.reason] += 1
            try:
                raise refusal
            finally:
                del refusal  # it refers to this frame: both would stay until somebody looks for garbage
        if not rejects:
            return
        if misses := idle_misses(state, self._cost_model):
            is_time = not (plan.num_running or plan.waiting) and plan.now - self._last_try > TRY_AGAIN_SECONDS
            if not (is_time and may_be_kept(misses, self._cost_model, num_steps)):
                self._refuse(explain(misses), ttft, retry_after=None)
            self._last_try = plan.now
            slo.relegate()
            return
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

    def _refuse(self, message: str, ttft: float, *, retry_after: float | None) -> NoReturn:
        self.num_rejected["slo_unattainable"] += 1
        soonest = None if retry_after is None else max(retry_after, SHORTEST_RETRY)
        raise SLOUnattainable(message, predicted_ttft=ttft, retry_after=soonest)

    def _predict(self, state: RequestState, plan: StepPlan, start: float) -> tuple[float, bool]:
        """Return the TTFT of an arrival, and whether prompts behind it that would be in time were late.

        Infinite where it would be served as best effort.
        """
        cost_model, rules, waiting = self._cost_model, self._rules, plan.waiting
        deadline = state.slo.ttft_deadline
        if deadline == inf:
            return inf, False
        view = RunningView(plan.running, start, cost_model.shortest_tbt)
        jobs, _ = prefill_jobs(plan, start, view.prefills, cost_model)
        seconds = cost_model.seconds(state.num_tokens - state.num_hit_tokens, state.num_hit_tokens)
        own = triage.DueWork(deadline, seconds, state)
        index = bisect_right(jobs, deadline, key=itemgetter(0))
        # By the time that it is served, those ahead of it decode, too.
        decodes = decode_shape([*view.decodes, *[job.state for job in jobs[:index]]])
        limit = rules.limit(view, cost_model.of(decodes), start) if view.streams else inf
        prefill = cost_model.prefill_share(decodes, limit, deadline - state.request.arrival)
        before = sum([job.seconds for job in jobs[:index]])
        is_cut = waiting.ranked.num_requests > MOST_JOBS  # more wait than a plan looks at
        if index == len(jobs) and is_cut:
            running = sum(job.seconds for job in jobs if job.state.block_ids)
            before = running + self._seconds(waiting.ranked.below(nextafter(state.slo.rank, inf)))

        late = rules.split([*jobs[:index], own, *jobs[index:]], prefill, start)[1]
        turn, delays_others = triage.seconds_before(own, late, by_deadline=before), False
        if state.request.shed is ShedMode.REJECT and late:
            # Accepted requests stay: the arrival must find its place among them.
            others = {id(job.state) for job in rules.split(jobs, prefill, start)[1]}
            delays_others = any(id(job.state) not in others for job in late)
            turn = before if turn is None else turn
        if turn is None:
            return inf, False
        until_done = turn + seconds
        wait = triage.finish_seconds(prefill, until_done, seconds + sum([job.seconds for job in jobs]))
        if plan.running or jobs:  # later arrivals fill the last step
            wait = max(wait, 0.5 * prefill.length + triage.drain_seconds(prefill, until_done))
        ahead = [job for job in jobs[:index] if not job.state.block_ids]
        wait = max(wait, self._until_capacity([*ahead, own], plan, prefill, cost_model.of(view.shape)))
        return start - state.request.arrival + wait, delays_others

    def _until_capacity(
        self, jobs: Jobs, plan: StepPlan, prefill: triage.PrefillShare, step_seconds: float
    ) -> float:
        """Return the seconds until an arrival that lacks a slot or blocks is done; 0 where these are there.

        Requests without objectives are preempted for it.

        Parameters
        ----------
        jobs : those that wait ahead of it, by deadline; it comes last.
        """
        *ahead, own = jobs
        num_running, num_held = len(plan.running), plan.kv.pool.num_blocks - plan.num_blocks_left
        staying = [state for state in plan.running if state.num_preemptions or state.slo.has_objective]
        given_back = max(num_held / max(num_running, 1), 1.0)
        usual = self._tracker.lengths.remaining(None, 0, q=0.5, limit=own.state.max_total_tokens)
        ends = self._tracker.ends_by(plan.now)
        capacity = triage.FreeCapacity(
            num_free_slots=plan.max_num_seqs - len(staying),
            num_free_blocks=plan.num_blocks_left
            - plan.kv.pool.num_blocks // SPARE_SHARE
            + given_back * (num_running - len(staying)),
            given_back=given_back,
            gap=ends.gap(len(staying), step_seconds * usual),
        )
        wanted = [
            triage.Demand(
                job.deadline, 1, -(-job.state.queued_work[0] // plan.kv.block_size) * plan.kv.num_tables
            )
            for job in ahead
        ]
        num_blocks = plan.num_blocks_wanted(own.state)
        wait = triage.capacity_wait(wanted, triage.Demand(own.deadline, 1, num_blocks), capacity, plan.now)
        # Capacity comes free at the end of a step.
        at_end = triage.finish_seconds(prefill, own.seconds, own.seconds) + 0.5 * prefill.length
        return wait + at_end if wait else 0.0

    def _slows_streams(self, state: RequestState, plan: StepPlan) -> bool:
        """Whether one more stream breaks the tightest TBT objective."""
        view = RunningView(plan.running, plan.now, self._cost_model.shortest_tbt)
        tightest = min(view.tightest, state.slo.tbt_objective)
        if tightest == inf or not (view.streams and will_stream(state)):
            return False
        shape = decode_shape(view.streams)
        shape.add(state.num_tokens, 1, samples=True)
        return self._cost_model.of(shape) > tightest
