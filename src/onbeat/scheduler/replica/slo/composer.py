"""The SLO policy: as much prefill as the deadlines of running streams allow, in the order of need.

`StepRules` say what a step may take, and what prompts get of it: the rule, without the queues.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from operator import itemgetter

from onbeat.core.slo import DEFAULT_QUEUE_SECONDS, ShedMode
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.idle_check import Asked, ShortSteps
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.view import (
    Jobs,
    PromptJob,
    RunningView,
    StepFiller,
    decode_shape,
    free_blocks,
    is_expendable,
    preempt_for,
    prefill_jobs,
)
from onbeat.scheduler.replica.step_plan import Composer, RunningList, StepPlan, WaitingQueue
from onbeat.scheduler.replica.tracker import SLOTracker
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.scheduler.triage import CERTAIN, CostModel, PrefillShare, select_feasible

GAP_QUANTILE = CERTAIN
"""Of the step time, to plan with in `gap` mode: nothing earned makes up for a longer step there, and one in a
hundred is what a request's P99 gap allows. In `stream` mode longer and shorter steps even out: the mean."""
EARNED_SHARE = 1 / 32
"""Of a TBT objective that a step leaves to its streams: they earn the time to outlast a stall."""
SPENT_SHARE, SPENT_WHILE_IT_GROWS = 1 / 4, 1 / 2
"""Of the slack of the most urgent stream, what one step may take; and while the queue grows."""
LONGEST_GAP = 2.0
"""The longest step that slack may be spent on, TBT objectives."""
PACED_SHARE, PACED_BEHIND_STREAMS = 2 / 5, 1 / 5
"""Of a step, what is left to prompts whatever e2e objectives ask for: a prompt that waits has one too. Less
while prompts wait that cannot be in time, or a call runs that has lost its job, if few of the prompts have
TTFT objectives: each that is taken then makes those late that run, whose prompts have been computed already,
and wants a pace itself."""
MOST_WITH_TTFT = 1 / 8
"""Share of the prompts that wait which may have TTFT objectives, for that."""
SLACK_TOKENS = 20
"""A stream that has the slack of so many tokens may sit out a step for prompts that would be late."""
OVERDUE = 1.5
"""Times the bound that a request waits before it is ended. Above the errors of predictions: only requests
that prompts with deadlines have overtaken wait so long."""


