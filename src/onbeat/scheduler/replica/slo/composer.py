"""The SLO policy: as much prefill as the deadlines of running streams allow, in the order of need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, inf
from typing import NamedTuple

from onbeat.core.slo import ShedMode, ShedOrder, SLOMode
from onbeat.core.step import BatchShape, SchedulerState
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.parts import QueueOrder
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.admission import Admission
from onbeat.scheduler.replica.slo.backlog import BEST_EFFORT_STEPS, Backlog, QueueBound
from onbeat.scheduler.replica.slo.deadlines import BEST_EFFORT_RANK
from onbeat.scheduler.replica.slo.filler import RESERVATION, StepFiller
from onbeat.scheduler.replica.slo.stalls import Stalls, streams_of
from onbeat.scheduler.replica.slo.tracker import SLOTracker
from onbeat.scheduler.replica.slo.triage import select_feasible
from onbeat.scheduler.replica.slo.victims import Victims
from onbeat.scheduler.replica.slo.view import PromptJob, RunningView, decode_shape, prefill_jobs
from onbeat.scheduler.replica.slo.work import CERTAIN, PrefillWork, Room
from onbeat.scheduler.replica.step_plan import StepPlan

GAP_QUANTILE = CERTAIN
"""Of the step time, to plan with in `gap` mode: nothing earned makes up for a longer step there, and one in a
hundred is what a request's P99 gap allows. In `stream` mode longer and shorter steps even out: the mean."""
EARNED_SHARE = 1 / 32
"""Of a TBT objective that a step leaves to its streams: they earn the time to outlast a stall."""
SPENT_SHARE = 1 / 4
"""Of the time that the most urgent stream has in hand, what one step may take."""
LONGEST_GAP = 2.0
"""The longest step that time in hand may be spent on, TBT objectives."""
LENGTH_QUANTILE = 0.99
"""Of output lengths, what an answer is taken to have at most: to spread an e2e objective over it, as most of
those that are longer come late, and to allow one late token in a hundred."""
PACED_SHARE = 2 / 3
"""Of a step, what is left to prompts whatever e2e objectives ask for: a prompt that waits has one too."""
SPARE_TOKENS = 20
"""A stream that has the time of so many tokens in hand may sit out a step for prompts that would be late."""
MOST_BEST_EFFORT = 32
"""Best-effort prompts that a plan looks at: more than a step holds."""


class LongSteps(NamedTuple):
    """Steps of decodes alone, and a long one with prompts behind them."""

    room: Room
    """What prompts get of all of them together."""
    limit: float
    """What the next one may take, seconds: no more than its decodes, if it is one of decodes alone."""


