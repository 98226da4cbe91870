"""vLLM's steps: planned with our planner, and followed whoever planned them.

vLLM's own `schedule` is made to carry a plan out (`Imposed`): by order, skips, quotas and its queue.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from onbeat.core.errors import Overloaded, SLOUnattainable
from onbeat.core.request import Request, RequestOutput, SamplingParams
from onbeat.core.slo import DEFAULT_QUEUE_SECONDS, Fate, ShedMode, SLOMode
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.planner import Planner
from onbeat.scheduler.replica.policies import make_policy
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.step_plan import RunningList, StepPlan, WaitingQueue, sort_key
from onbeat.scheduler.replica.tracker import Delivered, SLOTracker
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.server.objectives import RequestObjectives
from onbeat.vllm.surface import EngineRequest, Surface, VLLMKVView
from onbeat.vllm.telemetry import TOO_LONG


class EngineTable:
    """Follows what vLLM does with requests: the table of our planner, as `RequestTable` is elsewhere.

    vLLM decides: a step that was not planned here, a preemption for want of memory and an abort are seen in
    the next `sync`.

    Parameters
    ----------
    tracker : told of first runs and of ends.
    """

    def __init__(self, surface: Surface, tracker: SLOTracker) -> None:
        self.running = RunningList()
        self.waiting = WaitingQueue()
        self.states: dict[str, RequestState] = {}
        self.foreign: list[EngineRequest] = []
        """Requests that run and are vLLM's own to plan."""
        self.requests: dict[str, EngineRequest] = {}
        self.kv: Any = VLLMKVView(surface, self.requests)
        self._held: dict[str, RequestState] = {}
        """Requests that wait for something else: a grammar, or a connector."""
        self._stale: list[RequestState] = []
        """Preempted requests of which tokens were in flight when last seen."""
        self._surface, self._tracker = surface, tracker
        self._per_step = 1 + surface.num_drafts

    @property
    def num_slots_kept(self) -> int:
        """Places of the batch that other requests of vLLM's have."""
        return len(self.foreign) + self._surface.num_idle_sessions

    def asked(self, request: EngineRequest, terms: RequestObjectives, arrival: float) -> Request:
        """Return a request of vLLM's as one of ours.

        Parameters
        ----------
        arrival : seconds of the clock that plans go by.
        """
        return Request(
            request_id=request.request_id,
            prompt_token_ids=range(request.num_prompt_tokens),
            sampling=SamplingParams(max_tokens=max(int(request.max_tokens or 1), 1)),
            arrival=arrival,
            num_prompt_logprobs=self._surface.num_prompt_logprobs(request),
            slo=terms.slo,
            slo_class=terms.slo_class,
            weight=terms.weight,
            tenant=terms.tenant,
            shed=terms.shed,
        )

    def add(self, state: RequestState) -> None:
        """Let a new request wait."""
        self._rank(state)
        self.states[state.request_id] = state
        self._wait(state)

    def requeue(self, state: RequestState) -> None:
        """Give a waiting request the place that its deadline, or the loss of it, asks for."""
        is_held = state.request_id in self._held
        if not is_held:
            self.waiting.remove(state)
        self._rank(state)
        if not is_held:
            self.waiting.push(state)

    def may_join(self, state: RequestState) -> bool:
        """Whether a request that waits for a plan does so still; else vLLM loads KV for it by now."""
        if self._surface.may_wait(self.requests[state.request_id]):
            return True
        self.waiting.remove(state)
        self._held[state.request_id] = state
        return False

    def drop(self, state: RequestState) -> None:
        """Forget a request, however it ended."""
        if self.states.pop(state.request_id, None) is None:
            self.requests.pop(state.request_id, None)
            return
        self._tracker.on_drop(state)
        if state.status is RequestStatus.RUNNING:
            self.running.remove(state)
        elif self._held.pop(state.request_id, None) is None:
            self.waiting.remove(state)
        state.status = RequestStatus.FINISHED
        state.block_ids = []
        del self.requests[state.request_id]

    def sync(self, now: float) -> None:
        """See where vLLM's requests stand. Costs what the batch is long, not what waits."""
        surface, states, kv = self._surface, self.states, self.kv
        for state in list(self._held.values()):
            self._look_after(state)
        kv.promised, self.foreign = 0, []
        running = surface.scheduler.running
        for request in running:
            known = states.get(request.request_id)
            if known is None:
                self.foreign.append(request)
                continue
            if known.status is not RequestStatus.RUNNING:
                self.join(known, request.num_computed_tokens, now)
            self._follow(known, request)
        if len(self.running) > len(running) - len(self.foreign):
            for state in list(self.running):
                if not surface.is_running(self.requests[state.request_id]):
                    self._leave(state)
        for state in self._stale:
            if state.status is RequestStatus.WAITING:
                request = self.requests[state.request_id]
                state.follow(request.num_tokens, 0, surface.num_stale(request))
        self._stale = [state for state in self._stale if state.num_in_flight_tokens]

    def _follow(self, state: RequestState, request: EngineRequest) -> None:
        in_flight = certain = request.num_output_placeholders
        if in_flight:
            certain = -(-in_flight // self._per_step)
        uncertain = in_flight - certain
        state.follow(request.num_tokens, request.num_computed_tokens - uncertain, certain)
        self.kv.follow(state, uncertain)

    def join(self, state: RequestState, num_cached: int, now: float) -> None:
        """Let a request run that vLLM has admitted.

        Parameters
        ----------
        num_cached : tokens of it that the prefix cache held.
        """
        if self._held.pop(state.request_id, None) is None:
            self.waiting.remove(state)
        is_first = state.admitted_step_id < 0
        state.status, state.admitted_step_id = RequestStatus.RUNNING, 0
        if is_first:
            state.scheduled_time = now
            state.num_cached_tokens = min(num_cached, state.num_prompt_tokens)
            self._tracker.tenants.on_leave(state.request.tenant, state.num_tokens - state.num_cached_tokens)
        insort(self.running, state, key=sort_key)

    def _leave(self, state: RequestState) -> None:
        """Let a request wait that vLLM has preempted, or forget it."""
        request = self.requests[state.request_id]
        if request.is_finished():
            self.drop(state)
            return
        self.running.remove(state)
        state.status = RequestStatus.WAITING
        state.block_ids, state.num_allocated_tokens = [], 0
        state.num_preemptions = request.num_preemptions
        state.follow(request.num_tokens, 0, self._surface.num_stale(request))
        state.num_hit_tokens = 0
        self._stale.append(state)
        self._rank(state)
        self._wait(state)

    def _wait(self, state: RequestState) -> None:
        if self._surface.may_wait(self.requests[state.request_id]):
            self.waiting.push(state)
        else:
            self._held[state.request_id] = state

    def _look_after(self, state: RequestState) -> None:
        """Let a request wait for its turn once nothing else holds it."""
        request = self.requests[state.request_id]
        if request.is_finished():
            self.drop(state)
        elif self._surface.may_wait(request):
            del self._held[state.request_id]
            self.waiting.push(state)

    def _rank(self, state: RequestState) -> None:
        state.sort_key = (state.slo.rank, *state.sort_key[1:])


class NotedStep(NamedTuple):
    """A step that vLLM has planned."""

    output: Any
    """What vLLM calls it."""
    shape: BatchShape
    seconds: float
    """That it is predicted to take."""


class TakenStep(NamedTuple):
    """A step whose results vLLM has taken."""

    noted: NotedStep
    seconds: float
    """That it took."""


class EngineSteps:
    """Plans vLLM's steps, and follows what becomes of the objectives.

    Parameters
    ----------
    model : predicts steps, and learns from them.
    mode : what keeping a TBT objective means.
    """

    def __init__(self, surface: Surface, model: StepTimeModel, mode: SLOMode) -> None:
        self.surface, self.model = surface, model
        config = _limits(surface, mode)
        policy = make_policy(config, model)
        assert policy.slo is not None
        assert policy.admission is not None
        self.slo, self._admission = policy.slo, policy.admission
        self.table = table = EngineTable(surface, policy.slo.tracker)
        self.planner = Planner(config, policy, table, model)
        self.in_flight = self.planner.in_flight
        self._steps: deque[NotedStep] = deque()
        """In flight."""
        self._is_synced = False
        """Whether no step was planned or taken since vLLM's requests were looked at."""

    def add(self, request: EngineRequest, asked: Request, now: float) -> RequestState:
        """Take a new request; return its state.

        Parameters
        ----------
        asked : the same, as `EngineTable.asked` returns it.

        Raises
        ------
        SLOUnattainable : it would miss its TTFT objective and asks to be refused then; or it would have to
            wait for too long.
        """
        table, planner = self.table, self.planner
        rejects = asked.shed is ShedMode.REJECT and asked.slo is not None
        if not self._is_synced and (rejects or len(table.waiting) >= planner.config.max_num_seqs):
            self._sync(now)  # it may be refused, for what is predicted
        state = planner.new_state(asked)
        table.requests[request.request_id] = request  # plans find its tokens here
        try:
            planner.add(state, now)
        except Exception as error:
            del table.requests[request.request_id]
            if not isinstance(error, Overloaded):
                raise
            raise SLOUnattainable(
                str(error),
                predicted_ttft=self._ttft_at_the_end(state, now),
                retry_after=error.retry_after or 0.0,
                code=TOO_LONG,
            ) from error
        return state

    def forget(self, request_id: str) -> None:
        """Forget a request that vLLM has ended."""
        if (state := self.table.states.get(request_id)) is not None:
            self.table.drop(state)

    def plan(self, now: float) -> StepPlan:
        """Plan the next step; nothing but the plan changes, and what is known of vLLM's requests."""
        self._sync(now)
        self.in_flight.last_plan = self._next_start(now)
        plan = self.planner.new_plan(self.in_flight.last_plan)
        num_left = self.surface.scheduler.max_num_scheduled_tokens
        plan.num_tokens_left = max(num_left - self.surface.num_drafts * len(plan.running), 0)
        self.planner.policy.composer.compose(plan)
        return plan

    def commit(self, plan: StepPlan) -> list[RequestOutput]:
        """Remember a plan that is carried out; return the last outputs of requests that it gives up."""
        self.planner.commit(plan)
        expired = self.planner.take_expired()
        if expired:
            states = {state.request_id: state for state in (*plan.overdue, *plan.infeasible)}
            for output in expired:
                if output.fate is Fate.OVERDUE:
                    output.predicted_ttft = self._ttft_at_the_end(states[output.request_id], plan.now)
        return expired

    def _ttft_at_the_end(self, state: RequestState, now: float) -> float:
        """Return the predicted TTFT of a request that waits behind all others, seconds."""
        wait = self._admission.wait(self.table.waiting)
        num_tokens = state.num_tokens - state.num_hit_tokens
        own = self.slo.cost_model.seconds(num_tokens, state.num_hit_tokens)
        return now - state.request.arrival + wait + own

    def note_step(self, output: Any, now: float) -> NotedStep | None:
        """Count a step that vLLM has planned, whoever decided what it holds; None if it holds nothing."""
        table, known, self._is_synced = self.table, self.table.states, False
        drafts = getattr(output, "scheduled_spec_decode_tokens", None) or {}
        num_decodes = num_context = num_sampling = 0
        chunks: list[tuple[int, int, bool]] = []
        states: list[RequestState] = []
        requests = self.surface.scheduler.requests
        for request_id, num_new in self.surface.rows(output):
            request = requests[request_id]
            num_computed = request.num_computed_tokens
            before = num_computed - num_new
            if (state := known.get(request_id)) is not None:
                states.append(state)
                if state.status is not RequestStatus.RUNNING:
                    table.join(state, before, now)
            # Drafts are part of what a decode takes, in plans and where steps are measured or learnt from.
            num_own = num_new - len(drafts.get(request_id, ())) if drafts else num_new
            samples = num_computed >= request.num_tokens
            if num_own > 1:
                chunks.append((before, num_own, samples))
            else:
                num_decodes += 1
                num_context += before + 1
                num_sampling += samples
        if not (num_decodes or chunks):
            return None
        shape = BatchShape.of_decodes(num_decodes, num_context)
        shape.num_lm_head_rows = num_sampling
        for before, num_own, samples in chunks:
            shape.add(before, num_own, samples=samples)
        start = self._next_start(now)
        step = self.planner.launch(shape, states, (), start=start, planned_at=now)
        noted = NotedStep(output, shape, step.seconds)
        self._steps.append(noted)
        return noted

    def take(self, output: Any, now: float) -> TakenStep | None:
        """Learn from a step whose results vLLM has taken; None of one that was not noted."""
        self._is_synced = False
        taken = self._end_step(output, now)
        self._deliver(output, now)
        return taken

    def _end_step(self, output: Any, now: float) -> TakenStep | None:
        """Learn how long a step took; None if it was not noted."""
        if not any(each.output is output for each in self._steps):
            return None
        while (noted := self._steps.popleft()).output is not output:
            self.in_flight.end_oldest(now)
        planned_at = self.in_flight.end_oldest(now).planned_at
        start = max(planned_at, self.planner.last_end)
        self.planner.observe(noted.shape, planned_at, now)
        return TakenStep(noted, now - start)

    def _deliver(self, output: Any, now: float) -> None:
        """Follow the tokens of a step, and who has ended with it."""
        table, surface = self.table, self.surface
        running: Any = None
        """The status of those that run, once one is seen."""
        delivered: Delivered = []
        finished: list[RequestState] = []
        for request_id, _ in surface.rows(output):
            state = table.states.get(request_id)
            if state is None:
                continue
            request = table.requests[request_id]
            num_tokens = request.num_tokens
            num_new = num_tokens - state.num_tokens
            if num_new > 0:
                state.num_tokens = num_tokens
                delivered.append((state, num_new, None))
            if request.status is not running:
                if surface.is_running(request):
                    running = request.status
                elif request.is_finished():
                    finished.append(state)
        self.slo.tracker.on_deliveries(delivered, now)
        for state in finished:
            self.slo.tracker.on_finish(state)
            table.drop(state)

    def _next_start(self, now: float) -> float:
        """Return when a step that is planned now may start, seconds."""
        return max(now, self.in_flight.busy_until) if self.in_flight else now

    def _sync(self, now: float) -> None:
        self.table.sync(now)
        self._is_synced = True


def _limits(surface: Surface, mode: SLOMode) -> SchedulerConfig:
    """Return vLLM's limits as ours. Blocks are the `VLLMKVView`'s: the sizes here bind nobody."""
    return SchedulerConfig(
        policy="slo",
        max_num_seqs=surface.max_num_seqs,
        max_num_batched_tokens=max(surface.scheduler.max_num_scheduled_tokens, surface.max_num_seqs),
        max_model_len=surface.max_model_len,
        num_blocks=-(-surface.max_model_len // 16),
        max_queue_seconds=DEFAULT_QUEUE_SECONDS,
        slo_mode=mode,
    )


@dataclass(frozen=True, slots=True)
class Imposed:
    """What the next step of vLLM is held to.

    Attributes
    ----------
    decodes : ids of the requests that get what a decode wants.
    ends : request id -> tokens of it that are computed once the step has run; of prompts.
    quota : request id -> tokens of the step, likewise.
    admitted : who joins the batch, in this order.
    with_prefix : of these, those that the prefix cache has a part of.
    known : ids of requests that plans admit.
    """

    decodes: frozenset[str]
    ends: dict[str, int]
    quota: dict[str, int]
    admitted: list[EngineRequest] = field(default_factory=list)
    with_prefix: list[EngineRequest] = field(default_factory=list)
    known: Container[str] = ()

    def limit(self, request_id: str, num_computed: int, num_new: int) -> int:
        """Return the tokens that a request gets of those that vLLM would give it.

        More of its prefix may be cached by now than when it was planned; it ends at the same token then.
        """
        if request_id not in self.quota:
            return num_new
        return min(num_new, self.quota[request_id], max(self.ends[request_id] - num_computed, 1))

    @contextmanager
    def during(self, surface: Surface, kv: VLLMKVView) -> Iterator[None]:
        """Hold vLLM to it for one call of `schedule`."""
        waiting = surface.only_waiting(self.admitted, self.known)
        limiting = surface.limiting(self.limit) if self.quota else nullcontext()
        with kv.holding(self.with_prefix), waiting, surface.keeping_loras(), limiting:
            yield


def impose(
    plan: StepPlan, table: EngineTable, surface: Surface, loss: Callable[[RequestState], tuple[float, ...]]
) -> Imposed:
    """Preempt, sort and skip as a plan says; return what is left to hold vLLM to while it schedules.

    Parameters
    ----------
    loss : key of running requests, the greatest is the first that vLLM may preempt where blocks run short.
    """
    requests, preempted, own = table.requests, plan.preempted, table.foreign
    for state in preempted:
        surface.preempt(requests[state.request_id])
    rows = [*plan.decodes, *(state for state, _ in plan.chunks)]
    left: list[RequestState] = []
    if len(rows) + len(preempted) < len(table.running):
        taken = {state.request_id for state in (*rows, *preempted)}
        left = sorted([each for each in table.running if each.request_id not in taken], key=loss)
    for state in left:
        surface.skip(requests[state.request_id])
    surface.scheduler.running[:] = [*own, *[requests[state.request_id] for state in (*rows, *left)]]
    ends = {state.request_id: state.num_computed_tokens + num for state, num in plan.chunks}
    quota = {state.request_id: num for state, num in plan.chunks}
    block_size = plan.kv.block_size
    admissions = [each for each in plan.admissions if table.may_join(each.state)]
    for admission in admissions:
        name, num = admission.state.request_id, admission.num_new_tokens
        quota[name], ends[name] = num, len(admission.cached_block_ids) * block_size + num
    return Imposed(
        frozenset([state.request_id for state in plan.decodes]),
        ends,
        quota,
        [requests[each.state.request_id] for each in admissions],
        [requests[each.state.request_id] for each in admissions if each.cached_block_ids],
        table.states,
    )


def mismatch(imposed: Imposed, output: Any, table: EngineTable) -> dict[str, tuple[int, int]]:
    """Return where a step of vLLM is not what it was held to: request id -> (planned, actual).

    Tokens of decodes are counted as one; of prompts, up to where they are computed.
    """
    different: dict[str, tuple[int, int]] = {}
    rows: Mapping[str, int] = output.num_scheduled_tokens
    drafts = getattr(output, "scheduled_spec_decode_tokens", None) or {}
    for name in imposed.decodes - rows.keys():
        different[name] = (1, 0)
    for name, end in imposed.ends.items():
        num_drafts = len(drafts.get(name, ()))
        actual = table.requests[name].num_computed_tokens - num_drafts if name in rows else 0
        # Of a prompt that is cached whole, one token has to be computed all the same.
        has_more_cached = actual > end and rows[name] == 1 + num_drafts
        if actual != end and not has_more_cached:
            different[name] = (end, actual)
    if len(rows) > len(imposed.decodes) + len(imposed.ends) - len(different):
        known = imposed.decodes | imposed.ends.keys()
        others = [name for name in rows if name not in known and name in table.states]
        different.update({name: (0, rows[name]) for name in others})
    return different
