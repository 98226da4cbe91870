"""The SLO policy: as much prefill as the deadlines of running streams allow, in the order of need."""

from __future__ import annotations

from math import inf

from onbeat.core.step import SchedulerState
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.config import SchedulerConfig
from onbeat.scheduler.replica.parts import QueueOrder
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.admission import Admission, Backlog
from onbeat.scheduler.replica.slo.rules import GAP_QUANTILE, StepRules
from onbeat.scheduler.replica.slo.step import StepComposition
from onbeat.scheduler.replica.slo.tracker import SLOTracker
from onbeat.scheduler.replica.slo.view import RunningView
from onbeat.scheduler.replica.slo.work import PrefillWork
from onbeat.scheduler.replica.step_plan import StepPlan

LENGTH_QUANTILE = 0.99
"""Of output lengths, what an answer is taken to have at most: one in a hundred of so many may be late."""


class SLOComposer:
    """Plans each step against the clock, and learns between plans what plans lean on.

    1. The step ends before the tightest TBT objective of its streams has passed, and before the earliest of
       their deadlines; a stream that is behind has decodes run alone until it has caught up. While all are
       far ahead (`stream` mode), a step may take up to two objectives.
    2. All streams decode. Where even that does not fit, those with the most slack sit out; and where prompts
       would be left behind although there are slots and memory for them, those that have plenty.
    3. Prompts go by deadline. Those that cannot all be in time are sorted out (Moore and Hodgson); what time
       the others leave goes to them, and then to best effort.
    4. A step holds an efficient chunk, or what `PrefillWork.room_beside` finds best; more gains nothing. One
       that ends a prompt holds no more than lets it be in time.
    5. For a prompt that lacks a slot or memory, requests without objectives are preempted.

    Plans keep nothing: what is learnt is learnt between them (`SLOTracker`, `PrefillWork`, `Backlog`).

    Parameters
    ----------
    model : predicts steps.
    make_rules : a study may have another rule.

    Attributes
    ----------
    rules : what a step may take, and what prompts get of it.
    tracker : requests and tenants from arrival to end.
    mode : what keeping a TBT objective means.
    quantile : of the step time, to plan with; None is the mean.
    work : what prompts cost.
    backlog : how long those wait who are not in time.

    References
    ----------
    The time budget is that of Sarathi-Serve's section 4.3 taken at each step (Niyama, arXiv 2503.22562,
    section 3.2); triage as in Moore (Management Science 15, 1968).
    """

    def __init__(
        self, config: SchedulerConfig, model: StepTimeModel, make_rules: type[StepRules] = StepRules
    ) -> None:
        self.mode, shed_order = config.slo_mode, config.shed_order
        self.quantile = GAP_QUANTILE if self.mode == "gap" else None
        self.tracker = tracker = SLOTracker()
        self._predicted_wait = 0.0
        self.work = work = PrefillWork(model, self.quantile, config.max_num_batched_tokens)
        self.rules = make_rules(work, self.mode, shed_order, tracker.worth)
        seconds = inf if config.max_queue_seconds is None else config.max_queue_seconds
        self.backlog = Backlog(tracker, self.rules, seconds, config.max_num_seqs)
        self.admission = Admission(tracker, self.rules, self.backlog)

    def compose(self, plan: StepPlan, order: QueueOrder) -> None:  # noqa: ARG002 (deadlines are the order)
        """Fill a plan; nothing else changes."""
        StepComposition(plan, self.rules, self.backlog).compose()

    def commit(self, plan: StepPlan) -> None:
        """Remember what a plan that is carried out found."""
        self._predicted_wait = plan.predicted_wait
        self.admission.on_plan(plan)

    def on_arrival(self, state: RequestState, plan: StepPlan, busy_until: float) -> None:
        """Predict what an arrival may expect, and take it.

        Parameters
        ----------
        plan : the queues as they are, at the time of the arrival.
        busy_until : when the step under way is expected to end, seconds.

        Raises
        ------
        SLOUnattainable, Overloaded : see `Admission.decide`.
        """
        work, admission, backlog, tracker = self.work, self.admission, self.backlog, self.tracker
        backlog.on_arrival(plan.waiting, plan.now)
        if not plan.running:
            work.catch_up()
        state.note_hits(len(plan.match(state)) * plan.block_size)
        slo_class, num_sent = state.request.slo_class, state.num_output_tokens
        limit = state.max_total_tokens - state.num_tokens
        if state.slo.has_objective:
            longest = tracker.lengths.remaining(slo_class, num_sent, q=LENGTH_QUANTILE, limit=limit)
            state.slo.begin(
                state.request,
                self.mode,
                now=plan.now,
                max_output_tokens=num_sent + longest,
                num_left=tracker.tokens_left(state) if state.slo.end < inf else None,
                longest_pace=work.efficient_seconds + len(plan.running) * work.decode_seconds,
            )
        admission.decide(state, plan, busy_until)
        tracker.on_arrival(state)

    def report(self, plan: StepPlan, num_relegated: int) -> SchedulerState:
        """Return how queues and objectives stand.

        Parameters
        ----------
        plan : the queues as they are, at the time when the next step may start.
        """
        view = RunningView(plan.running, plan.now, self.work.alone_seconds)
        waiting = plan.waiting
        return SchedulerState(
            num_best_effort=waiting.best_effort.num_requests
            + len(view.best_effort_decodes)
            + sum(state.slo.next_deadline == inf for state in view.prefills),
            num_relegated=num_relegated,
            num_missed=self.tracker.num_missed,
            num_rejected=dict(self.tracker.num_rejected),
            predicted_wait=self._predicted_wait,
            queue_seconds=self.backlog.wait(waiting),
            decode_slacks=[due - plan.now for due in view.deadlines],
        )
