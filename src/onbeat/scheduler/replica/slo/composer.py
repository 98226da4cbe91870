"""The SLO policy: as much prefill as the deadlines of running streams allow, in the order of need."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from onbeat.core.slo import ShedOrder, SLOMode
from onbeat.core.step import SchedulerState
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.parts import QueueOrder
from onbeat.scheduler.replica.queues import RunningList, WaitingQueue
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.admission import Admission
from onbeat.scheduler.replica.slo.backlog import Backlog, QueueBound
from onbeat.scheduler.replica.slo.rules import GAP_QUANTILE, LONGEST_GAP, StepRules
from onbeat.scheduler.replica.slo.stalls import Stalls, streams_of
from onbeat.scheduler.replica.slo.step import StepComposition
from onbeat.scheduler.replica.slo.tracker import SLOTracker
from onbeat.scheduler.replica.slo.view import RunningView
from onbeat.scheduler.replica.slo.work import PrefillWork
from onbeat.scheduler.replica.step_plan import StepPlan

LENGTH_QUANTILE = 0.99
"""Of output lengths, what an answer is taken to have at most: to spread an e2e objective over it, as most of
those that are longer come late, and to allow one late token in a hundred."""


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

    Plans keep nothing: what is learnt is learnt between them (`SLOTracker`, `PrefillWork`, `Backlog`,
    `Stalls`).

    Parameters
    ----------
    make_rules : a study may have another rule.

    Attributes
    ----------
    rules : what a step may take, and what prompts get of it; None until `start`.
    tracker : requests and tenants from arrival to end.
    mode : what keeping a TBT objective means.
    shed_order : whom to leave behind where not all can be in time.
    quantile : of the step time, to plan with; None is the mean.
    work : what prompts cost; None until `start`.
    backlog : how long those wait who are not in time; None until `start`.
    stalls : what streams should have in hand for the next step that takes far longer than predicted.

    References
    ----------
    The time budget is that of Sarathi-Serve's section 4.3 taken at each step (Niyama, arXiv 2503.22562,
    section 3.2); triage as in Moore (Management Science 15, 1968).
    """

    def __init__(self, make_rules: type[StepRules] = StepRules) -> None:
        self.tracker = SLOTracker()
        self.stalls = Stalls()
        self.rules: StepRules | None = None
        self.work: PrefillWork | None = None
        self.backlog: Backlog | None = None
        self.admission: Admission | None = None
        self._make_rules = make_rules
        self.configure("stream", "most")

    def configure(self, mode: SLOMode, shed_order: ShedOrder, bound: QueueBound | None = None) -> None:
        """Say what keeping a TBT objective means, and whom to leave behind where not all can be in time.

        Parameters
        ----------
        bound : for how long those may have to wait.
        """
        self.mode, self.shed_order = mode, shed_order
        self.quantile = GAP_QUANTILE if mode == "gap" else None
        self._bound = bound

    def start(self, model: StepTimeModel, most_step_tokens: int) -> None:
        """Take the model that predicts steps, and how many tokens one may have. Called once, first of all."""
        self.work = PrefillWork(model, self.quantile, most_step_tokens)
        self.rules = self._make_rules(self.work, self.stalls, self.mode, self.shed_order, self.tracker.worth)
        self.backlog = Backlog(self.tracker, self.work, self._bound)
        self.admission = Admission(self.backlog, self.work, self.shed_order, self.rules.find_room)

    def compose(self, plan: StepPlan, order: QueueOrder) -> None:  # noqa: ARG002 (deadlines are the order)
        """Fill a plan; nothing else changes."""
        assert self.rules is not None, "start() comes first"
        assert self.backlog is not None
        StepComposition(plan, self.rules, self.backlog).compose()

    def commit(self, plan: StepPlan) -> None:
        """Remember what a plan that is carried out found."""
        assert plan.predicted_wait is not None
        assert self.backlog is not None
        self.tracker.predicted_wait = plan.predicted_wait
        stalls = self.stalls
        stalls.tightest, stalls.shortest = plan.tightest, LONGEST_GAP * plan.tightest
        if stalls.since is None:
            stalls.since = plan.now
        self.backlog.on_plan(plan)

    def steady_limit(self, running: RunningList, waiting: WaitingQueue) -> float:  # noqa: ARG002
        """Return what the last plan's TBT objectives allow a step, if none waits. See `steady.Steady`."""
        assert self.rules is not None
        return 0.0 if waiting else self.rules.tightest_limit(self.stalls.tightest)

    def refresh(self, running: Iterable[RequestState], now: float) -> None:
        """Take anew what plans lean on from what was learnt."""
        assert self.work is not None
        assert self.rules is not None
        self.work.take()
        if self.stalls.size and self.mode == "stream":
            streams = streams_of(running, self.tracker.lengths, self.work.alone_seconds)
            limit = self.rules.tightest_limit(min([each.tbt for each in streams], default=inf))
            self.stalls.weigh(streams, self.work, limit, now)

    def on_arrival(self, state: RequestState, plan: StepPlan, busy_until: float) -> None:
        """Predict what an arrival may expect, and learn of the load.

        Parameters
        ----------
        plan : the queues as they are, at the time of the arrival.
        busy_until : when the step under way is expected to end, seconds.

        Raises
        ------
        SLOUnattainable, Overloaded : see `Admission.decide`.
        """
        work, admission, backlog, tracker = self.work, self.admission, self.backlog, self.tracker
        assert work is not None
        assert admission is not None
        assert backlog is not None
        backlog.on_arrival(plan.waiting, plan.now)
        if not plan.running:
            work.catch_up()
        state.note_hits(len(plan.match(state)) * plan.block_size)
        slo_class, num_sent = state.request.slo_class, state.num_output_tokens
        limit = state.max_total_tokens - state.num_tokens
        num_output = tracker.lengths.remaining(slo_class, num_sent, q=0.5, limit=limit)
        if state.slo.has_objective:
            expected = tracker.lengths.remaining(slo_class, num_sent, q=LENGTH_QUANTILE, limit=limit)
            state.slo.begin(
                state.request,
                self.mode,
                now=plan.now,
                max_output_tokens=num_sent + limit,
                expected_output_tokens=num_sent + expected,
                longest_pace=work.efficient_seconds + len(plan.running) * work.decode_seconds,
            )
        seconds = work.seconds(state.num_tokens - state.num_hit_tokens, state.num_hit_tokens)
        tracker.load.on_arrival(plan.now, seconds + num_output * work.decode_seconds)
        admission.decide(state, plan, busy_until)
        tracker.on_arrival(state)

    def report(self, plan: StepPlan, num_relegated: int) -> SchedulerState:
        """Return how queues and objectives stand.

        Parameters
        ----------
        plan : the queues as they are, at the time when the next step may start.
        """
        assert self.backlog is not None
        assert self.work is not None
        view = RunningView(plan.running, plan.now, self.work.alone_seconds)
        waiting = plan.waiting
        return self.tracker.report(
            plan.now,
            num_best_effort=waiting.best_effort.num_requests
            + len(view.best_effort_decodes)
            + sum(state.slo.next_deadline == inf for state in view.prefills),
            num_relegated=num_relegated,
            queue_seconds=self.backlog.wait(waiting),
            slacks=[due - plan.now for due in view.deadlines],
        )
