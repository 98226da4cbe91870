"""vLLM's steps: planned with our planner, and followed whoever planned them."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from onbeat.core.errors import Overloaded, SLOUnattainable
from onbeat.core.request import Request, RequestOutput
from onbeat.core.slo import DEFAULT_QUEUE_SECONDS, Fate, ShedMode, SLOMode
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.planner import Planner
from onbeat.scheduler.replica.policies import make_policy
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.step_plan import StepPlan
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.vllm.refusals import TOO_LONG
from onbeat.vllm.surface import EngineRequest, Surface
from onbeat.vllm.table import EngineTable


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
        self.planner = Planner(
            config, policy, table, model, lambda: len(table.foreign) + surface.num_idle_sessions
        )
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
        state = planner.new_state(asked, now)
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
        state = self.table.states.get(request_id)
        if state is not None:
            self.table.drop(state)

    def plan(self, now: float) -> StepPlan:
        """Plan the next step; nothing but the plan changes, and what is known of vLLM's requests."""
        self._sync(now)
        plan = self.planner.new_plan(self.planner.begin(now))
        num_left = self.surface.scheduler.max_num_scheduled_tokens
        plan.num_tokens_left = max(num_left - self.surface.num_drafts * len(plan.running), 0)
        self.planner.compose(plan)
        return plan

    def commit(self, plan: StepPlan) -> list[RequestOutput]:
        """Remember a plan that is carried out; return the last outputs of requests that it gives up."""
        self.planner.commit(plan)
        expired = self.planner.relegation.take_expired()
        if expired:
            states = {state.request_id: state for state in (*plan.overdue, *plan.infeasible)}
            for output in expired:
                if output.fate is Fate.OVERDUE:
                    output.predicted_ttft = self._ttft_at_the_end(states[output.request_id], plan.now)
        return expired

    def _ttft_at_the_end(self, state: RequestState, now: float) -> float:
        """Return the predicted TTFT of a request that waits behind all others, seconds."""
        wait = self._admission.bound.wait(self.table.waiting)
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
            state = known.get(request_id)
            if state is not None:
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
        start = self.in_flight.next_start(now)
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
        feedback = self.planner.feedback
        start = max(planned_at, feedback.last_end)
        feedback.observe(noted.shape, planned_at, now)
        return TakenStep(noted, now - start)

    def _deliver(self, output: Any, now: float) -> None:
        """Follow the tokens of a step, and who has ended with it."""
        table, surface = self.table, self.surface
        running: Any = None
        """The status of those that run, once one is seen."""
        delivered: list[tuple[RequestState, RequestOutput]] = []
        finished: list[RequestState] = []
        outputs: dict[int, RequestOutput] = {}
        """By their tokens, whose number is all that counts: nobody else hears of them."""
        for request_id, _ in surface.rows(output):
            state = table.states.get(request_id)
            if state is None:
                continue
            request = table.requests[request_id]
            num_tokens = request.num_tokens
            num_new = num_tokens - state.num_tokens
            if num_new > 0:
                state.num_tokens = num_tokens
                output_of = outputs.get(num_new)
                if output_of is None:
                    outputs[num_new] = output_of = RequestOutput("", [0] * num_new)
                delivered.append((state, output_of))
            if request.status is not running:
                if surface.is_running(request):
                    running = request.status
                elif request.is_finished():
                    finished.append(state)
        self.slo.tracker.on_deliveries(delivered, now)
        for state in finished:
            self.slo.tracker.on_finish(state)
            table.drop(state)

    def _sync(self, now: float) -> None:
        self.table.sync(now)
        self._is_synced = True


def _limits(surface: Surface, mode: SLOMode) -> SchedulerConfig:
    """Return vLLM's limits as ours. Blocks are the `KVView`'s: the sizes here bind nobody."""
    return SchedulerConfig(
        policy="slo",
        max_num_seqs=surface.max_num_seqs,
        max_num_batched_tokens=max(surface.scheduler.max_num_scheduled_tokens, surface.max_num_seqs),
        max_model_len=surface.max_model_len,
        num_blocks=-(-surface.max_model_len // 16),
        max_queue_seconds=DEFAULT_QUEUE_SECONDS,
        slo_mode=mode,
    )