class SLOComposer:
    """Plans each step against the clock.

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

    The rule is stateless: what it learns is learnt between plans (`SLOTracker`, `PrefillWork`).

    Attributes
    ----------
    tracker : requests and tenants from arrival to end.
    quantile : of the step time, to plan with; None is the mean.
    work : what prompts cost; None until `start`.
    backlog : how long those wait who are not in time; None until `start`.
    stalls : what streams should have in hand for the next step that takes far longer than predicted.

    References
    ----------
    The time budget is that of Sarathi-Serve's section 4.3 taken at each step (Niyama, arXiv 2503.22562,
    section 3.2); triage as in Moore (Management Science 15, 1968).
    """

    def __init__(self) -> None:
        self.tracker = SLOTracker()
        self.work: PrefillWork | None = None
        self.backlog: Backlog | None = None
        self.stalls = Stalls()
        self.admission: Admission | None = None
        self.configure("stream", "most")

    def configure(self, mode: SLOMode, shed_order: ShedOrder, bound: QueueBound | None = None) -> None:
        """Say what keeping a TBT objective means, and whom to leave behind where not all can be in time.

        Parameters
        ----------
        bound : for how long those may have to wait.
        """
        self.mode = mode
        self.shed_order = shed_order
        self._bound = bound
        self.quantile = GAP_QUANTILE if mode == "gap" else None
        self._earned_share = EARNED_SHARE if mode == "stream" else 0.0

    def start(self, model: StepTimeModel, most_step_tokens: int) -> None:
        """Take the model that predicts steps, and how many tokens one may have. Called once, first of all."""
        self.work = PrefillWork(model, self.quantile, most_step_tokens)
        self.backlog = Backlog(self.tracker, self.work, self._bound)
        self.admission = Admission(self.backlog, self.work, self.shed_order, self.find_room)

    def compose(self, plan: StepPlan, order: QueueOrder) -> None:  # noqa: ARG002 (deadlines are the order)
        """Fill a plan; nothing else changes."""
        assert self.work is not None, "start() comes first"
        _Step(self, plan, self.work).compose()

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

    def refresh(self, running: Iterable[RequestState], now: float) -> None:
        """Take anew what plans lean on from what was learnt."""
        assert self.work is not None
        self.work.take()
        if self.stalls.size and self.mode == "stream":
            streams = streams_of(running, self.tracker.lengths, self.work.alone_seconds)
            limit = self.tightest_limit(min([each.tbt for each in streams], default=inf))
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
        backlog.on_arrival(plan.waiting)
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
        return tightest * (1 - self._earned_share)

    def room(self, decodes: BatchShape, limit: float, jobs: Sequence[PromptJob]) -> Room:
        """Return what prompts get of a step beside some decodes, within a limit."""
        assert self.work is not None
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
        assert self.work is not None
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
        assert work is not None
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
            worth=self.tracker.worth,
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

    def must_begin(self, job: PromptJob, room: Room, now: float) -> bool:
        """Whether a prompt is late if it waits for another step."""
        return now + room.length + job.seconds / room.share >= job.deadline

    def is_for_best_effort(self, step_id: int) -> bool:
        """Whether best effort goes first in a step."""
        return step_id % BEST_EFFORT_STEPS == 0

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
            num_best_effort=waiting.best_effort.num_requests + len(view.best_effort_decodes),
            num_relegated=num_relegated,
            queue_seconds=self.backlog.wait(waiting),
            slacks=[due - plan.now for due in view.deadlines],
        )


