"""The SLO policy: as much prefill as the deadlines of running streams allow, in the order of need."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from onbeat.core.slo import SLOMode
from onbeat.core.step import BatchShape, SchedulerState
from onbeat.scheduler.replica.parts import QueueOrder, Reservation, ReservePrompt
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.admission import Admission, pace
from onbeat.scheduler.replica.slo.book import PromiseBook
from onbeat.scheduler.replica.slo.deadlines import BEST_EFFORT_RANK, is_left_over, set_deadlines
from onbeat.scheduler.replica.slo.filler import StepFiller
from onbeat.scheduler.replica.slo.prefill_queue import prefill_jobs
from onbeat.scheduler.replica.slo.prefill_work import PrefillWork
from onbeat.scheduler.replica.slo.step_times import LEAST_SHARE, StepTimes
from onbeat.scheduler.replica.slo.triage import Job, needed_share, select_feasible, shortest_first
from onbeat.scheduler.replica.slo.tuning import SLOTuning
from onbeat.scheduler.replica.slo.victims import make_room
from onbeat.scheduler.replica.slo.view import RunningView, decode_shape, next_due
from onbeat.scheduler.replica.step_plan import StepPlan

_MOST_CREDIT = 1.0
"""Seconds that best effort may be owed."""
_CROWDED = 8
"""One in so many slots free, or fewer, are too few for streams to sit out."""
_LAST_CALL = 2.0
"""A prompt has to begin where less than so many times its work is left before its deadline."""


class SLOComposer:
    """Plans each step against the clock, and knows what newcomers may expect.

    The time of a step is bounded by the earliest deadline of the running streams. Into it go their tokens and
    the prompts, earliest deadline first; prompts that cannot all be in time are sorted out beforehand.

    Attributes
    ----------
    book : what was promised.
    credit : seconds that best effort is owed.
    quantile : of the step time, to plan with; None is the mean.
    """

    def __init__(self, tuning: SLOTuning | None = None) -> None:
        self.tuning = tuning or SLOTuning()
        self.quantile = self.tuning.quantile
        self.book = PromiseBook()
        self.work = PrefillWork()
        self.reservation: Reservation = ReservePrompt()
        self.credit = 0.0
        self._admission = Admission(self.book, self.tuning)
        self._dues: list[float] = []
        self._num_best_effort = 0
        self._last_plan = 0.0

    def set_mode(self, mode: SLOMode) -> None:
        """Say what keeping a TBT objective means; until then it is `stream`."""
        self.quantile = self.tuning.quantile_in(mode)

    def compose(self, plan: StepPlan, order: QueueOrder) -> None:  # noqa: ARG002 (deadlines are the order)
        plan.is_repeatable = False
        step = _Step(self, plan, self._times(plan))
        step.compose()
        self._dues = step.view.dues
        self._num_best_effort = step.num_best_effort
        self._last_plan = plan.now

    def on_arrival(self, state: RequestState, plan: StepPlan, busy_until: float) -> None:
        """Predict what a newcomer may expect, and learn of the load.

        Raises
        ------
        SLOUnattainable : see `Admission.decide`.
        """
        times = self._times(plan)
        state.num_hit_tokens = len(plan.match(state)) * plan.block_size
        prompt = times.work.seconds(state.num_tokens - state.num_hit_tokens, state.num_hit_tokens)
        limit = state.max_total_tokens - state.num_prompt_tokens
        num_output = self.book.lengths.remaining(state.request.slo_class, 0, q=0.5, limit=limit)
        if state.request.slo is not None and state.request.slo.e2e is not None:
            set_deadlines(state, num_output)
        self.book.load.on_arrival(plan.now, prompt + num_output * times.work.decode_seconds)
        self._admission.decide(state, plan, times, busy_until)
        self.book.on_arrival(state)

    def report(self, num_relegated: int) -> SchedulerState:
        """Return how queues and promises stand as of the last plan."""
        return self.book.report(
            self._last_plan,
            num_best_effort=self._num_best_effort,
            num_relegated=num_relegated,
            slacks=[due - self._last_plan for due in self._dues],
        )

    def _times(self, plan: StepPlan) -> StepTimes:
        assert plan.model is not None
        self.work.refresh(plan.model, self.quantile)
        return StepTimes(plan.model, self.work, self.quantile)


class _Step:
    """One step's decisions, top down."""

    def __init__(self, policy: SLOComposer, plan: StepPlan, times: StepTimes) -> None:
        self._policy = policy
        self._tuning = policy.tuning
        self._plan = plan
        self._times = times
        self._filler = StepFiller(plan, times, policy)
        self.view = RunningView(plan.running, plan.now + times.work.shortest_step)
        self._jobs, plan.lost = prefill_jobs(plan.now, self.view.prefills, plan.waiting, times.work)
        self._best_effort = self._find_best_effort()

    @property
    def num_best_effort(self) -> int:
        """Requests that are served from what is left over."""
        waiting = self._plan.waiting
        return len(self.view.loose) + len(waiting) - waiting.num_before(BEST_EFFORT_RANK)

    def compose(self) -> None:
        plan, view = self._plan, self.view
        jobs = self._with_room(self._jobs)
        rows = [*view.streams, *view.loose]
        slack = plan.slack = view.due - plan.now
        budget, is_urgent = slack, False
        if jobs or self._best_effort:
            budget = self._times.natural_budget(view, slack)
        if jobs:
            rows, budget, jobs, is_urgent = self._weigh(jobs, rows, budget, slack)
        else:
            self._policy.book.predicted_wait = 0.0
        rows, shape = self._fit_decodes(rows, budget)
        self._say_budget(budget)
        self._filler.decode(rows, shape)
        self._fill(jobs, budget, is_urgent=is_urgent)
        if not (plan.chunks or plan.admissions or plan.pulls):
            self._let_others_decode(rows, slack)

    # --- the step's time ------------------------------------------------------------------------------

    def _weigh(
        self, jobs: list[Job], rows: list[RequestState], budget: float, slack: float
    ) -> tuple[list[RequestState], float, list[Job], bool]:
        """Return who decodes, the step's time, the prompts to serve, and whether prompts are in danger."""
        plan, times, tuning = self._plan, self._times, self._tuning
        shape = decode_shape(rows)
        share = times.prefill_share(shape, min(budget, times.with_chunk(shape)))
        need = needed_share(jobs, plan.now)
        work = sum(job.seconds for job in jobs)
        self._policy.book.predicted_wait = work / max(share, LEAST_SHARE)
        if need <= share:
            is_busy = self._policy.book.load.utilisation(plan.now) > tuning.busy
            if is_busy:
                self._filler.most_chunk_tokens = self._reach(shape)
            # Time that best effort could use is not given away.
            elif tuning.paces and self.view.streams and not self._best_effort:
                budget = min(budget, pace(times.of(shape), need, tuning))
            if tuning.caution and len(jobs) > 1:
                jobs = shortest_first(jobs, start=plan.now, share=share, caution=tuning.caution)
            return rows, budget, jobs, False
        rows, shape = self._must_run(rows, budget)
        budget, share = self._lengthen(shape, budget, slack, jobs)
        if need > share and tuning.triages:
            jobs, left_behind = select_feasible(
                jobs,
                start=plan.now + tuning.step_margin * min(budget, times.with_chunk(shape)),
                share=max(share, LEAST_SHARE),
                worth=self._policy.book,
            )
            # Time that the others leave is theirs before it is best effort's.
            jobs += left_behind
        return rows, budget, jobs, True

    def _lengthen(
        self, shape: BatchShape, budget: float, slack: float, jobs: list[Job]
    ) -> tuple[float, float]:
        """Return the time of a step in which prompts get the share that they need, and that share.

        Longer steps leave more of the time to prompts, since running streams get fewer tokens in it. Where
        not even the longest is enough, there is more work than time, and the longest gets most of it done.
        """
        times, plan = self._times, self._plan
        num_tokens, reach = times.work.efficient_chunk, self._reach(shape)
        while True:
            seconds = times.with_prompt(shape, num_tokens)
            length = min(slack, seconds)
            share = times.prefill_share(shape, length)
            start = plan.now + self._tuning.step_margin * length
            if seconds >= slack or num_tokens >= reach or share >= needed_share(jobs, start):
                break
            num_tokens = min(2 * num_tokens, reach)
        self._filler.most_chunk_tokens = num_tokens
        return min(slack, max(budget, seconds)), share

    def _reach(self, shape: BatchShape) -> int:
        """Return the prompt tokens that a step may hold for the sake of those who arrive while it runs.

        An efficient chunk, or as many as take a share of the shortest TTFT objective.
        """
        times, plan = self._times, self._plan
        chunk = times.work.efficient_chunk
        limit = self._tuning.reach * self._policy.book.shortest_ttft
        if limit == inf:
            return max(chunk, plan.num_tokens_left)
        num_chunks = max(1.0, (limit - times.fixed(shape)) / times.work.seconds(chunk, 0))
        return max(chunk, min(plan.num_tokens_left, int(chunk * num_chunks)))

    def _say_budget(self, budget: float) -> None:
        if self.view.due_state is not None:
            self._plan.budget = budget
            self._plan.budget_request_id = self.view.due_state.request_id

    # --- who is in it ---------------------------------------------------------------------------------

    def _find_best_effort(self) -> list[RequestState]:
        """Return the prompts without a deadline that can be met: running ones, then those that wait."""
        best_effort = self._plan.waiting.first_from(BEST_EFFORT_RANK)
        if not self.view.prefills:
            return best_effort
        served = {job.state.request_id for job in self._jobs}
        return [state for state in self.view.prefills if state.request_id not in served] + best_effort

    def _with_room(self, jobs: list[Job]) -> list[Job]:
        """Preempt for the first prompt that lacks a slot or blocks; return the prompts that can run."""
        plan = self._plan
        first = next((job for job in jobs if not job.state.block_ids), None)
        if first is None:
            return jobs
        if plan.num_slots_left < 1 or plan.num_blocks_missing(first.state) > 0:
            self._preempt_for(first)
        return jobs if plan.num_slots_left > 0 else [job for job in jobs if job.state.block_ids]

    def _preempt_for(self, job: Job) -> None:
        """Take a slot and blocks for a prompt, if somebody can spare them.

        Best effort can always. A stream can, once the prompt has to begin, if it is so far ahead that its
        deadlines leave the time to compute it again, if its TBT objective is looser, and if it is not worth
        more.
        """
        plan, view, book = self._plan, self.view, self._policy.book
        own = {id(state) for state in self._best_effort}
        pool = [
            state for state in (*view.loose, *self._best_effort) if is_left_over(state) and state.block_ids
        ]
        if make_room(plan, job.state, pool, self._times, book):
            self._forget_victims(own)
            return
        must_begin = plan.now + _LAST_CALL * job.seconds + view.tightest > job.deadline
        if view.tightest < inf and must_begin:
            pool += [
                state
                for state in view.streams
                if state.tbt > job.state.tbt
                and book.of(state) <= book.of(job.state)
                and next_due(state) - plan.now > self._times.work.recompute_seconds(0, state.num_tokens) * 2
            ]
            make_room(plan, job.state, pool, self._times, book)
            self._forget_victims(own)

    def _forget_victims(self, best_effort: set[int]) -> None:
        """Leave those that are preempted out of the view."""
        victims = {id(state) for state in self._plan.victims}
        view = self.view
        view.loose = [state for state in view.loose if id(state) not in victims]
        view.drop_streams(victims)
        if victims & best_effort:
            self._best_effort = [state for state in self._best_effort if id(state) not in victims]

    def _must_run(self, rows: list[RequestState], budget: float) -> tuple[list[RequestState], BatchShape]:
        """Return the streams that cannot sit out a step of this length, and their shape."""
        # Whoever sits out keeps its slot: where slots are short, nothing is gained.
        is_crowded = self._plan.num_slots_left <= max(1, self._plan.max_num_seqs // _CROWDED)
        if not self._tuning.skips or budget == inf or is_crowded:
            return rows, decode_shape(rows)
        # Whoever sits out must have a whole natural step left after this one: else the next would be short,
        # and short steps waste the time that reading the weights takes.
        next_step = self.view.tightest if self._tuning.looks_ahead else self._times.work.shortest_step
        horizon = self._plan.now + budget + next_step
        view = self.view
        chosen = [state for state, due in zip(view.streams, view.dues, strict=True) if due < horizon]
        shape = decode_shape(chosen)
        if self.view.loose:
            with_loose = decode_shape([*chosen, *self.view.loose])
            cost = self._times.of(with_loose) - self._times.of(shape)
            if cost <= self._policy.credit:
                self._policy.credit -= cost
                return [*chosen, *self.view.loose], with_loose
        return chosen, shape

    def _fit_decodes(
        self, rows: list[RequestState], budget: float, beside: Sequence[RequestState] = ()
    ) -> tuple[list[RequestState], BatchShape]:
        """Leave out the streams with the most slack where not all fit a budget that some of them can keep.

        Parameters
        ----------
        beside : streams that are in the step already, whatever fits beside them.

        Returns
        -------
        Those of `rows` that fit, at least one where the step has no other, and the shape of all together.
        """
        shape, most = decode_shape([*beside, *rows]), self._plan.max_rows - len(beside)
        least = 0 if beside else 1
        fits_rows = len(rows) <= most
        if fits_rows and (
            budget == inf or not self._tuning.skips or len(rows) <= least or self._times.of(shape) <= budget
        ):
            return rows, shape
        by_due = sorted(rows, key=next_due)[:most]
        low, high = least, len(by_due)
        while low < high:
            middle = (low + high + 1) // 2
            if self._times.of(decode_shape([*beside, *by_due[:middle]])) <= budget:
                low = middle
            else:
                high = middle - 1
        return by_due[:low], decode_shape([*beside, *by_due[:low]])

    def _let_others_decode(self, rows: list[RequestState], slack: float) -> None:
        """Give those a token that sat out for the sake of prompts of which none could run."""
        taken = {state.request_id for state in (*rows, *self._plan.victims)}
        others = [state for state in (*self.view.streams, *self.view.loose) if state.request_id not in taken]
        if others:
            self._say_budget(slack)
            others, shape = self._fit_decodes(others, slack, self._plan.decodes)
            self._filler.decode(others, shape)

    def _fill(self, jobs: list[Job], budget: float, *, is_urgent: bool) -> None:
        """Put prompts in: those with deadlines, and best effort where time or its share is left."""
        policy, filler, tuning = self._policy, self._filler, self._tuning
        limit = max(budget, self._times.of(filler.shape))
        now = self._plan.now
        aged = [state for state in self._best_effort if now - state.request.arrival > tuning.aging]
        if is_urgent and aged and policy.credit > self._times.work.seconds(filler.smallest_piece, 0):
            policy.credit = max(0.0, policy.credit - filler.fill_for(aged, limit, policy.credit))
        is_full = filler.fill([job.state for job in jobs], limit)
        if not is_full:
            filler.fill(self._best_effort, limit)
        if aged or self.view.loose:
            spent = self._times.of(filler.shape) * tuning.best_effort_share
            policy.credit = min(policy.credit + spent, _MOST_CREDIT)
