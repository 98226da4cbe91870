"""The SLO policy's step: as much prefill as the deadlines of running streams allow, in order of need."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.parts import QueueOrder, ReservePrompt
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.deadlines import BEST_EFFORT_RANK, queue_rank
from onbeat.scheduler.replica.slo.filler import StepFiller
from onbeat.scheduler.replica.slo.prefill_work import PrefillWork
from onbeat.scheduler.replica.slo.triage import Job, needed_share, select_feasible
from onbeat.scheduler.replica.slo.view import RunningView, decode_shape, next_due
from onbeat.scheduler.replica.step_plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SLOTuning:
    """What the policy may be varied by in a study; a server runs the defaults."""

    quantile: float | None = 0.95
    """Of the step time, to plan with; None is the mean."""
    skips: bool = True
    """Whether streams with slack may sit out a step when prompts are in danger."""
    paces: bool = True
    """Whether steps are kept short while prompts have time."""
    triages: bool = True
    """Whether prompts are left behind for the sake of others."""
    best_effort_share: float = 0.05
    """Of the time, for best effort, however little is left over."""
    aging: float = 30.0
    """Seconds after its arrival from which best effort is owed its share for its prompt."""
    pace_margin: float = 2.0
    """How much faster than needed prompts are run while they have time."""


class SLOComposer:
    """Plans each step against the clock.

    The time of a step is bounded by the earliest deadline of the running streams. Into it go their tokens and
    the prompts, earliest deadline first; prompts that cannot all be in time are sorted out beforehand.
    """

    def __init__(self, tuning: SLOTuning | None = None) -> None:
        self.tuning = tuning or SLOTuning()
        self.work = PrefillWork()
        self.reservation = ReservePrompt()
        self._credit = 0.0
        """Seconds that best effort has been owed."""

    def compose(self, plan: StepPlan, order: QueueOrder) -> None:  # noqa: ARG002 (deadlines are the order)
        assert plan.model is not None
        self.work.refresh(plan.model, self.tuning.quantile)
        plan.is_repeatable = False
        _StepComposer(self, plan, plan.model).compose()

    def jobs(self, plan: StepPlan, prefills: list[RequestState]) -> tuple[list[Job], list[RequestState]]:
        """Return the prompts with deadlines that can be met, by deadline, and those that have become lost."""
        now, work = plan.now, self.work
        jobs: list[Job] = []
        lost: list[RequestState] = []
        for state in prefills:
            if queue_rank(state) == BEST_EFFORT_RANK:
                continue
            seconds = work.seconds(state.num_wanted_tokens, state.num_computed_tokens)
            (
                lost.append(state)
                if now + seconds + work.step_seconds > state.ttft_deadline
                else jobs.append(Job(state.ttft_deadline, seconds, state))
            )
        for state in plan.waiting:
            if state.sort_key[0] >= BEST_EFFORT_RANK:
                break
            cached = state.num_hit_tokens
            seconds = work.seconds(state.num_tokens - cached, cached)
            (
                lost.append(state)
                if now + seconds + work.step_seconds > state.ttft_deadline
                else jobs.append(Job(state.ttft_deadline, seconds, state))
            )
        jobs.sort(key=lambda job: job.deadline)
        return jobs, lost

    def grant(self, seconds: float) -> None:
        """Owe best effort its share of a step."""
        self._credit = min(self._credit + seconds * self.tuning.best_effort_share, 1.0)

    @property
    def credit(self) -> float:
        return self._credit

    def spend(self, seconds: float) -> None:
        self._credit = max(0.0, self._credit - seconds)


class _StepComposer:
    """One step's decisions, top down."""

    def __init__(self, policy: SLOComposer, plan: StepPlan, model: StepTimeModel) -> None:
        self._policy = policy
        self._tuning = policy.tuning
        self._work = policy.work
        self._plan = plan
        self._model = model
        self._view = RunningView(plan.running)

    def compose(self) -> None:
        plan, view, policy = self._plan, self._view, self._policy
        jobs, lost = policy.jobs(plan, view.prefills)
        plan.lost = lost
        self._make_room(jobs)
        everyone = [*view.streams, *view.loose]
        shape = decode_shape(everyone)
        slack = view.due - plan.now
        if self._is_blocked(jobs):
            jobs = []
        if not jobs and not self._best_effort():
            self._decode_only(everyone, shape, slack)
            return
        budget = self._natural_budget(slack, has_decodes=bool(everyone))
        is_urgent, served = False, jobs
        if jobs:
            share = self._prefill_share(shape, budget)
            need = needed_share(jobs, plan.now)
            is_urgent = need > share
            if is_urgent:
                everyone, shape = self._must_run(everyone, budget)
                budget = min(slack, max(budget, self._seconds_with_chunk(shape)))
                share = self._prefill_share(shape, budget)
                if need > share and self._tuning.triages:
                    served, _ = select_feasible(jobs, start=plan.now, share=max(share, 0.05))
            elif self._tuning.paces and view.streams:
                budget = min(budget, self._pace(shape, need))
        everyone, shape = self._fit_decodes(everyone, shape, budget)
        self._say_budget(budget if view.streams else None)
        filler = StepFiller(plan, self._model, self._work, self._tuning.quantile, self._policy.reservation)
        filler.decode(everyone, shape)
        limit = max(budget, self._seconds(shape)) if budget < inf else inf
        is_full = self._fill(filler, served, limit, is_urgent=is_urgent)
        if not is_full:
            filler.fill(self._best_effort(), limit)
        if plan.is_empty and view.loose:
            filler.decode(view.loose, decode_shape(view.loose))

    def _make_room(self, jobs: list[Job]) -> None:
        """Preempt best-effort requests that hold the slots which prompts with deadlines need."""
        plan, view = self._plan, self._view
        num_waiting = sum(not job.state.block_ids for job in jobs)
        if plan.num_slots_left > 0 or not num_waiting:
            return
        victims = sorted(
            (state for state in view.loose if state.is_best_effort and not state.num_in_flight_tokens),
            key=lambda state: state.num_computed_tokens,
        )[: min(num_waiting, 4)]
        for victim in victims:
            plan.preempt(victim)
            view.loose.remove(victim)

    def _is_blocked(self, jobs: list[Job]) -> bool:
        """Whether no prompt with a deadline can run before a request ends."""
        return self._plan.num_slots_left < 1 and not any(job.state.block_ids for job in jobs)

    # --- the step's time ------------------------------------------------------------------------------

    def _natural_budget(self, slack: float, *, has_decodes: bool) -> float:
        """Return the time that a step may take without spending slack that streams have earned."""
        if slack < inf:
            return min(slack, self._view.tightest)
        chunk = self._work.idle_seconds(self._work.efficient_chunk, 0)
        return inf if not has_decodes else chunk + self._seconds(decode_shape(self._view.loose))

    def _prefill_share(self, shape: BatchShape, budget: float) -> float:
        """Return the share of a step's time that goes into prefill work beside these decodes."""
        fixed = self._seconds_with_chunk(shape) - self._work.seconds(self._work.efficient_chunk, 0)
        if budget == inf:
            budget = fixed + self._work.seconds(self._work.efficient_chunk, 0)
        return max(0.0, 1 - fixed / budget) if budget > 0 else 0.0

    def _pace(self, shape: BatchShape, need: float) -> float:
        """Return the time of a step in which prompts run as fast as they need to, with a margin."""
        share = max(0.5, self._tuning.pace_margin * need)
        if share >= 0.95:
            return inf
        return self._seconds(shape) / (1 - share)

    def _seconds(self, shape: BatchShape) -> float:
        return self._model.step_time(shape, self._tuning.quantile)

    def _seconds_with_chunk(self, shape: BatchShape) -> float:
        """Return the time of a step with one efficient chunk more."""
        trial = BatchShape(
            num_new_tokens=shape.num_new_tokens,
            num_sequences=shape.num_sequences,
            num_decodes=shape.num_decodes,
            decode_context_tokens=shape.decode_context_tokens,
            num_lm_head_rows=shape.num_lm_head_rows,
        )
        trial.add(0, self._work.efficient_chunk, samples=True)
        return self._seconds(trial)

    def _say_budget(self, budget: float | None) -> None:
        self._plan.budget = budget
        if budget is not None and self._view.due_state is not None:
            self._plan.budget_request_id = self._view.due_state.request_id

    # --- who is in it ---------------------------------------------------------------------------------

    def _best_effort(self) -> list[RequestState]:
        """Return the prompts without a deadline that can be met: running ones, then those that wait."""
        running = [state for state in self._view.prefills if queue_rank(state) == BEST_EFFORT_RANK]
        running += [state for state in self._plan.lost if state.block_ids]
        first = self._plan.waiting.first_from(BEST_EFFORT_RANK)
        return running + first

    def _decode_only(self, everyone: list[RequestState], shape: BatchShape, slack: float) -> None:
        everyone, shape = self._fit_decodes(everyone, shape, slack)
        self._say_budget(slack if self._view.streams else None)
        filler = StepFiller(
            self._plan, self._model, self._work, self._tuning.quantile, self._policy.reservation
        )
        filler.decode(everyone, shape)

    def _must_run(self, everyone: list[RequestState], budget: float) -> tuple[list[RequestState], BatchShape]:
        """Return the streams that cannot sit out a step of this length, and its shape."""
        if not self._tuning.skips or budget == inf:
            return everyone, decode_shape(everyone)
        # Whoever sits out must have a whole natural step left after this one: else the next would be short,
        # and short steps waste the time that reading the weights takes.
        horizon = self._plan.now + budget + self._view.tightest
        chosen = [state for state in self._view.streams if next_due(state) < horizon]
        shape = decode_shape(chosen)
        if self._view.loose:
            with_loose = decode_shape([*chosen, *self._view.loose])
            cost = self._seconds(with_loose) - self._seconds(shape)
            if cost <= self._policy.credit:
                self._policy.spend(cost)
                return [*chosen, *self._view.loose], with_loose
        return chosen, shape

    def _fit_decodes(
        self, states: list[RequestState], shape: BatchShape, budget: float
    ) -> tuple[list[RequestState], BatchShape]:
        """Leave out the streams with the most slack where not all fit a budget that some of them can keep."""
        if budget == inf or self._seconds(shape) <= budget or not self._tuning.skips or len(states) < 2:
            return states, shape
        by_due = sorted(states, key=next_due)
        low, high = 1, len(by_due)
        while low < high:
            middle = (low + high + 1) // 2
            if self._seconds(decode_shape(by_due[:middle])) <= budget:
                low = middle
            else:
                high = middle - 1
        chosen = by_due[:low]
        return chosen, decode_shape(chosen)

    def _fill(self, filler: StepFiller, served: list[Job], limit: float, *, is_urgent: bool) -> bool:
        """Put prompts in; return whether nothing else may follow."""
        policy = self._policy
        owed = self._best_effort()
        aged = [state for state in owed if self._plan.now - state.request.arrival > self._tuning.aging]
        if is_urgent and aged and policy.credit > self._work.seconds(self._work.efficient_chunk // 4, 0):
            spent = filler.fill_for(aged, limit, policy.credit)
            policy.spend(spent)
        is_full = filler.fill([job.state for job in served], limit)
        if aged or self._view.loose:
            policy.grant(self._seconds(filler.shape))
        return is_full
