"""The scheduler of one replica: which request runs which tokens in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from onbeat.core.errors import ConfigError, InvalidRequest
from onbeat.core.request import FinishReason, Request, RequestOutput
from onbeat.core.slo import ShedMode
from onbeat.core.step import (
    AdmittedRequest,
    BatchShape,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
    SchedulerState,
)
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.config import SchedulerConfig
from onbeat.scheduler.replica.checks import check_queue, check_request
from onbeat.scheduler.replica.delivery import deliver, last_output
from onbeat.scheduler.replica.kv_manager import KVCacheManager
from onbeat.scheduler.replica.parts import QUEUE_ORDERS
from onbeat.scheduler.replica.policies import make_policy
from onbeat.scheduler.replica.queues import RunningList, WaitingQueue
from onbeat.scheduler.replica.repeats import advance_repeats, count_repeats
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.slo.deadlines import (
    BEST_EFFORT_RANK,
    give_up,
    note_delivery,
    queue_rank,
    set_deadlines,
)
from onbeat.scheduler.replica.speculation.choice import make_drafting
from onbeat.scheduler.replica.step_plan import PlannedAdmission, StepPlan
from onbeat.scheduler.replica.verification import (
    SampledRow,
    advance_with_drafts,
    correct_shape,
    sampled_rows,
    take_back_rejected,
)

_new_row = tuple.__new__
"""Makes a named tuple without the call of its own constructor, of which a step would make hundreds."""


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
        self.kv = KVCacheManager(
            config.num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching
        )
        self.running = RunningList()
        self.waiting = WaitingQueue()
        self.num_preemptions = 0
        self.num_relegated = 0
        """Requests so far that have become best effort because their first token could not be in time."""
        self.num_prefix_queries = 0
        """Prompt tokens looked up in the prefix cache so far."""
        self.num_prefix_hits = 0
        """Of these, tokens found."""
        self._policy = make_policy(config)
        if self._policy.needs_step_time and step_time_model is None:
            raise ConfigError(
                f"policy {config.policy!r} plans with predicted step times, but nothing predicts them; "
                "give a step-time model, or use a policy with a token budget (sarathi)"
            )
        self._promises = self._policy.promises
        quantile = None if self._promises is None else self._promises.tuning.quantile
        self._drafting = make_drafting(config.speculation, step_time_model, quantile=quantile)
        self._order = self._policy.order or QUEUE_ORDERS[config.scheduling_policy]()
        self._states: dict[str, RequestState] = {}
        self._released_ids: list[str] = []
        self._pulls: list[AdmittedRequest] = []
        self._unannounced: dict[str, AdmittedRequest] = {}
        """Admitted requests that no step has told the model runner of: their KV is on its way."""
        self._kept_block_ids: dict[str, list[int]] = {}
        """Blocks of requests that have ended but whose KV is to be fetched."""
        self._in_flight: deque[tuple[int, list[RequestState], float]] = deque()
        """(step id, rows, when it was planned)"""
        self._expired: list[RequestOutput] = []
        self._last_update = float("-inf")
        self._busy_until = float("-inf")
        """When the last planned step is expected to end; kept for policies that ask."""
        self._num_added = 0
        self._num_steps = 0

    @property
    def num_unfinished(self) -> int:
        """Requests that are waiting or running and will deliver more."""
        return len(self._states)

    def add(self, request: Request, now: float | None = None) -> None:
        """Queue a request.

        Parameters
        ----------
        now : seconds; None is the request's arrival.

        Raises
        ------
        InvalidRequest : the id is in use, or the prompt is empty.
        PromptTooLong : the request can never fit the context or the KV cache.
        Overloaded : as many requests or tokens wait as may (`max_num_queued_reqs`, `max_num_queued_tokens`).
        SLOUnattainable : it would miss its TTFT objective and asks to be refused then (`Request.shed`).
        """
        if request.request_id in self._states:
            raise InvalidRequest(
                f"request id {request.request_id!r} is in use; use a new one", param="request_id"
            )
        check_request(request, self.config, holds_finished=self._policy.release.holds_finished)
        check_queue(request, self.config, num_requests=len(self.waiting), num_tokens=self._num_queued_tokens)
        sort_key = (self._order.rank(request), request.arrival, self._num_added)
        self._num_added += 1
        state = RequestState(request, sort_key=sort_key, max_model_len=self.config.max_model_len)
        if self._policy.keeps_deadlines:
            set_deadlines(state)
        if self._promises is not None:
            plan = self._new_plan(request.arrival if now is None else now)
            self._promises.on_arrival(state, plan, self._busy_until if self._in_flight else plan.now)
            state.sort_key = (queue_rank(state), *sort_key[1:])
        self._states[request.request_id] = state
        self.waiting.push(state)

    @property
    def _num_queued_tokens(self) -> int:
        if self.config.max_num_queued_tokens is None:
            return 0
        return sum(state.num_tokens for state in self.waiting)

    def take_expired(self) -> list[RequestOutput]:
        """Return the last outputs of requests that `schedule` gave up since the last call.

        Their TTFT deadline passed in the queue, and they had asked not to be served late.
        """
        expired, self._expired = self._expired, []
        return expired

    def state(self) -> SchedulerState | None:
        """Return how queues and promises stand; None where the policy keeps no deadlines."""
        return None if self._promises is None else self._promises.report(self.num_relegated)

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Drop requests and free their blocks; unknown or finished ids are ignored."""
        outputs = []
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is not None:
                outputs.append(last_output(state, FinishReason.ABORT))
                self._drop(state)
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
        plan = self._compose(start)
        if plan.is_empty and plan.lost:
            plan = self._compose(start)  # they may run as best effort
        if plan.is_empty and not (plan.preempted or plan.pulls):
            return None
        # Looked at before the commit, which takes those that are preempted out of the running list.
        may_repeat = repeats and plan.is_repeatable and not (plan.admissions or plan.preempted)
        return self._commit(plan, now, may_repeat=may_repeat)

    def update(
        self, scheduled: SchedulerOutput, result: ModelRunnerOutput, now: float
    ) -> list[RequestOutput]:
        """Take the tokens of the oldest step in flight; return what each request got.

        Parameters
        ----------
        scheduled : what `schedule` returned.
        result : one list of tokens for each row that samples: one token, or one for each time that the step
            was run where it was run several times.
        now : when the step, or its last run, ended; seconds.
        """
        step_id, states, planned_at = self._in_flight.popleft()
        assert step_id == scheduled.step_id, "steps are updated in the order in which they were scheduled"
        self._take_back(states, scheduled, result)
        correct_shape(scheduled, result)
        if self.step_time_model is not None and scheduled.max_repeats == 1:
            # Steps wait for one another, save for those of a pipeline, which run side by side.
            is_pipeline = self.config.num_micro_batches > 1
            seconds = now - (planned_at if is_pipeline else max(planned_at, self._last_update))
            self.step_time_model.observe(scheduled.shape, seconds)
        self._last_update = now
        keeps_deadlines = self._policy.keeps_deadlines
        outputs: list[RequestOutput] = []
        failed = result.failed or {}
        sampled = sampled_rows(result)
        for state, row in zip(states, scheduled.rows, strict=True):
            _, num_computed, num_new, _, samples, _ = row
            if samples:
                got = next(sampled)
            status = state.status
            if status is RequestStatus.FINISHED or status is RequestStatus.PADDING:
                continue
            if failed and state.request_id in failed:
                outputs.append(self._fail(state, failed[state.request_id]))
                continue
            # Not those of a row planned before a preemption: they belong to others by now.
            holds_blocks = status is RequestStatus.RUNNING and state.admitted_step_id <= step_id
            finished = False
            if samples:
                output = self._deliver(state, row, got, holds_blocks=holds_blocks)
                outputs.append(output)
                finished = output.finish_reason is not None
                if keeps_deadlines:
                    self._note_delivery(state, output, now)
            # All but the last token sampled; a row planned behind drafts does not know its place itself.
            num_valid = state.num_tokens - 1 if samples else num_computed + num_new
            if holds_blocks and num_valid >= state.num_tokens_to_register:
                self.kv.register_full_blocks(state, num_valid)
            if finished:
                self._finish(state)
        self._release_batch()
        return outputs

    def take_pulls(self) -> list[AdmittedRequest]:
        """Return the requests admitted since the last call whose KV is to be fetched into their blocks now.

        Each of them waits for its `receive_kv`. It can be preempted or aborted meanwhile, so a transfer asks
        before it writes into blocks.
        """
        pulls, self._pulls = self._pulls, []
        return pulls

    def receive_kv(self, request_id: str) -> None:
        """Let a request run whose external tokens are in its blocks.

        Without effect on one that has ended. One that was preempted meanwhile computes all its tokens itself.
        """
        state = self._states.get(request_id)
        if state is None:
            return
        state.is_in_flight = False
        if state.num_external_tokens and state.status is RequestStatus.RUNNING:
            state.num_computed_tokens = state.num_external_tokens
        state.num_external_tokens = 0

    def release_kv(self, request_id: str) -> None:
        """Free the blocks of an ended request that kept them; an id without any is ignored."""
        self.kv.pool.release(self._kept_block_ids.pop(request_id, []))

    def check_invariants(self) -> None:
        """Raise AssertionError unless queues and blocks agree. Cheap enough for every idle moment."""
        self.kv.pool.check_invariants()
        held = [block_id for state in self.running for block_id in state.block_ids]
        held += [block_id for block_ids in self._kept_block_ids.values() for block_id in block_ids]
        assert len(set(held)) == self.kv.pool.num_used_blocks, "a block is held by no running request"
        assert list(self.running) == sorted(self.running, key=lambda state: state.sort_key)
        assert len(self.running) <= self.config.max_num_seqs
        waiting = list(self.waiting)
        assert waiting == sorted(waiting, key=lambda state: state.sort_key)
        assert all(state.status is RequestStatus.WAITING and not state.block_ids for state in waiting)
        num_padding = sum(state.status is RequestStatus.PADDING for state in self.running)
        assert len(self._states) == len(waiting) + len(self.running) - num_padding, "a request is lost"

    # --- commit ---------------------------------------------------------------------------------------

    def _compose(self, now: float) -> StepPlan:
        """Plan a step; the requests that it finds lost are best effort from now on."""
        plan = self._new_plan(now)
        self._policy.composer.compose(plan, self._order)
        self._commit_lost(plan.lost)
        if self._drafting is not None:
            plan.is_repeatable = False
            if plan.decodes:
                self._drafting.plan(plan)
        return plan

    def _new_plan(self, now: float) -> StepPlan:
        return StepPlan(
            config=self.config,
            kv=self.kv,
            running=self.running,
            waiting=self.waiting,
            now=now,
            model=self.step_time_model,
        )

    def _commit(self, plan: StepPlan, now: float, *, may_repeat: bool) -> SchedulerOutput | None:
        """Carry out a plan: the only place where planning changes queues and blocks."""
        self.waiting.take_all([admission.state for admission in (*plan.admissions, *plan.pulls)])
        for state in plan.preempted:
            self._preempt(state, now)
        # Before any allocation: an eviction must not take a prefix that this step has counted on.
        for admission in (*plan.admissions, *plan.pulls):
            self.kv.pool.hold(admission.cached_block_ids)
        if plan.is_empty:
            self._commit_pulls(plan, now)
            return None
        step_id = self._num_steps
        self._num_steps += 1
        shape = BatchShape()
        rows, states, admitted = self._commit_rows(plan, shape, now, step_id)
        self._commit_pulls(plan, now)
        released_ids, self._released_ids = tuple(self._released_ids), []
        self._in_flight.append((step_id, states, now))
        if self.config.num_micro_batches > 1:
            for state in states:
                state.is_in_flight = True
        if (
            self._promises is not None
            and self.step_time_model is not None
            and self.config.num_micro_batches == 1
        ):
            self._busy_until = plan.now + self.step_time_model.step_time(shape)
        max_repeats = 1
        if may_repeat and len(self._in_flight) == 1:
            max_repeats = count_repeats(plan.decodes, shape, self.kv)
        return SchedulerOutput(
            step_id,
            tuple(rows),
            tuple(admitted),
            released_ids,
            shape,
            max_repeats,
            plan.budget,
            plan.budget_request_id,
            plan.expected_tokens,
        )

    def _commit_rows(
        self, plan: StepPlan, shape: BatchShape, now: float, step_id: int
    ) -> tuple[list[ScheduledRequest], list[RequestState], list[AdmittedRequest]]:
        """Advance the requests of a step; return their rows, and whom the model runner must hear of."""
        admitted = list(self._unannounced.values())
        self._unannounced.clear()
        states = plan.decodes.copy()
        if plan.num_drafts:
            rows = advance_with_drafts(states, plan.num_drafts, self.kv, shape)
            shape.num_draft_passes = plan.num_draft_passes
        else:
            rows = self._commit_decodes(states, shape)
        for state, num_new in plan.chunks:
            rows.append(self._advance(state, num_new, shape))
            states.append(state)
        for admission in plan.admissions:
            state = admission.state
            admitted.append(self._admit(admission, now, step_id))
            rows.append(self._advance(state, admission.num_new_tokens, shape))
            states.append(state)
        return rows, states, admitted

    def _commit_lost(self, states: list[RequestState]) -> None:
        """Serve requests as best effort, or not at all, whose first token cannot be in time."""
        for state in states:
            is_waiting = state.status is RequestStatus.WAITING
            if is_waiting and state.request.shed is ShedMode.REJECT and not state.num_output_tokens:
                self._expire(state)
                continue
            give_up(state)
            self.num_relegated += 1
            if is_waiting:
                self.waiting.remove(state)
                _rank_last(state)
                self.waiting.push(state)

    def _expire(self, state: RequestState) -> None:
        """End a request that its caller does not want served late."""
        output = last_output(state, FinishReason.EXPIRED)
        slo = state.request.slo
        assert slo is not None
        output.predicted_ttft = state.predicted_ttft
        output.error = (
            "the first token can no longer come within the objective "
            f"({(state.ttft_deadline - state.request.arrival) * 1e3:g} ms after arrival)"
        )
        if self._promises is not None:
            self._promises.book.reject("deadline_exceeded")
        self._drop(state)
        self._expired.append(output)

    def _admit(self, admission: PlannedAdmission, now: float, step_id: int) -> AdmittedRequest:
        """Take a waiting request into the batch and give it its blocks."""
        state = admission.state
        self.kv.admit(state, admission.cached_block_ids)
        self.kv.grow(state, admission.num_reserved_tokens)
        self._count_admission(state, now, step_id)
        self.running.insert_sorted(state)
        return AdmittedRequest(state.request, tuple(state.output_token_ids), tuple(state.block_ids))

    def _commit_pulls(self, plan: StepPlan, now: float) -> None:
        """Admit requests whose KV has yet to come: they hold blocks, but no step runs them."""
        for admission in plan.pulls:
            admitted = self._admit(admission, now, self._num_steps)
            admission.state.is_in_flight = True
            self._pulls.append(admitted)
            self._unannounced[admission.state.request_id] = admitted

    def _commit_decodes(self, decodes: list[RequestState], shape: BatchShape) -> list[ScheduledRequest]:
        """Advance requests by a token. They dominate a step, so their sums are kept in local names."""
        rows: list[ScheduledRequest] = []
        context = num_sampling = 0
        for state in decodes:
            num_computed = state.num_computed_tokens
            context += num_computed
            block_ids: tuple[int, ...] = ()
            if num_computed >= state.num_allocated_tokens:
                block_ids = self.kv.grow(state, num_computed + 1)
            samples = False
            if state.status is RequestStatus.RUNNING:  # a padding row runs its last token again and again
                samples = num_computed + 1 == state.num_tokens + state.num_in_flight_tokens
                state.num_computed_tokens = num_computed + 1
                state.num_in_flight_tokens += samples
                num_sampling += samples
            rows.append(
                _new_row(ScheduledRequest, (state.request_id, num_computed, 1, block_ids, samples, 0))
            )
        num_decodes = len(decodes)
        shape.num_new_tokens += num_decodes
        shape.num_sequences += num_decodes
        shape.num_decodes += num_decodes
        shape.decode_context_tokens += context + num_decodes
        shape.num_lm_head_rows += num_sampling
        return rows

    def _advance(self, state: RequestState, num_new: int, shape: BatchShape) -> ScheduledRequest:
        """Plan a chunk or a new request's row; the blocks were reserved at admission, so it takes none."""
        num_computed = state.num_computed_tokens
        samples = num_computed + num_new == state.num_tokens + state.num_in_flight_tokens
        state.num_computed_tokens = num_computed + num_new
        state.num_in_flight_tokens += samples
        shape.add(num_computed, num_new, samples=samples)
        return ScheduledRequest(state.request_id, num_computed, num_new, (), samples)

    def _take_back(
        self, states: list[RequestState], scheduled: SchedulerOutput, result: ModelRunnerOutput
    ) -> None:
        """Bring rows up to date with how often their step was run."""
        if self.config.num_micro_batches > 1:
            for state in states:
                state.is_in_flight = False
        if scheduled.max_repeats == 1:
            return
        num_more = len(result.sampled_token_ids[0]) - 1
        assert 0 <= num_more < scheduled.max_repeats, "the step was run too often"
        if num_more:
            advance_repeats(states, num_more, self.kv)

    def _count_admission(self, state: RequestState, now: float, step_id: int) -> None:
        state.status = RequestStatus.RUNNING
        state.admitted_step_id = step_id
        if state.scheduled_time < 0:
            state.scheduled_time = now
            state.num_cached_tokens = state.num_computed_tokens
            self.num_prefix_queries += state.num_prompt_tokens
            self.num_prefix_hits += state.num_cached_tokens
            if self._promises is not None:
                self._promises.book.on_start(state)

    def _preempt(self, state: RequestState, now: float) -> None:
        """Take a request out of the batch; its tokens are computed again later (recompute preemption)."""
        state.last_preemption = now
        if state.is_best_effort:
            _rank_last(state)
        assert state.status is RequestStatus.RUNNING
        self.running.remove(state)
        self.kv.free(state)
        state.status = RequestStatus.WAITING
        state.num_preemptions += 1
        self.num_preemptions += 1
        self._leave_runner(state)
        self.waiting.push(state)

    # --- results --------------------------------------------------------------------------------------

    def _deliver(
        self, state: RequestState, row: ScheduledRequest, got: SampledRow, *, holds_blocks: bool
    ) -> RequestOutput:
        """Give a request the tokens of its row."""
        token_ids, logprobs, num_drafted, num_available = got
        output = deliver(state, token_ids, logprobs, row.num_draft_tokens)
        if self._drafting is not None:
            num_accepted = len(token_ids) - 1 if num_drafted else 0
            state.num_drafted_tokens += num_drafted
            state.num_accepted_tokens += min(num_accepted, len(output.new_token_ids))  # not beyond its end
            output.num_drafted_tokens = state.num_drafted_tokens
            output.num_accepted_tokens = state.num_accepted_tokens
            if holds_blocks and row.num_draft_tokens:
                take_back_rejected(state, row.num_draft_tokens, len(token_ids))
            self._drafting.observe(
                state, num_drafted=num_drafted, num_accepted=num_accepted, num_available=num_available
            )
        return output

    def _note_delivery(self, state: RequestState, output: RequestOutput, now: float) -> None:
        """Hold a delivery against its deadline, and tell the caller what has become of the promise."""
        if self._promises is None:
            note_delivery(state, now, self.config.slo_mode)
            return
        self._promises.book.on_delivery(state, len(output.new_token_ids), now, self.config.slo_mode)
        if state.is_best_effort:
            output.is_relegated = True
        if state.predicted_ttft is not None:
            output.predicted_ttft, state.predicted_ttft = state.predicted_ttft, None

    def _fail(self, state: RequestState, message: str) -> RequestOutput:
        """End one request with an error; the others of its step go on, and nobody reuses its KV."""
        self.kv.pool.unregister(state.block_ids)
        output = last_output(state, FinishReason.ERROR)
        output.error = message
        self._drop(state)
        return output

    def _finish(self, state: RequestState) -> None:
        """End a request that has all its tokens."""
        if self._promises is not None:
            self._promises.book.on_finish(state)
        if self._policy.release.holds_finished and state.status is RequestStatus.RUNNING:
            state.status = RequestStatus.PADDING
            # A step in flight may have planned beyond the end: the padding row repeats the last known token.
            state.num_in_flight_tokens = state.num_in_flight_drafts = 0
            state.num_computed_tokens = state.num_tokens - 1
            del self._states[state.request_id]
        else:
            self._drop(state, keeps_kv=state.request.keeps_kv)

    def _drop(self, state: RequestState, *, keeps_kv: bool = False) -> None:
        """Forget a request, wherever it is, and free what it holds, save for KV that is to be fetched."""
        if self._states.pop(state.request_id, None) is not None and self._promises is not None:
            self._promises.book.on_drop(state)
        if state.status is RequestStatus.WAITING:
            self.waiting.remove(state)
        else:
            self.running.remove(state)
            if keeps_kv:
                self._kept_block_ids[state.request_id], state.block_ids = state.block_ids, []
            self.kv.free(state)
            self._leave_runner(state)
        state.status = RequestStatus.FINISHED

    def _leave_runner(self, state: RequestState) -> None:
        """Tell the model runner with the next step to drop a request, unless it never heard of it."""
        if self._unannounced.pop(state.request_id, None) is None:
            self._released_ids.append(state.request_id)

    def _release_batch(self) -> None:
        for state in self._policy.release.releasable(self.running):
            self._drop(state)


def _rank_last(state: RequestState) -> None:
    """Let a request that is best effort wait behind all that have a deadline; not for one in a queue."""
    state.sort_key = (BEST_EFFORT_RANK, *state.sort_key[1:])