class StepRules:
    """The decisions of a step, each of which a study can replace.

    Parameters
    ----------
    config : what keeping a TBT objective means, whom to leave behind, and how long best effort may wait.
    cost_model : what prompts cost.
    worth : of keeping a request's objective.

    Attributes
    ----------
    ends_in_time : whether a step that ends a prompt ends by its deadline.
    allowed : share of a TBT objective that a step may take where there is no slack.
    tightest : the shortest TBT objective of the streams of the last step, seconds; infinite without any.
    """

    ends_in_time, earned, slack_tokens = True, EARNED_SHARE, SLACK_TOKENS
    spent, spent_while_it_grows, longest_gap = SPENT_SHARE, SPENT_WHILE_IT_GROWS, LONGEST_GAP

    def __init__(
        self, config: SchedulerConfig, cost_model: CostModel, worth: Callable[[RequestState], float]
    ) -> None:
        self.cost_model, self.worth = cost_model, worth
        self.mode, self.shed_order = config.slo_mode, config.shed_order
        self.allowed = 1.0 if self.mode == "gap" else 1 - self.earned
        self.longest_wait = inf if config.max_queue_seconds is None else config.max_queue_seconds
        self.tightest = inf

    def limit(
        self,
        view: RunningView,
        decode_seconds: float,
        start: float,
        *,
        queue_grows: bool = False,
        streams_first: bool = False,
    ) -> float:
        """Return the time that a step may take, seconds; infinite where no stream has an objective.

        Parameters
        ----------
        queue_grows : whether some wait that cannot be in time: then work is short, not slack.
        streams_first : whether the pace of e2e objectives goes before prompts that wait.
        """
        slack = view.deadline - start
        objective = view.tightest * self.allowed
        if self.mode == "stream" and objective < inf:
            spent = self.spent_while_it_grows if queue_grows else self.spent
            objective = max(objective, min(spent * slack, self.longest_gap * view.tightest))
        if view.paces:
            paced = PACED_BEHIND_STREAMS if streams_first else PACED_SHARE
            pace = min([each for each in view.paces if each >= decode_seconds] or view.paces)
            objective = min(objective, max(pace, decode_seconds / (1 - paced)))
        return min(objective, max(slack, decode_seconds))

    def prefill_share(self, decodes: BatchShape, limit: float, jobs: Sequence[PromptJob]) -> PrefillShare:
        """Return what prompts get of a step beside some decodes, within a limit."""
        ttfts = [job.state.slo.ttft_deadline - job.state.request.arrival for job in jobs]
        return self.cost_model.prefill_share(decodes, limit, min(ttfts, default=inf))

    def split(self, jobs: Sequence[PromptJob], prefill: PrefillShare, now: float) -> tuple[Jobs, Jobs]:
        """Return the prompts that can all be in time, and those to leave behind, by deadline both."""
        start = now + prefill.fixed_seconds  # whatever part of its last step a prompt needs
        # Of those that came at once the last goes, so that it is the same one at the next step.
        cost, leaves_last = partial(self.cost, start=start), self.shed_order == "longest-wait"
        return select_feasible(jobs, start=start, share=prefill.share, cost=cost, leaves_last=leaves_last)

    def cost(self, job: PromptJob, start: float) -> float | None:
        """Return what a prompt costs others: the greatest is the first to be left behind; None is never."""
        state = job.state
        if state.is_protected:
            return None
        if self.shed_order == "most":
            return job.seconds / self.worth(state)
        return (state.request.arrival - start) * self.worth(state)

    def is_late_if_it_waits(self, kept: Sequence[PromptJob], prefill: PrefillShare, now: float) -> bool:
        """Whether one of the prompts that wait is late if they do for another step.

        Parameters
        ----------
        kept : prompts that can all be in time, in the order of their deadlines.
        """
        end = now + prefill.length
        for deadline, seconds, state in kept:
            end += seconds / prefill.share
            if end >= deadline and not state.block_ids:
                return True
        return False

    def is_starved(self, state: RequestState, now: float) -> bool:
        """Whether best effort, which has begun, gets no further, for lack of memory or time.

        Its last token is as long ago as a request may wait to be begun. Nobody ends it, as its client has
        read what there is.
        """
        slo = state.slo
        longest = self.longest_wait if self.longest_wait < inf else DEFAULT_QUEUE_SECONDS
        return slo.runs_as_best_effort and now - max(slo.last_delivery, _waits_since(state)) > longest

    def is_overdue(self, state: RequestState, now: float) -> bool:
        """Whether a waiting request was taken, but has had to let others go first ever since."""
        has_begun = state.admitted_step_id >= 0 or state.num_output_tokens
        return not has_begun and now - _waits_since(state) > OVERDUE * self.longest_wait

    def loss(self, state: RequestState, start: float) -> tuple[float, ...]:
        """Return a key of running requests: the greatest is the first to be preempted.

        Best effort goes first, but last if it is starved; then streams that have the time to be computed
        again before their next deadline, the one with most slack first; then those that are worth least.

        Parameters
        ----------
        start : when the next step may start, seconds.
        """
        slo, arrival = state.slo, state.request.arrival
        if slo.runs_as_best_effort:
            return (-1.0 if self.is_starved(state, start) else 2.0, 0.0, arrival)
        deadline = slo.deadline_after(state.num_in_flight_tokens - state.num_in_flight_drafts, start)
        slack = deadline - start - self.cost_model.idle_seconds(state.num_tokens, 0)
        return (1.0, slack, arrival) if slack >= 0 else (0.0, -self.worth(state), arrival)


def _waits_since(state: RequestState) -> float:
    """Return when its wait as best effort has begun: at its arrival, or when its objective passed."""
    return state.request.arrival if state.slo.ttft_deadline == inf else state.slo.ttft_deadline


MOST_BEST_EFFORT = 32
"""Best-effort prompts that a plan looks at: more than a step holds."""


def _nearly_all_paced(jobs: Jobs) -> bool:
    """Whether few of the prompts with deadlines have TTFT objectives of their own."""
    return sum(job.state.slo.objective_deadline < inf for job in jobs) <= MOST_WITH_TTFT * len(jobs)