class _Step:
    """One step's decisions, top down."""

    def __init__(self, policy: SLOComposer, plan: StepPlan, work: PrefillWork) -> None:
        self._policy = policy
        self._plan = plan
        self._work = work
        self._view = RunningView(plan.running, plan.now, work.alone_seconds)
        self._jobs, plan.late = prefill_jobs(plan, plan.now, self._view.prefills, work)

    def compose(self) -> None:
        plan, policy, view, jobs = self._plan, self._policy, self._view, self._jobs
        left_over = plan.waiting.first_from(BEST_EFFORT_RANK, MOST_BEST_EFFORT)
        best_effort = self._best_effort(left_over)
        if jobs:
            self._make_room(jobs, best_effort)
        rows = self._not_victims(view.decodes)
        shape = decode_shape(rows) if plan.victims else view.decode_shape()
        plan.tightest = view.tightest
        limit, decode_seconds = inf, 0.0
        if view.streams:  # else nothing is due, and nobody asks how long the decodes take
            decode_seconds = self._work.of(shape)
            limit = policy.limit(view, decode_seconds, plan.now)
            if policy.is_for_best_effort(plan.step_id):
                limit = max(limit, decode_seconds)  # nobody sits out
        if decode_seconds > limit or len(rows) > plan.max_rows:
            rows, shape = self._fit_decodes(limit)
        if view.due_state is not None:
            plan.budget, plan.budget_request_id = limit, view.due_state.request_id
            plan.slack = max(limit, view.due - plan.now)
        if jobs or best_effort:
            self._share_out(rows, shape, limit, best_effort)
            plan.overdue = self._overdue(left_over)
        else:
            self._decode(rows, shape)
            plan.predicted_wait = 0.0
        if plan.is_repeatable:  # if anybody asks
            plan.repeat_limit = policy.tightest_limit(view.tightest)
            plan.is_repeatable = decode_seconds <= plan.repeat_limit and self._is_settled()

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
        plan, policy, jobs = self._plan, self._policy, self._jobs
        is_for_best_effort = policy.is_for_best_effort(plan.step_id)
        in_turn: list[PromptJob] = []
        sitting_out: list[RequestState] = []
        due: dict[str, float] = {}
        plan.predicted_wait, most_chunk_tokens = 0.0, self._work.efficient_chunk
        if jobs:
            room = policy.room(shape, limit, jobs)
            in_turn, num_left_behind = policy.in_turn(jobs, room, plan.now)
            if num_left_behind and not is_for_best_effort and self._can_admit_all(jobs):
                rows, sitting_out = self._split(rows, room)
            if sitting_out:
                shape = decode_shape(rows)
                room = policy.room(shape, limit, jobs)
                in_turn, num_left_behind = policy.in_turn(jobs, room, plan.now)
            seconds = sum([job.seconds for job in jobs])
            if (best_effort or seconds > room.share * room.length) and not (
                sitting_out or is_for_best_effort
            ):
                long = policy.long_steps(self._view, shape, room, limit, plan.now)
                if long is not None:
                    others, num_others = policy.in_turn(jobs, long.room, plan.now)
                    if num_others <= num_left_behind:
                        room, limit, in_turn, num_left_behind = *long, others, num_others
                        plan.budget = max(limit, plan.budget or 0.0)
            plan.predicted_wait = seconds / room.share
            due = policy.due(in_turn[: len(in_turn) - num_left_behind], plan.now)
            most_chunk_tokens = room.chunk
        shape = self._decode(rows, shape)
        prompts = [job.state for job in in_turn]
        prompts = best_effort + prompts if is_for_best_effort else prompts + best_effort
        # Decodes alone may take longer than the limit: prompts then get nothing.
        filler = StepFiller(
            plan, self._work, shape, limit=limit, most_chunk_tokens=most_chunk_tokens, due=due
        )
        filler.fill(self._not_victims(prompts))
        if sitting_out and not (plan.chunks or plan.admissions):  # in vain
            self._decode(self._not_victims(sitting_out), shape)

    def _is_settled(self) -> bool:
        """Whether there is no prompt to work on, and all decode, so that they do until something happens."""
        plan = self._plan
        return (
            len(plan.decodes) == len(plan.running)
            and not len(plan.waiting)
            # A first token gives its stream a deadline.
            and min([state.slo.first_delivery for state in self._view.best_effort_decodes], default=0.0) >= 0
        )

    def _best_effort(self, left_over: list[RequestState]) -> list[RequestState]:
        """Return the prompts without a deadline that can be met: running ones, then those that wait.

        Parameters
        ----------
        left_over : those that wait as best effort already.
        """
        plan = self._plan
        if not (plan.late or self._view.prefills):
            return left_over
        late = {id(state) for state in plan.late}
        running = [
            state for state in self._view.prefills if state.slo.next_deadline == inf or id(state) in late
        ]
        # Those who ask to be refused rather than served late end with this step.
        waiting = [
            state for state in plan.late if not state.block_ids and state.request.shed is not ShedMode.REJECT
        ]
        return running + waiting + left_over

    def _overdue(self, left_over: list[RequestState]) -> list[RequestState]:
        """Return the best effort that has waited for too long and is not begun by this plan either."""
        plan, backlog = self._plan, self._policy.backlog
        assert backlog is not None
        overdue = backlog.overdue(left_over, plan.now)
        if not overdue:
            return []
        begun = {id(admission.state) for admission in plan.admissions}
        return [state for state in overdue if id(state) not in begun]

    def _make_room(self, jobs: list[PromptJob], best_effort: list[RequestState]) -> None:
        """Preempt requests without objectives for the first prompt that lacks a slot or blocks.

        Only once it cannot wait for another step: until then somebody may end, and what is preempted is
        computed again in time that others lack. For the same reason nobody is preempted who has missed an
        objective already: under overload that would be work done twice for each prompt that is saved. Nobody
        is preempted twice for this, so that everybody ends, and nobody for a prompt that is left behind.
        """
        plan, policy = self._plan, self._policy
        first = next((job for job in jobs if not job.state.block_ids), None)
        if first is None:
            return
        running = [*self._view.best_effort_decodes, *(state for state in best_effort if state.block_ids)]
        pool = [state for state in running if not (state.slo.has_objective or state.num_preemptions)]
        if not pool or (plan.num_slots_left > 0 and plan.has_blocks_for(first.state, RESERVATION)):
            return
        decodes = self._view.decode_shape()
        limit = policy.limit(self._view, self._work.of(decodes), plan.now)
        room = policy.room(decodes, limit, jobs)
        in_turn, num_left_behind = policy.in_turn(jobs, room, plan.now)
        kept = in_turn[: len(in_turn) - num_left_behind]
        first = next((job for job in kept if not job.state.block_ids), None)
        if first is None or not policy.must_begin(first, room, plan.now):
            return
        self._victims().make_room(first.state, pool)

    def _can_admit_all(self, jobs: list[PromptJob]) -> bool:
        """Whether there are slots and memory for all prompts: who sits out keeps its own for longer."""
        waiting = [job.state for job in jobs if not job.state.block_ids]
        return len(waiting) <= self._plan.num_slots_left and self._plan.has_blocks_for_all(waiting)

    def _split(self, rows: list[RequestState], room: Room) -> tuple[list[RequestState], list[RequestState]]:
        """Return the rows that decode and those that may sit out.

        Of streams only those with the tightest objective may: a stream that went at a slower pace of its own
        would hold its slot and memory for that much longer.
        """
        view, may_sit_out = self._view, self._policy.may_sit_out
        end = self._plan.now + room.length
        away = {
            id(state)
            for state, due in zip(view.streams, view.deadlines, strict=True)
            if state.slo.tbt <= view.tightest and may_sit_out(state, due, end)
        }
        staying = [state for state in rows if id(state) not in away]
        return staying, [state for state in rows if id(state) in away]

    def _fit_decodes(self, limit: float) -> tuple[list[RequestState], BatchShape]:
        """Return the rows that fit a limit, those with the most slack left out, and their shape."""
        view, plan = self._view, self._plan
        by_due = [state for _, state in sorted(zip(view.deadlines, view.streams, strict=True), key=_due)]
        rows = self._not_victims([*by_due, *view.best_effort_decodes])[: plan.max_rows]
        low, high = 1, len(rows)
        while low < high:
            middle = (low + high + 1) // 2
            if self._work.of(decode_shape(rows[:middle])) <= limit:
                low = middle
            else:
                high = middle - 1
        return rows[:low], decode_shape(rows[:low])

    def _decode(self, rows: list[RequestState], shape: BatchShape) -> BatchShape:
        """Give each request one token; where blocks run short, preempt. Returns the shape."""
        plan = self._plan
        num_growing = plan.num_growing(rows)
        if num_growing > plan.num_blocks_left:
            plan.ran_out_of_blocks = True
            rows = self._victims().make_blocks_free(rows)
            shape = decode_shape(rows)
            num_growing = plan.num_growing(rows)
        plan.num_blocks_left -= num_growing
        plan.decodes += rows
        plan.num_tokens_left -= len(rows)
        return shape

    def _victims(self) -> Victims:
        return Victims(self._plan, self._work, self._policy.tracker.worth)

    def _not_victims(self, states: list[RequestState]) -> list[RequestState]:
        if not self._plan.victims:
            return states
        victims = {id(state) for state in self._plan.victims}
        return [state for state in states if id(state) not in victims]


def _due(pair: tuple[float, RequestState]) -> float:
    return pair[0]
