"""The SLO policy: as much prefill as the deadlines of running streams allow, in the order of need."""

from __future__ import annotations

from bisect import bisect_right
from math import inf
from operator import itemgetter

from onbeat.core.slo import ShedMode
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.queues import RunningList, WaitingQueue
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.cost_model import CostModel
from onbeat.scheduler.replica.slo.deadlines import BEST_EFFORT_RANK
from onbeat.scheduler.replica.slo.filler import StepFiller, free_blocks, preempt_for
from onbeat.scheduler.replica.slo.rules import GAP_QUANTILE, MOST_WITH_TTFT, StepRules
from onbeat.scheduler.replica.slo.view import PromptJob, RunningView, decode_shape, prefill_jobs
from onbeat.scheduler.replica.step_plan import Composer, StepPlan
from onbeat.scheduler.replica.tracker import SLOTracker
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.scheduler.triage import PrefillShare

MOST_BEST_EFFORT = 32
"""Best-effort prompts that a plan looks at: more than a step holds."""


class StepComposition:
    """Fills a plan; nothing else changes.

    Parameters
    ----------
    rules : what the step may take.
    """

    def __init__(self, plan: StepPlan, rules: StepRules) -> None:
        self._plan = plan
        self._rules = rules
        self._cost_model = cost_model = rules.cost_model
        self._view = RunningView(plan.running, plan.now, cost_model.alone_seconds)
        self._jobs, plan.infeasible = prefill_jobs(plan, plan.now, self._view.prefills, cost_model)

    def compose(self) -> None:
        plan, rules, view, jobs = self._plan, self._rules, self._view, self._jobs
        left_over = plan.waiting.first_from(BEST_EFFORT_RANK, MOST_BEST_EFFORT)
        best_effort = self._best_effort(left_over)
        rows, shape = view.decodes, view.decode_shape()
        plan.tightest = view.tightest
        limit, seconds = inf, 0.0
        if view.urgent is not None:  # else nothing is due, and nobody asks how long the decodes take
            seconds = self._cost_model.of(shape)
            # Those who never had an objective wait for as long as it takes: they say nothing of the load.
            is_short = any(state.slo.has_objective for state in best_effort)
            are_first = bool(view.paces) and (is_short or view.has_lost_job) and self._nearly_all_paced()
            limit = rules.limit(view, seconds, plan.now, queue_grows=is_short, streams_first=are_first)
            plan.budget, plan.budget_request_id = limit, view.urgent.request_id
            first, end = view.deadline, plan.now + seconds
            if first < end:  # whoever is late already is so by less, the more tokens a step brings
                first = min([each for each in view.deadlines if each >= end], default=inf)
            plan.slack = max(limit, first - plan.now)
        if seconds > limit or len(rows) > plan.max_rows:
            rows, shape = self._fit_decodes(limit)
        if jobs or best_effort:
            self._share_out(rows, shape, limit, best_effort)
            admitted = {id(admission.state) for admission in plan.admissions}
            overdue = [state for state in left_over if rules.is_overdue(state, plan.now)]
            plan.overdue = [state for state in overdue if id(state) not in admitted]
        else:
            self._decode(rows, shape)

    def _nearly_all_paced(self) -> bool:
        """Whether few of the prompts with deadlines have TTFT objectives of their own."""
        with_ttft = sum(job.state.slo.objective_deadline < inf for job in self._jobs)
        return with_ttft <= MOST_WITH_TTFT * len(self._jobs)

    def _share_out(
        self, rows: list[RequestState], shape: BatchShape, limit: float, best_effort: list[RequestState]
    ) -> None:
        """Fill the plan with decodes and prompts.

        Parameters
        ----------
        rows, shape : the decodes that fit the limit.
        limit : seconds that the step may take.
        best_effort : prompts without a deadline that can be met.
        """
        plan, rules, jobs = self._plan, self._rules, self._jobs
        sitting_out: list[RequestState] = []
        ordered: list[PromptJob] = []
        ends_by: dict[str, float] = {}
        chunk = self._cost_model.efficient_chunk
        if jobs:
            prefill = rules.prefill_share(shape, limit, jobs)
            kept, left_behind = rules.split(jobs, prefill, plan.now)
            # Time that the others leave is theirs before it is best effort's.
            ordered, chunk, ends_by = kept + left_behind, prefill.chunk, rules.ends_by(kept, plan.now)
            plan.predicted_wait = sum([job.seconds for job in jobs]) / prefill.share
            self._preempt_for(kept, prefill, best_effort)
            rows = self._not_victims(rows)
            if left_behind and self._can_admit_all(jobs):
                rows, sitting_out = self._split(rows, prefill)
            if sitting_out or plan.victims:
                shape = decode_shape(rows)
        shape = self._decode(rows, shape)
        starved = [state for state in best_effort if self._is_starved(state)][:1]
        others = [state for state in best_effort if state not in starved]
        # Decodes alone may take longer than the limit: prompts then get nothing.
        filler = StepFiller(
            plan, self._cost_model, shape, limit=limit, most_chunk_tokens=chunk, ends_by=ends_by
        )
        if filler.fill(self._not_victims(starved + [job.state for job in ordered])):
            filler.leave_margin()
            filler.fill(self._not_victims(others))
        if sitting_out and not (plan.chunks or plan.admissions):  # in vain
            self._decode(self._not_victims(sitting_out), shape)

    def _best_effort(self, left_over: list[RequestState]) -> list[RequestState]:
        """Return the prompts without a deadline that can be met: running ones, then those that wait.

        Parameters
        ----------
        left_over : those that wait as best effort already.
        """
        plan = self._plan
        if not (plan.infeasible or self._view.prefills):
            return left_over
        late = {id(state) for state in plan.infeasible}
        running = [
            state for state in self._view.prefills if state.slo.next_deadline == inf or id(state) in late
        ]
        # Those who ask to be refused rather than served late end with this step.
        waiting = [
            state
            for state in plan.infeasible
            if not state.block_ids and state.request.shed is not ShedMode.REJECT
        ]
        return running + waiting + left_over

    def _preempt_for(
        self, kept: list[PromptJob], prefill: PrefillShare, best_effort: list[RequestState]
    ) -> None:
        """Preempt requests without objectives for the first prompt that lacks a slot or blocks.

        Only once it, or one behind it, cannot wait for another step: until then somebody may end, and what is
        preempted is computed again in time that others lack. For the same reason nobody is preempted who has
        missed an objective already: under overload that would be work done twice for each prompt that is
        saved. Nobody is preempted twice for this, so that everybody ends, and nobody for a prompt that is
        left behind.
        """
        plan = self._plan
        first = next((job.state for job in kept if not job.state.block_ids), None)
        running = [*self._view.best_effort_decodes, *(state for state in best_effort if state.block_ids)]
        pool = [state for state in running if not (state.slo.has_objective or state.num_preemptions)]
        if (
            first is not None
            and pool
            and not (plan.num_slots_left > 0 and plan.has_blocks_for(first))
            and self._rules.is_late_if_it_waits(kept, prefill, plan.now)
        ):
            preempt_for(plan, first, pool, self._loss)

    def _can_admit_all(self, jobs: list[PromptJob]) -> bool:
        """Whether there are slots and memory for all prompts: who sits out keeps its own for longer."""
        waiting = [job.state for job in jobs if not job.state.block_ids]
        return len(waiting) <= self._plan.num_slots_left and self._plan.has_blocks_for_all(waiting)

    def _split(
        self, rows: list[RequestState], prefill: PrefillShare
    ) -> tuple[list[RequestState], list[RequestState]]:
        """Return the rows that decode and those that may sit out.

        Of streams only those with the tightest objective may: a stream that went at a slower pace of its own
        would hold its slot and memory for that much longer.
        """
        view, may_sit_out = self._view, self._rules.may_sit_out
        end = self._plan.now + prefill.length
        away = {
            id(state)
            for state, deadline in zip(view.streams, view.deadlines, strict=True)
            if state.slo.tbt <= view.tightest and may_sit_out(state, deadline, end)
        }
        staying = [state for state in rows if id(state) not in away]
        return staying, [state for state in rows if id(state) in away]

    def _fit_decodes(self, limit: float) -> tuple[list[RequestState], BatchShape]:
        """Return the rows that fit a limit, those with the most slack left out, and their shape."""
        view, plan = self._view, self._plan
        due = [-inf if self._is_starved(state) else inf for state in view.best_effort_decodes]
        by_need = sorted(zip([*view.deadlines, *due], view.decodes, strict=True), key=itemgetter(0))
        rows = [state for _, state in by_need][: plan.max_rows]
        num = bisect_right(
            range(1, len(rows) + 1), limit, key=lambda num: self._cost_model.of(decode_shape(rows[:num]))
        )
        rows = rows[: max(num, 1)]
        return rows, decode_shape(rows)

    def _decode(self, rows: list[RequestState], shape: BatchShape) -> BatchShape:
        """Give each request one token; where blocks run short, preempt. Returns the shape."""
        plan = self._plan
        num_growing = plan.num_growing(rows)
        if num_growing > plan.num_blocks_left:
            plan.ran_out_of_blocks = True
            rows = free_blocks(plan, rows, self._loss)
            shape = decode_shape(rows)
            num_growing = plan.num_growing(rows)
        plan.num_blocks_left -= num_growing
        plan.decodes += rows
        plan.num_tokens_left -= len(rows)
        return shape

    def _loss(self, state: RequestState) -> tuple[float, ...]:
        return self._rules.loss(state, self._plan.now)

    def _is_starved(self, state: RequestState) -> bool:
        return self._rules.is_starved(state, self._plan.now)

    def _not_victims(self, states: list[RequestState]) -> list[RequestState]:
        if not self._plan.victims:
            return states
        victims = {id(state) for state in self._plan.victims}
        return [state for state in states if id(state) not in victims]