def _best_effort(plan: StepPlan, view: RunningView, left_over: list[RequestState]) -> list[RequestState]:
    """Return the prompts without a deadline that can be met: running ones, then those that wait.

    Parameters
    ----------
    left_over : those that wait as best effort already.
    """
    late = plan.infeasible
    running = [state for state in view.prefills if state.slo.next_deadline == inf or state in late]
    # Those who ask to be refused rather than served late end with this step.
    waiting = [state for state in late if not (state.block_ids or state.request.shed is ShedMode.REJECT)]
    return running + waiting + left_over


def _can_admit_all(plan: StepPlan, jobs: Jobs) -> bool:
    """Whether there are slots and memory for all prompts: who sits out keeps its own for longer."""
    waiting = [job.state for job in jobs if not job.state.block_ids]
    needed = (plan.kv.num_blocks_for(state.num_tokens - state.num_hit_tokens) for state in waiting)
    return len(waiting) <= plan.num_slots_left and sum(needed) <= plan.num_blocks_left


LENGTH_QUANTILE = 0.99
"""Of output lengths, what an answer is taken to have at most: one in a hundred of so many may be late."""


class SLOComposer(Composer):
    """Plans each step against the clock, and learns between plans what plans lean on.

    1. The step ends before the tightest TBT objective of its streams has passed, less the share that they
       earn; before the earliest of their deadlines, so that a stream that is behind has decodes run alone
       until it has caught up; and before the shortest pace of an e2e objective that decodes alone can keep,
       but prompts keep a part of it. While all streams are far ahead (`stream` mode), it may take a part of
       that, up to two objectives; a larger part while prompts wait that cannot be in time.
    2. Prompts go by deadline. Those that cannot all be in time are sorted out (Moore and Hodgson); what time
       the others leave goes to them, and then to best effort.
    3. For a prompt that lacks a slot or memory and would be late by waiting, requests without objectives are
       preempted.
    4. All streams decode. Where even that does not fit, those with the most slack sit out; and where prompts
       are left behind although there are slots and memory for them, those that have plenty. Where blocks run
       short, those are preempted that lose least.
    5. A step holds an efficient chunk, or what `CostModel.prefill_share` finds best; more gains nothing. One
       that ends a prompt holds no more than lets it be in time, and best effort only where that is certain.
    6. Best effort that has sent tokens and none for too long goes first; a prompt that has begun goes before
       those that are left behind. Who has not begun is ended then.

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
        self.quantile = GAP_QUANTILE if config.slo_mode == "gap" else None
        self.tracker = SLOTracker()
        self.predicted_wait = 0.0
        self.cost_model = CostModel(model, self.quantile, config.max_num_batched_tokens)
        self.rules = make_rules(config, self.cost_model, self.tracker.worth)
        self._short_steps = ShortSteps(self.cost_model)

    def compose(self, plan: StepPlan) -> None:
        """Fill a plan; nothing else changes."""
        rules, cost_model = self.rules, self.cost_model
        view = RunningView(plan.running, plan.now, cost_model.shortest_tbt)
        if plan.num_running > len(plan.running):
            plan.look_beside(view, cost_model.shortest_tbt)
        jobs: Jobs = []
        best_effort: list[RequestState] = []
        left_over: list[RequestState] = []
        if view.prefills or plan.waiting.length:
            jobs, plan.infeasible = prefill_jobs(plan, plan.now, view.prefills, cost_model)
            left_over = plan.waiting.best_effort.first(MOST_BEST_EFFORT)
            best_effort = _best_effort(plan, view, left_over)
        plan.tightest = view.tightest
        limit, seconds = inf, 0.0
        if view.urgent is not None:  # else nothing is due, and nobody asks how long the decodes take
            seconds = cost_model.of(view.shape)
            # Those who never had an objective wait for as long as it takes: they say nothing of the load.
            is_short = bool(best_effort) and any(state.slo.has_objective for state in best_effort)
            are_first = bool(view.paces) and (is_short or view.has_lost_job) and _nearly_all_paced(jobs)
            limit = rules.limit(view, seconds, plan.now, queue_grows=is_short, streams_first=are_first)
            plan.budget, plan.budget_request_id = limit, view.urgent.request_id
            first, end = view.deadline, plan.now + seconds
            if first < end:  # whoever is late already is so by less, the more tokens a step brings
                first = min([each for each in view.deadlines if each >= end], default=inf)
            plan.slack = max(limit, first - plan.now)
        if seconds > limit or view.shape.num_decodes > plan.max_rows:
            plan.tell_apart(view)
            self._fit_decodes(plan, view, limit)
        if jobs or best_effort:
            self._share_out(plan, view, jobs, limit, best_effort)
            # They stand by arrival: where the first has not waited for too long, none has.
            if left_over and plan.now - left_over[0].request.arrival > OVERDUE * rules.longest_wait:
                admitted = {id(admission.state) for admission in plan.admissions}
                overdue = [state for state in left_over if rules.is_overdue(state, plan.now)]
                plan.overdue = [state for state in overdue if id(state) not in admitted]
        else:
            self._decode(plan, view)

    def commit(self, plan: StepPlan) -> None:
        """Remember what a plan that is carried out found."""
        self.predicted_wait, self.rules.tightest = plan.predicted_wait, plan.tightest

    def steady_limit(self, running: RunningList, waiting: WaitingQueue) -> float:  # noqa: ARG002
        """Return what the last plan's TBT objectives allow a step, if none waits."""
        return 0.0 if waiting.length else self.rules.tightest * self.rules.allowed

    def on_arrival(self, state: RequestState, plan: StepPlan) -> None:
        """Set the deadlines of an arrival, by how long answers have been of late.

        Parameters
        ----------
        plan : the queues as they are, at the time of the arrival.
        """
        cost_model, request, slo = self.cost_model, state.request, state.request.slo
        if not plan.num_running:
            cost_model.catch_up()
        state.num_hit_tokens = len(plan.kv.match(state)) * plan.kv.block_size
        begin = partial(state.slo.begin, request, self.rules.mode, now=plan.now)
        if slo is None:
            begin(max_output_tokens=state.max_total_tokens - state.num_prompt_tokens)
            return
        limit, num_sent = state.max_total_tokens - state.num_tokens, len(request.resumed_token_ids)
        lengths = self.tracker.lengths
        longest = lengths.remaining(request.slo_class, num_sent, q=LENGTH_QUANTILE, limit=limit)
        num_left, longest_pace = None, inf
        if slo.e2e is not None:
            num_left = self.tracker.tokens_left(state)
            longest_pace = cost_model.idle_seconds(cost_model.efficient_chunk, 0)
            longest_pace += plan.num_running * cost_model.costs.decode
        begin(max_output_tokens=num_sent + longest, num_left=num_left, longest_pace=longest_pace)
        if state.slo.tbt_objective >= cost_model.alone_seconds:
            known = (state.num_tokens, state.num_hit_tokens, cost_model.costs, self.tracker.worth(state))
            self._short_steps.asked.append(Asked(plan.now, *known, state.slo.num_left, state.slo))
        if plan.waiting.best_effort.num_requests or cost_model.least_tbt:
            self._short_steps.weigh(plan)

    def _share_out(
        self, plan: StepPlan, view: RunningView, jobs: Jobs, limit: float, rest: list[RequestState]
    ) -> None:
        """Fill the plan with decodes and prompts.

        Parameters
        ----------
        view : its decodes are those that fit the limit.
        limit : seconds that the step may take.
        rest : prompts without a deadline that can be met.
        """
        rules = self.rules
        sitting_out: list[RequestState] = []
        ordered: list[RequestState] = []
        ends_by: dict[str, float] = {}
        chunk, num_kept = self.cost_model.efficient_chunk, 0
        if jobs:
            prefill = rules.prefill_share(view.shape, limit, jobs)
            plan.predicted_wait = sum([job.seconds for job in jobs]) / prefill.share
            may_preempt = any(map(is_expendable, [*view.best_effort_decodes, *rest])) or plan.has_expendable()
        if jobs and (may_preempt or view.prefills or plan.num_slots_left > 0):  # else none can be served
            kept, left_behind = rules.split(jobs, prefill, plan.now)
            # Time that the others leave is theirs before it is best effort's.
            ordered, num_kept = [job.state for job in kept + left_behind], len(kept)
            chunk, due = prefill.chunk, kept if rules.ends_in_time else []
            ends_by = {job.state.request_id: job.deadline - plan.now for job in due}
            if may_preempt:
                self._preempt_for(plan, view, rest, kept, prefill)
            if plan.victims:
                view.keep([state for state in view.decodes if state not in plan.victims])
            if left_behind and _can_admit_all(plan, jobs):
                sitting_out = self._sit_out(plan, view, prefill)
        self._decode(plan, view)
        begun = [state for state in rest if state.admitted_step_id >= 0]
        if starved := [state for state in begun if rules.is_starved(state, plan.now)]:
            first = max(starved, key=lambda state: state.num_output_tokens > 0)
            rest = [state for state in rest if state is not first]
            # A client that reads waits for what lacks memory; a prompt lacks time, not the kept ones'.
            ordered.insert(0 if first.num_output_tokens else num_kept, first)
        # Decodes alone may take longer than the limit: prompts then get nothing.
        num_left = min(chunk, plan.num_tokens_left)
        filler = StepFiller(plan, self.cost_model, view.shape, limit, num_left=num_left, ends_by=ends_by)
        has_room = not ordered or filler.fill(ordered)
        if has_room and rest:
            filler.leave_margin()
            filler.fill(rest)
        if sitting_out and not (plan.chunks or plan.admissions):  # in vain
            view.keep([state for state in sitting_out if state not in plan.victims])
            self._decode(plan, view)

    def _preempt_for(
        self, plan: StepPlan, view: RunningView, rest: list[RequestState], kept: Jobs, prefill: PrefillShare
    ) -> None:
        """Preempt requests that have no deadline for the first prompt that lacks a slot or blocks.

        Only once it, or one behind it, cannot wait for another step: until then somebody may end, and what is
        preempted is computed again in time that others lack. For the same reason nobody is preempted who has
        missed an objective already: under overload that would be work done twice for each prompt that is
        saved. Nobody is preempted twice for this, so that everybody ends, and nobody for a prompt that is
        left behind.

        Parameters
        ----------
        rest : prompts without a deadline that can be met.
        """
        first = next((job.state for job in kept if not job.state.block_ids), None)
        if (
            first is not None
            and self.rules.is_late_if_it_waits(kept, prefill, plan.now)
            and not (plan.num_slots_left > 0 and plan.has_blocks_for(first))
        ):
            plan.tell_apart(view)
            pool = filter(is_expendable, [*view.best_effort_decodes, *rest])
            preempt_for(plan, first, pool, partial(self.rules.loss, start=plan.now))

    def _sit_out(self, plan: StepPlan, view: RunningView, prefill: PrefillShare) -> list[RequestState]:
        """Take out of the rows that decode those that may sit out; return these.

        Of streams only those with the tightest objective may, that have the time: a stream that went at a
        slower pace of its own would hold its slot and memory for that much longer. None with an e2e
        objective may: its deadlines are for a usual length, and a longer answer needs what it is ahead.
        """
        slack_tokens, end = self.rules.slack_tokens, plan.now + prefill.length
        plan.look_for_slack(view, end, slack_tokens)
        away = {
            id(state)
            for state, deadline in zip(view.streams, view.deadlines, strict=True)
            if state.slo.tbt <= view.tightest
            and deadline - end > slack_tokens * state.slo.tbt
            and state.slo.end == inf
        }
        sitting_out = [state for state in view.decodes if id(state) in away]
        if sitting_out:
            view.keep([state for state in view.decodes if id(state) not in away])
        return sitting_out

    def _fit_decodes(self, plan: StepPlan, view: RunningView, limit: float) -> None:
        """Keep the rows that fit a limit: those with the most slack are left out."""
        due = [-inf if self.rules.is_starved(state, plan.now) else inf for state in view.best_effort_decodes]
        by_need = sorted(zip([*view.deadlines, *due], view.decodes, strict=True), key=itemgetter(0))
        rows = [state for _, state in by_need][: plan.max_rows]
        num = bisect_right(
            range(1, len(rows) + 1), limit, key=lambda num: self.cost_model.of(decode_shape(rows[:num]))
        )
        view.keep(rows[: max(num, 1)])

    def _decode(self, plan: StepPlan, view: RunningView) -> None:
        """Give each decode one token; where blocks run short, preempt."""
        if plan.num_running > len(plan.running):
            plan.decode_beside()
        if view.num_growing * plan.kv.num_tables > plan.num_blocks_left:
            plan.ran_out_of_blocks = True
            view.keep(free_blocks(plan, view.decodes, partial(self.rules.loss, start=plan.now)))
        plan.num_blocks_left -= view.num_growing * plan.kv.num_tables
        plan.decodes += view.decodes
        plan.num_tokens_left -= len(view.decodes)
