"""The scheduler of one replica: which request runs which tokens in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from onbeat.core.errors import InvalidRequest
from onbeat.core.fleet import ReplicaLoad
from onbeat.core.request import FinishReason, Request, RequestOutput
from onbeat.core.step import (
    BatchShape,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
    SchedulerState,
)
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.config import SchedulerConfig
from onbeat.scheduler.replica.checks import check_queue, check_request, has_choice_in
from onbeat.scheduler.replica.delivery import last_output, note_deliveries
from onbeat.scheduler.replica.failures import ENDED, fail, has_run, let_go_of_sharers
from onbeat.scheduler.replica.handover import Handovers
from onbeat.scheduler.replica.load_report import LoadReporter
from onbeat.scheduler.replica.policies import make_policy
from onbeat.scheduler.replica.relegation import Relegation
from onbeat.scheduler.replica.repeats import advance_repeats, count_repeats
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.request_table import RequestTable
from onbeat.scheduler.replica.slo.deadlines import SLOState
from onbeat.scheduler.replica.speculation.drafting import make_drafting
from onbeat.scheduler.replica.step_feedback import StepFeedback
from onbeat.scheduler.replica.step_plan import StepPlan
from onbeat.scheduler.replica.step_rows import StepInFlight, commit_rows
from onbeat.scheduler.replica.verification import (
    SampledRow,
    correct_shape,
    new_tuple,
    sampled_rows,
    take_back_rejected,
)


class Scheduler:
    """Plans steps and takes their results; pure, so that a live engine and a simulator run the same object.

    `schedule(now)` may be called again before the last step's `update`: such a step plans with tokens that
    are still in flight. Steps are updated in the order in which they were scheduled.

    Parameters
    ----------
    config : limits and the policy's name.
    step_time_model : told of every step's time; None where nobody predicts.
    """

    def __init__(self, config: SchedulerConfig, step_time_model: StepTimeModel | None = None) -> None:
        self.config = config
        self.step_time_model = step_time_model
        self._policy = make_policy(config, step_time_model)
        self._slo = self._policy.slo
        self._on_deliveries = note_deliveries if self._slo is None else self._slo.tracker.on_deliveries
        """Holds deliveries against their deadlines."""
        self._quantile = None if self._slo is None else self._slo.quantile
        """Of step times, to plan with; None is the mean."""
        self._drafting = make_drafting(config.speculation, step_time_model, quantile=self._quantile)
        tracker = None if self._slo is None else self._slo.tracker
        self._table = RequestTable(config, tracker)
        self._states = self._table.states
        self.kv, self.running, self.waiting = self._table.kv, self._table.running, self._table.waiting
        self._relegation = Relegation(self._table, self._slo)
        # Steps wait for one another, save for those of a pipeline.
        self._feedback = StepFeedback(
            step_time_model,
            None if self._slo is None else self._slo.rules,
            run_side_by_side=config.num_micro_batches > 1,
        )
        self._in_flight: deque[StepInFlight] = deque()
        self.handover = Handovers(
            self._table,
            self._policy,
            self._in_flight,
            accept=self._accept,
            release_batch=self._release_batch,
        )
        """What takes KV, and requests with theirs, to other replicas and from them."""
        self._last_plan = 0.0
        """When the last planned step starts."""
        self._busy_until = float("-inf")
        """When the last planned step is expected to end; kept for policies that ask."""
        self._num_added = 0
        self._num_taken = 0
        self._load_reporter: LoadReporter | None = None
        self._num_steps = 0

    @property
    def num_unfinished(self) -> int:
        """Requests that are waiting or running and will deliver more."""
        return len(self._states)

    @property
    def num_preemptions(self) -> int:
        return self._table.num_preemptions

    @property
    def num_relegated(self) -> int:
        """Requests so far that have become best effort because their first token could not be in time."""
        return self._relegation.num_relegated

    @property
    def num_prefix_queries(self) -> int:
        """Prompt tokens looked up in the prefix cache so far."""
        return self._table.num_prefix_queries

    @property
    def num_prefix_hits(self) -> int:
        """Of these, tokens found."""
        return self._table.num_prefix_hits

    def add(self, request: Request, now: float | None = None) -> None:
        """Queue a request.

        Parameters
        ----------
        now : seconds; None is the request's arrival.

        Raises
        ------
        InvalidRequest : the id is in use, the prompt is empty, it is resumed with its whole answer, it comes
            with KV, or its choices are more than may run and wait.
        PromptTooLong : the request can never fit the context or the KV cache.
        Overloaded : as many requests or tokens wait as may (`max_num_queued_reqs`, `max_num_queued_tokens`),
            or it would have to wait for too long (`max_queue_seconds`).
        SLOUnattainable : it would miss its TTFT objective and asks to be refused then (`Request.shed`).
        """
        self._num_taken += 1
        self._check(request)
        if request.num_external_tokens:
            raise InvalidRequest(
                f"{request.num_external_tokens} tokens of the request have their KV elsewhere; it is to be "
                "adopted with them, or sent without",
                param="num_external_tokens",
            )
        if not request.resumed_token_ids and not has_choice_in(self._states.values(), request):
            check_queue(
                request,
                self.config,
                num_running=len(self.running),
                num_waiting=len(self.waiting),
                num_tokens=self.waiting.num_prompt_tokens,
            )
        now = request.arrival if now is None else now
        state = self._new_state(request, now)
        if self._slo is not None:
            plan = self._new_plan(now)
            self._slo.on_arrival(state, plan, self._busy_until if self._in_flight else plan.now)
            self._relegation.on_arrival(state)
        self._table.add(state)

    def take_expired(self) -> list[RequestOutput]:
        """Return the last outputs of requests that `schedule` gave up since the last call.

        Their TTFT deadline passed in the queue, and they had asked not to be served late, or too many wait
        already that are.
        """
        return self._relegation.take_expired()

    def state(self) -> SchedulerState | None:
        """Return how queues and objectives stand; None where the policy keeps no deadlines."""
        if self._slo is None:
            return None
        now = max(self._last_plan, self._busy_until if self._in_flight else self._feedback.last_end)
        return self._slo.report(self._new_plan(now), self.num_relegated)

    def load(self, now: float, *, busy: float = 0.0, num_ended: int = 0) -> ReplicaLoad:
        """Return how the replica stands, for whoever shares requests out. It changes no plan.

        Parameters
        ----------
        busy : seconds from now until the steps under way are expected to end.
        num_ended : how often the step under way, if it is run several times, has ended so far.
        """
        if self._load_reporter is None:
            self._load_reporter = LoadReporter(self.config, self._policy, self._table, self.step_time_model)
        return self._load_reporter.take(
            now,
            num_taken=self._num_taken,
            busy=busy,
            num_ended=num_ended,
            num_kept_slots=self.handover.num_slots_kept,
        )

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Drop requests and free their blocks; unknown or finished ids are ignored."""
        outputs = []
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is not None:
                outputs.append(last_output(state, FinishReason.ABORT))
                self._table.drop(state)
            elif (state := self.handover.free(request_id)) is not None:
                outputs.append(last_output(state, FinishReason.ABORT))
        self._release_batch()  # it may have been the last that kept its batch together
        return outputs

    def schedule(self, now: float, *, repeats: bool = False) -> SchedulerOutput | None:
        """Plan the next step, or return None where nothing can run (yet).

        Parameters
        ----------
        now : seconds.
        repeats : look how often the step may be run as it is (`SchedulerOutput.max_repeats`). For those who
            know that no request ends before its `max_tokens` and nothing arrives meanwhile.
        """
        if not self.running and not self.waiting:
            return None
        start = max(now, self._busy_until) if self._in_flight else now
        self._last_plan = start
        plan = self._compose(start, repeats=repeats)
        if plan.is_empty and not (plan.preempted or plan.late or plan.overdue):
            return None
        return self._commit(plan, now)

    def run_again(self, scheduled: SchedulerOutput, now: float) -> bool:
        """Hear that a step with a `repeat_limit` was run once more; return whether to run it again.

        If so, its shape is that of the next run.

        Parameters
        ----------
        now : when that run ended, seconds.
        """
        model, shape = self.step_time_model, scheduled.shape
        assert model is not None
        self._feedback.observe(shape, self._in_flight[0].planned_at, (now,), is_told_again=True)
        num_rows = shape.num_lm_head_rows
        shape.decode_context_tokens += num_rows
        if model.step_time(shape, self._quantile) <= scheduled.repeat_limit:
            return True
        shape.decode_context_tokens -= num_rows
        return False

    def update(
        self,
        scheduled: SchedulerOutput,
        result: ModelRunnerOutput,
        now: float,
        ends: Sequence[float] | None = None,
        *,
        goes_on: bool = False,
    ) -> list[RequestOutput]:
        """Take the tokens of the oldest step in flight; return what each request got.

        Parameters
        ----------
        scheduled : what `schedule` returned; its shape is that of the last run.
        result : one list of tokens for each row that samples: one token, or one for each time that the step
            was run where it was run several times.
        now : when the step, or its last run, ended; seconds.
        ends : when each run ended, where it was run several times.
        goes_on : whether it is under way once more, as it would be if it were planned again now. It stays in
            flight then.
        """
        step_id, states, _, planned_at, _ = self._in_flight[0] if goes_on else self._in_flight.popleft()
        assert step_id == scheduled.step_id, "steps are updated in the order in which they were scheduled"
        self._take_back(states, scheduled, result, goes_on=goes_on)
        correct_shape(scheduled, result)
        failed = result.failed or {}
        outputs = let_go_of_sharers(states, scheduled, failed, self._table) if failed else []
        self._feedback.observe(
            scheduled.shape,
            planned_at,
            (now,) if ends is None else ends,
            has_run=not failed or has_run(states, failed),
        )
        keeps_deadlines, drafting = self._policy.known.keeps_deadlines, self._drafting
        delivered: list[tuple[RequestState, RequestOutput]] = []
        run = ends if ends is not None and len(ends) > 1 else None
        sampled = sampled_rows(result)
        running = RequestStatus.RUNNING  # to look a member up takes as long as a call
        for state, row in zip(states, scheduled.rows, strict=True):
            samples = row.samples
            if samples:
                got = next(sampled)
            is_running = state.status is running
            if not is_running and state.status in ENDED:
                continue
            if failed and state.request_id in failed:
                outputs.append(fail(state, failed[state.request_id], self._table))
                continue
            # Not those of a row planned before a preemption: they belong to others by now.
            holds_blocks = is_running and state.admitted_step_id <= step_id
            finished = False
            if samples:
                output = state.deliver(got[0], got[1], row.num_draft_tokens)
                if drafting is not None:
                    self._note_drafts(state, row, output, got, holds_blocks=holds_blocks)
                outputs.append(output)
                finished = output.finish_reason is not None
                if keeps_deadlines:
                    delivered.append((state, output))
                # All but the last token sampled; a row planned behind drafts does not know its place itself.
                num_valid = state.num_tokens - 1
            else:
                num_valid = row.num_computed_tokens + row.num_new_tokens
            if holds_blocks and num_valid >= state.num_tokens_to_register:
                self.kv.register_full_blocks(state, num_valid)
            if finished:
                self._finish(state)
        self._on_deliveries(delivered, now, run)
        self._settle(scheduled.shape, now, goes_on=goes_on)
        return outputs

    def check_invariants(self) -> None:
        """Raise AssertionError unless queues and blocks agree. Cheap enough for every idle moment."""
        self.handover.check_invariants()

    # --- commit ---------------------------------------------------------------------------------------

    def _compose(self, now: float, *, repeats: bool = False) -> StepPlan:
        """Plan a step. Nothing but the plan changes."""
        plan = self._new_plan(now)
        plan.is_repeatable = repeats
        self._policy.composer.compose(plan, self._policy.order)
        if self._drafting is not None:
            plan.is_repeatable = False
            if plan.decodes:
                self._drafting.plan(plan)
        return plan

    def _new_plan(self, now: float) -> StepPlan:
        plan = StepPlan(
            config=self.config,
            kv=self.kv,
            running=self.running,
            waiting=self.waiting,
            now=now,
        )
        plan.max_num_seqs -= self.handover.num_slots_kept
        return plan

    def _commit(self, plan: StepPlan, now: float) -> SchedulerOutput | None:
        """Carry out a plan: the only place where planning changes anything."""
        # Looked at before those that are preempted leave the running list.
        preempts = bool(plan.preempted)
        may_repeat = plan.is_repeatable and not (plan.admissions or preempts)
        self._policy.composer.commit(plan)
        if self._drafting is not None and plan.decodes:
            self._drafting.commit(plan)
        for request_id, num_hit_tokens in plan.num_hit_tokens.items():
            self._states[request_id].note_hits(num_hit_tokens)
        if plan.late or plan.overdue:
            self._relegation.commit(plan)
        if plan.admissions or preempts:
            self._table.make_room(plan)
        if plan.is_empty:
            return None
        step_id = self._num_steps
        self._num_steps += 1
        shape = BatchShape()
        rows, states, admitted = commit_rows(plan, self._table, shape, now=now, step_id=step_id)
        released_ids = self._table.take_released_ids()
        seconds = 0.0
        if self._slo is not None and self.step_time_model is not None and self.config.num_micro_batches == 1:
            seconds = self.step_time_model.step_time(shape)
            self._busy_until = plan.now + seconds
        in_flight = new_tuple(StepInFlight, (step_id, states, tuple(rows), now, seconds))
        self._in_flight.append(in_flight)
        if self.config.num_micro_batches > 1:
            self._table.mark_in_flight(states, is_in_flight=True)
        max_repeats = 1
        if may_repeat and len(self._in_flight) == 1:
            max_repeats = count_repeats(plan.decodes, shape, self.kv)
        return SchedulerOutput(
            step_id,
            in_flight.rows,
            tuple(admitted),
            released_ids,
            shape,
            max_repeats,
            plan.budget,
            plan.budget_request_id,
            plan.expected_tokens,
            plan.repeat_limit,
        )

    def _settle(self, shape: BatchShape, now: float, *, goes_on: bool) -> None:
        """Let go of who may leave after a step, unless it is under way once more, with a token more a row."""
        if not goes_on:
            if self._policy.release.holds_finished:
                self._release_batch()
            self.handover.settle()
            if self._in_flight:  # errors of predictions must not add up
                self._busy_until = now + sum([step.seconds for step in self._in_flight])
            return
        shape.decode_context_tokens += shape.num_lm_head_rows
        self._last_plan = now
        if self._slo is not None and self.step_time_model is not None:
            self._busy_until = now + self.step_time_model.step_time(shape)

    def _take_back(
        self,
        states: list[RequestState],
        scheduled: SchedulerOutput,
        result: ModelRunnerOutput,
        *,
        goes_on: bool,
    ) -> None:
        """Bring rows up to date with how often their step was run."""
        if self.config.num_micro_batches > 1:
            self._table.mark_in_flight(states, is_in_flight=False)
        if scheduled.max_repeats == 1:
            return
        num_more = len(result.sampled_token_ids[0]) - 1 + goes_on
        assert 0 <= num_more < scheduled.max_repeats, "the step was run too often"
        if num_more:
            self._num_steps += num_more
            advance_repeats(states, num_more, self.kv, num_in_flight=int(goes_on))

    def _accept(self, request: Request, now: float) -> RequestState:
        """Return a request that has been taken elsewhere; raises as `add` where it can never run here."""
        self._check(request)
        return self._new_state(request, now)

    def _check(self, request: Request) -> None:
        """Refuse a request that can never run here; see `add`."""
        request_id = request.request_id
        if request_id in self._states or self.handover.knows(request_id):
            raise InvalidRequest(f"request id {request_id!r} is in use; use a new one", param="request_id")
        check_request(request, self.config)

    def _new_state(self, request: Request, now: float) -> RequestState:
        """Return a new request with its place in the order and its deadlines."""
        sort_key = (self._policy.order.rank(request), request.arrival, self._num_added)
        self._num_added += 1
        limit = self.config.max_model_len
        state = RequestState(request, sort_key=sort_key, max_model_len=limit, slo=SLOState())
        if self._policy.known.keeps_deadlines:
            max_output_tokens = state.max_total_tokens - state.num_prompt_tokens
            state.slo.begin(request, self.config.slo_mode, now=now, max_output_tokens=max_output_tokens)
        return state

    # --- results --------------------------------------------------------------------------------------

    def _note_drafts(
        self,
        state: RequestState,
        row: ScheduledRequest,
        output: RequestOutput,
        got: SampledRow,
        *,
        holds_blocks: bool,
    ) -> None:
        """Count what became of the drafts of a row, and learn from it."""
        assert self._drafting is not None
        token_ids, _, num_drafted, num_available = got
        num_accepted = len(token_ids) - 1 if num_drafted else 0
        draft = state.draft
        draft.count(num_drafted, min(num_accepted, len(output.new_token_ids)))  # not beyond its end
        output.num_drafted_tokens, output.num_accepted_tokens = draft.num_drafted, draft.num_accepted
        if holds_blocks and row.num_draft_tokens:
            take_back_rejected(state, row.num_draft_tokens, len(token_ids))
        self._drafting.observe(
            state, num_drafted=num_drafted, num_accepted=num_accepted, num_available=num_available
        )

    def _finish(self, state: RequestState) -> None:
        """End a request that has all its tokens."""
        if self._slo is not None:
            self._slo.tracker.on_finish(state)
        if self._drafting is not None:
            self._drafting.finish(state)
        if self._policy.release.holds_finished and state.status is RequestStatus.RUNNING:
            self._table.pad(state)
        else:
            self._table.drop(state)

    def _release_batch(self) -> None:
        for state in self._policy.release.releasable(self.running):
            self._table.drop(state)