LENGTH_QUANTILE = 0.99
"""Of output lengths, what an answer is taken to have at most: one in a hundred of so many may be late."""


class SLOComposer(Composer):
    """Plans each step against the clock, and learns between plans what plans lean on.

    1. The step ends before the tightest TBT objective of its streams has passed, less the share that they
       earn; before the earliest of their deadlines, so that a stream that is behind has decodes run alone
       until it has caught up; and before the shortest pace of an e2e objective that decodes alone can keep,
       but prompts keep a part of it. While all streams are far ahead (`stream` mode), it may take a part of
       that, up to two objectives; a larger part while prompts wait that cannot be in time. For a while after
       a stall they earn more.
    2. Prompts go by deadline. Those that cannot all be in time are sorted out (Moore and Hodgson); what time
       the others leave goes to them, and then to best effort.
    3. For a prompt that lacks a slot or memory and would be late by waiting, requests without objectives are
       preempted.
    4. All streams decode. Where even that does not fit, those with the most slack sit out; and where prompts
       are left behind although there are slots and memory for them, those that have plenty. Where blocks run
       short, those are preempted that lose least.
    5. A step holds an efficient chunk, or what `CostModel.prefill_share` finds best; more gains nothing. One
       that ends a prompt holds no more than lets it be in time, and best effort only where that is certain.
    6. Best effort that has begun and had no token for too long goes first; who has not begun is ended then.

    Plans keep nothing: what is learnt is learnt between them (`SLOTracker`, `StepRules`, `CostModel`).

    Parameters
    ----------
    model : predicts steps.
    make_rules : a study may have another rule.

    Attributes
    ----------
    rules : what a step may take, and what prompts get of it.
    tracker : requests and tenants from arrival to end.
    quantile : of the step time, to plan with; None is the mean.
    cost_model : what prompts cost.
    predicted_wait : seconds until a prompt that comes after the last plan would be begun.

    References
    ----------
    The time budget is that of Sarathi-Serve's section 4.3 taken at each step (Niyama, arXiv 2503.22562,
    section 3.2); triage as in Moore (Management Science 15, 1968).
    """

    def __init__(
        self, config: SchedulerConfig, model: StepTimeModel, make_rules: type[StepRules] = StepRules
    ) -> None:
        self._mode = config.slo_mode
        self.quantile = GAP_QUANTILE if self._mode == "gap" else None
        self.tracker = SLOTracker()
        self.predicted_wait = 0.0
        self.cost_model = CostModel(model, self.quantile, config.max_num_batched_tokens)
        self.rules = make_rules(config, self.cost_model, self.tracker.worth)

    def compose(self, plan: StepPlan) -> None:
        """Fill a plan; nothing else changes."""
        StepComposition(plan, self.rules).compose()

    def commit(self, plan: StepPlan) -> None:
        """Remember what a plan that is carried out found."""
        self.predicted_wait, self.rules.tightest = plan.predicted_wait, plan.tightest

    def steady_limit(self, running: RunningList, waiting: WaitingQueue) -> float:  # noqa: ARG002
        """Return what the last plan's TBT objectives allow a step, if none waits."""
        return 0.0 if waiting else self.rules.tightest_limit(self.rules.tightest)

    def on_arrival(self, state: RequestState, plan: StepPlan) -> None:
        """Set the deadlines of an arrival, by how long answers have been of late.

        Parameters
        ----------
        plan : the queues as they are, at the time of the arrival.
        """
        cost_model, tracker = self.cost_model, self.tracker
        if not plan.running:
            cost_model.catch_up()
        state.num_hit_tokens = len(plan.kv.match(state)) * plan.kv.block_size
        if not state.slo.has_objective:
            return
        limit = state.max_total_tokens - state.num_tokens
        num_sent = state.num_output_tokens
        longest = tracker.lengths.remaining(state.request.slo_class, num_sent, q=LENGTH_QUANTILE, limit=limit)
        state.slo.begin(
            state.request,
            self._mode,
            now=plan.now,
            max_output_tokens=num_sent + longest,
            num_left=tracker.tokens_left(state) if state.slo.end < inf else None,
            longest_pace=cost_model.idle_seconds(cost_model.efficient_chunk, 0)
            + len(plan.running) * cost_model.costs.decode,
        )
