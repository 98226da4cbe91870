"""The requests of one replica: which wait, which run, which KV blocks each has, and the rows of steps.

Requests are advanced by what they run, and taken back by drafts that were rejected. A request with drafts has
more tokens to catch up with: the step computes its last token and the drafts behind it, and samples after
each. What is planned before the result is known counts on all of them, so a later step may be planned
meanwhile; the result then takes back what was rejected.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable

from onbeat.core.step import AdmittedRequest, BatchShape, ScheduledRequest, new_tuple
from onbeat.scheduler.replica.kv import KVCacheManager
from onbeat.scheduler.replica.lockstep import DECODE, Lockstep
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.step_plan import PlannedAdmission, RunningList, StepPlan, WaitingQueue, sort_key
from onbeat.scheduler.replica.tracker import SLOTracker
from onbeat.scheduler.replica.windowed_kv import WindowedKV
from onbeat.scheduler.scheduler_config import SchedulerConfig


class RequestTable:
    """Moves requests from arrival to end, and knows what the model runner and transfers must hear of it.

    Parameters
    ----------
    config : limits.
    tracker : told of first runs and of ends; None where the policy keeps no deadlines.
    """

    def __init__(self, config: SchedulerConfig, tracker: SLOTracker | None) -> None:
        self.kv = KVCacheManager(config) if config.num_tables == 1 else WindowedKV(config)
        self.running = RunningList()
        self.waiting = WaitingQueue()
        self.states: dict[str, RequestState] = {}
        """Requests that wait or run and will deliver more, by id."""
        self.num_pooled = 0
        """Of these, requests with pooling."""
        self.num_guided = 0
        """Of these, requests under a grammar."""
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        """Prompt tokens looked up in the prefix cache so far."""
        self.num_prefix_hits = 0
        """Of these, tokens found."""
        self.makes_rows = True
        """Whether somebody reads the rows of decodes; else all have one in common, `DECODE`."""
        self.lockstep: Lockstep | None = None
        """Has requests that run and are not in `running`, where a simulation counts them at once."""
        self.max_num_seqs = config.max_num_seqs
        self.num_slots_kept = 0
        """Places of the batch that no waiting request may have; see `Handovers`."""
        self._tracker = tracker
        self.released_ids: list[str] = []
        self._just_preempted_ids: list[str] = []
        self.forgotten_ids: list[str] = []
        """Who left, was preempted (and left, too) and comes no more, until `take_left`."""
        self._preempted_ids: set[str] = set()
        """Requests that ran, wait, and of which the model runner may know more than a new one tells it."""
        self.unannounced: dict[str, AdmittedRequest] = {}
        """Requests that have joined with their KV, and that no step has told the model runner of."""

    # --- moves ----------------------------------------------------------------------------------------

    def add(self, state: RequestState) -> None:
        """Let a new request wait."""
        self.rank(state)
        self._remember(state)
        self.waiting.push(state)

    def dequeue_and_preempt(self, plan: StepPlan) -> None:
        """Take what a plan admits out of the waiting queue, and what it preempts out of the running list."""
        for admission in plan.admissions:
            self.waiting.remove(admission.state)
        if plan.victims or plan.num_kept < len(self.running):
            for state in plan.preempted:
                self.preempt(state)
        # Before any allocation: an eviction must not take a prefix that this step has counted on.
        for admission in plan.admissions:
            if admission.cached_block_ids or self.kv.num_tables > 1:
                self.kv.hold(admission.state, admission.cached_block_ids)

    def admit(self, admission: PlannedAdmission, now: float, step_id: int) -> AdmittedRequest:
        """Take a request that has left the queue into the batch and give it its blocks."""
        state = admission.state
        self._preempted_ids.discard(state.request_id)
        snapshot = None
        if self.kv.keeps_states:
            state.places_to_keep = self.kv.places_to_keep(state)
            if num_cached := len(admission.cached_block_ids):
                snapshot = self.kv.snapshots.use(state.block_hashes[num_cached - 1])
        self.kv.admit(state, admission.cached_block_ids)
        self.kv.grow(state, admission.num_reserved_tokens)
        is_first = state.admitted_step_id < 0
        state.status, state.admitted_step_id = RequestStatus.RUNNING, step_id
        if is_first:
            state.scheduled_time = now
            state.num_cached_tokens = min(state.num_computed_tokens, state.num_prompt_tokens)
            is_looked_up = self.kv.enable_prefix_caching and state.looks_up
            self.num_prefix_queries += state.num_prompt_tokens if is_looked_up else 0
            self.num_prefix_hits += state.num_cached_tokens
            if self._tracker is not None:
                num_new = state.num_tokens - state.num_cached_tokens
                self._tracker.tenants.on_leave(state.request.tenant, num_new)
        insort(self.running, state, key=sort_key)
        outputs, block_ids = tuple(state.output_token_ids), tuple(state.block_ids)
        return AdmittedRequest(state.request, outputs, block_ids, snapshot)

    def pad(self, state: RequestState) -> None:
        """Let a request that has all its tokens stay in the batch as a padding row, until it is dropped.

        It repeats its last token from now on, whatever a step in flight has planned beyond it.
        """
        state.status = RequestStatus.PADDING
        state.num_in_flight_tokens = state.num_in_flight_drafts = 0
        state.num_computed_tokens = state.num_tokens - 1
        self._forget(state)

    def drop(self, state: RequestState) -> None:
        """Forget a request that waits or runs, and free what it holds."""
        if state.request_id in self.states:
            self._forget(state)
            if self._tracker is not None:
                self._tracker.on_drop(state)
        if state.status is RequestStatus.WAITING:
            self.waiting.remove(state)
        elif state.status is not RequestStatus.ASIDE:
            self.running.remove(state)
            self.kv.free(state)
            self._leave_runner(state)
        if state.request_id in self._preempted_ids:
            self._preempted_ids.remove(state.request_id)
            self.forgotten_ids.append(state.request_id)
        state.status = RequestStatus.FINISHED

    def take_out(self, state: RequestState) -> None:
        """Take a request out of the batch with all that it holds; whoever asks keeps its slot free.

        The model runner does not hear of that where it keeps a state of it, which stays in its slot.
        """
        self.running.remove(state)
        self._forget(state)
        if not self.kv.keeps_states:
            self._leave_runner(state)
        state.status = RequestStatus.DETACHED
        state.draft.forget()

    def let_go(self, state: RequestState) -> None:
        """Forget a request that was taken out of the batch, and free what it holds."""
        self.kv.free(state)
        if self.kv.keeps_states:
            self._leave_runner(state)
        state.status = RequestStatus.FINISHED

    def put_in(
        self, state: RequestState, step_id: int, *, is_back: bool = False, snapshot: int | None = None
    ) -> None:
        """Let a request with its KV join the batch; its slot is free.

        Parameters
        ----------
        step_id : of the next step, with which the model runner hears of it.
        is_back : whether it was taken out of this batch.
        snapshot : where its state lies, of a model that keeps states.
        """
        state.status = RequestStatus.RUNNING
        state.admitted_step_id = step_id
        self._remember(state)
        insort(self.running, state, key=sort_key)
        if not is_back or not self.kv.keeps_states:
            outputs, block_ids = tuple(state.output_token_ids), tuple(state.block_ids)
            admitted = AdmittedRequest(state.request, outputs, block_ids, snapshot)
            self.unannounced[state.request_id] = admitted
            self.kv.tell_pages(state)

    # --- the rows of a step: these loops run for each row of each step, and are written flat for it -----

    def commit_rows(
        self, plan: StepPlan, *, now: float, step_id: int
    ) -> tuple[BatchShape, list[ScheduledRequest], list[RequestState], list[AdmittedRequest]]:
        """Advance the requests of a step, and admit those that join the batch with it.

        Parameters
        ----------
        now : when the step is planned, seconds.

        Returns
        -------
        What the step costs, its rows, the request of each, and whom the model runner must hear of: those who
        join, and those who have joined with their KV since the step before.
        """
        admitted = self._announced() if self.unannounced else []
        states, kv, running = plan.decodes.copy(), self.kv, RequestStatus.RUNNING
        rows: list[ScheduledRequest] = []
        num_sampling, num_decodes, makes_rows = 0, len(states), self.makes_rows
        context = num_decodes
        for state in states if not plan.num_drafts else ():
            num_computed = state.num_computed_tokens
            context += num_computed
            block_ids: tuple[int, ...] = ()
            if num_computed >= state.num_allocated_tokens:
                block_ids = kv.grow(state, num_computed + 1)
            samples = state.status is running  # a padding row runs its last token again
            if samples:
                state.num_computed_tokens = num_computed + 1
                state.num_in_flight_tokens += 1
                num_sampling += 1
            if makes_rows:
                fields = (state.request_id, num_computed, 1, block_ids, samples, 0)
                rows.append(new_tuple(ScheduledRequest, fields))
        if plan.num_drafts:
            rows, shape = self._draft_rows(plan)
        else:
            shape = BatchShape(num_decodes, num_decodes, num_decodes, 0, 0, 0, context, 0, num_sampling)
            rows = rows if makes_rows else [DECODE] * num_decodes
        chunks = plan.chunks.copy()
        for state, _ in chunks if kv.num_tables > 1 else ():
            kv.slide(state)
        for admission in plan.admissions:
            admitted.append(self.admit(admission, now, step_id))
            chunks.append((admission.state, admission.num_new_tokens))
        for state, num_new in chunks:
            num_computed = state.num_computed_tokens  # its blocks were reserved at its admission
            samples = num_computed + num_new == state.num_tokens + state.num_in_flight_tokens
            state.num_computed_tokens += num_new
            state.num_in_flight_tokens += samples
            shape.add(num_computed, num_new, samples=num_new if state.scores_prompt else samples)
            fields = (state.request_id, num_computed, num_new, (), samples, 0)
            rows.append(new_tuple(ScheduledRequest, fields))
            states.append(state)
        if self.num_guided or self.num_pooled:
            _mark_rows(states, rows, shape, step_id)
        return shape, rows, states, admitted

    def _announced(self) -> list[AdmittedRequest]:
        """Return those who have joined with their KV since the step before, of whom it hears now."""
        admitted = list(self.unannounced.values())
        self.unannounced.clear()
        for each in admitted:
            self.kv.snapshots.give_back(each.snapshot)
        return admitted

    def _draft_rows(self, plan: StepPlan) -> tuple[list[ScheduledRequest], BatchShape]:
        """Advance requests by a token and drafts; return their rows, none of a padding row, and the step."""
        rows: list[ScheduledRequest] = []
        shape = BatchShape(num_draft_passes=plan.num_draft_passes)
        for state, num in zip(plan.decodes, plan.num_drafts, strict=True):
            num_computed, num_new = state.num_computed_tokens, 1 + num
            shape.add_verify(num_computed, num)
            block_ids: tuple[int, ...] = ()
            if num_computed + num_new > state.num_allocated_tokens:
                block_ids = self.kv.grow(state, num_computed + num_new)
            samples = state.status is RequestStatus.RUNNING
            if samples:
                state.num_computed_tokens += num_new
                state.num_in_flight_tokens += num_new
                state.num_in_flight_drafts += num
            else:
                shape.num_lm_head_rows -= 1
            rows.append(ScheduledRequest(state.request_id, num_computed, num_new, block_ids, samples, num))
        for _, num_read, num_tokens in plan.catch_ups:
            shape.add_catch_up(num_read, num_tokens)
        return rows, shape

    # --- what others must hear of ---------------------------------------------------------------------

    def take_left(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Return who left, was preempted and comes no more, for the next step; see `SchedulerOutput`."""
        left = tuple(self.released_ids), tuple(self._just_preempted_ids), tuple(self.forgotten_ids)
        self.released_ids, self._just_preempted_ids, self.forgotten_ids = [], [], []
        return left

    def check_invariants(self, kept_block_ids: Iterable[int] = ()) -> None:
        """Raise AssertionError unless queues and blocks agree. Cheap enough for every idle moment.

        Parameters
        ----------
        kept_block_ids : held by others than running requests, one for each reference.
        """
        self.kv.pool.check_invariants()
        self.kv.snapshots.check_invariants()
        held = Counter(block_id for state in self.running for block_id in state.held_ids)
        held.update(kept_block_ids)
        self.kv.pool.check_references(held)
        assert list(self.running) == sorted(self.running, key=lambda state: state.sort_key)
        assert len(self.running) + self.num_slots_kept <= self.max_num_seqs, "a slot is given twice"
        waiting = list(self.waiting)
        assert waiting == sorted(waiting, key=lambda state: state.sort_key)
        assert all(state.status is RequestStatus.WAITING and not state.block_ids for state in waiting)
        num_padding = sum(state.status is RequestStatus.PADDING for state in self.running)
        num_aside = sum(state.status is RequestStatus.ASIDE for state in self.states.values())
        assert len(self.states) == len(waiting) + len(self.running) - num_padding + num_aside, (
            "a request is in neither queue"
        )
        num_pooled = sum(state.request.pooling is not None for state in self.states.values())
        assert num_pooled == self.num_pooled, "requests with pooling are miscounted"
        num_guided = sum(state.is_guided for state in self.states.values())
        assert num_guided == self.num_guided, "requests under a grammar are miscounted"

    def requeue(self, state: RequestState) -> None:
        """Give a waiting request the place in the queue that its deadline, or the loss of it, asks for."""
        self.waiting.remove(state)
        self.rank(state)
        self.waiting.push(state)

    def preempt(self, state: RequestState) -> None:
        """Take a request out of the batch; its tokens are computed again later (recompute preemption)."""
        assert state.status is RequestStatus.RUNNING
        state.plain_until = 0
        state.num_preemptions += 1
        self.num_preemptions += 1
        self.running.remove(state)
        self.kv.free(state)
        if self._leave_runner(state):
            self._preempted_ids.add(state.request_id)
            self._just_preempted_ids.append(state.request_id)
        self.queue(state)

    def queue(self, state: RequestState) -> None:
        """Let a request that has left the batch wait for its turn, or sit aside while it is paused."""
        state.status = RequestStatus.ASIDE if state.is_paused else RequestStatus.WAITING
        self.rank(state)
        if not state.is_paused:
            self.waiting.push(state)

    def mark_in_flight(self, states: Iterable[RequestState], *, is_in_flight: bool) -> None:
        """Say whether a micro-batch has requests, so that no step may run them; see `RequestState`."""
        for state in states:
            state.is_in_flight = is_in_flight

    def _remember(self, state: RequestState) -> None:
        """Count a request among those that will deliver."""
        self.states[state.request_id] = state
        self.num_pooled += state.request.pooling is not None
        self.num_guided += state.is_guided

    def _forget(self, state: RequestState) -> None:
        """Count a request no more among those that will deliver."""
        del self.states[state.request_id]
        state.plain_until = 0
        self.num_pooled -= state.request.pooling is not None
        self.num_guided -= state.is_guided

    def rank(self, state: RequestState) -> None:
        """Let a request stand where its deadline, or the loss of it, puts it; not for one in a list."""
        if self._tracker is not None or state.slo.is_best_effort:
            state.sort_key = (state.slo.rank, *state.sort_key[1:])

    def _leave_runner(self, state: RequestState) -> bool:
        """Tell the model runner with the next step to drop a request; return whether it has heard of it."""
        admitted = self.unannounced.pop(state.request_id, None)
        if admitted is None:
            self.released_ids.append(state.request_id)
        else:
            self.kv.snapshots.give_back(admitted.snapshot)
        return admitted is None


def _mark_rows(
    states: list[RequestState], rows: list[ScheduledRequest], shape: BatchShape, step_id: int
) -> None:
    """Say of the rows of a step which of them sample under a grammar, and which make an embedding."""
    for place, (state, row) in enumerate(zip(states, rows, strict=True)):
        if row.samples and state.is_guided:
            shape.num_guided_rows += 1
            state.last_step_id = step_id
        # What completes a prompt that is pooled counts as in flight until its embedding is there, but has no
        # logits. If it is a single token, its row may be one of decodes that nobody reads.
        if row.samples and state.request.pooling is not None:
            shape.num_lm_head_rows -= 1
            before = state.num_tokens - row.num_new_tokens
            rows[place] = row._replace(samples=False, num_computed_tokens=before)
