"""Our policy at work on vLLM's requests: what `Scheduler` does around a plan, without its KV and rows."""

from __future__ import annotations

from collections import deque
from typing import Any

from onbeat.core.request import RequestOutput
from onbeat.core.slo import DEFAULT_QUEUE_SECONDS, SLOMode
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.config import SchedulerConfig
from onbeat.scheduler.replica.policies import make_policy
from onbeat.scheduler.replica.relegation import Relegation
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.results import StepFeedback, StepInFlight, StepsInFlight
from onbeat.scheduler.replica.step_plan import StepPlan
from onbeat.server.objectives import RequestObjectives
from onbeat.vllm.mirror import Mirror
from onbeat.vllm.surface import EngineRequest, Surface


class PromiseKeeper:
    """Plans vLLM's steps, and follows what becomes of the objectives.

    Parameters
    ----------
    model : predicts steps, and learns from them.
    mode : what keeping a TBT objective means.
    """

    def __init__(self, surface: Surface, model: StepTimeModel, mode: SLOMode) -> None:
        self.surface, self.model = surface, model
        self.config = _limits(surface, mode)
        self.policy = make_policy(self.config, model)
        slo, admission = self.policy.slo, self.policy.admission
        assert slo is not None
        assert admission is not None
        self.slo, self.admission = slo, admission
        self.mirror = Mirror(surface, slo.tracker)
        self.relegation = Relegation(self.mirror, admission)
        self.feedback = StepFeedback(model, slo.rules, run_side_by_side=False)
        self.in_flight = StepsInFlight()
        self._steps: deque[tuple[Any, BatchShape]] = deque()
        """Of each step in flight, what vLLM calls it and what it holds."""

    def add(self, request: EngineRequest, objectives: RequestObjectives, arrival: float, now: float) -> None:
        """Take a new request.

        Parameters
        ----------
        arrival : when it came, seconds of the same clock as `now`.

        Raises
        ------
        SLOUnattainable : it would miss its TTFT objective and asks to be refused then.
        Overloaded : it would have to wait for too long.
        """
        mirror = self.mirror
        mirror.sync(now)
        state = mirror.new_state(request, objectives, arrival)
        mirror.know(request)
        state.slo.begin(
            state.request,
            self.config.slo_mode,
            now=now,
            max_output_tokens=state.max_total_tokens - state.num_prompt_tokens,
        )
        plan = self._new_plan(now)
        busy_until = self.in_flight.busy_until if self.in_flight else now
        try:
            self.admission.on_arrival(state, plan, busy_until)
        except Exception:
            del mirror.requests[request.request_id]
            raise
        self.relegation.on_arrival(state)
        mirror.add(state)

    def forget(self, request_id: str) -> None:
        """Forget a request that vLLM has ended."""
        state = self.mirror.states.get(request_id)
        if state is not None:
            self.mirror.drop(state)

    def plan(self, now: float) -> StepPlan:
        """Plan the next step; nothing but the plan changes, and what is known of vLLM's requests."""
        self.mirror.sync(now)
        start = self.in_flight.last_plan = self.in_flight.next_start(now)
        plan = self._new_plan(start)
        num_left = self.surface.scheduler.max_num_scheduled_tokens
        plan.num_tokens_left = max(num_left - self.surface.num_drafts * len(plan.running), 0)
        self.policy.composer.compose(plan, self.policy.order)
        return plan

    def commit(self, plan: StepPlan) -> list[RequestOutput]:
        """Remember a plan that is carried out; return the last outputs of requests that it gives up."""
        self.policy.composer.commit(plan)
        self.admission.on_plan(plan)
        for request_id, num_hit_tokens in plan.num_hit_tokens.items():
            self.mirror.states[request_id].note_hits(num_hit_tokens)
        if plan.infeasible or plan.overdue:
            self.relegation.commit(plan)
        return self.relegation.take_expired()

    def note_step(self, output: Any, now: float) -> None:
        """Count a step that vLLM has planned, whoever decided what it holds."""
        mirror, shape = self.mirror, BatchShape()
        drafts = getattr(output, "scheduled_spec_decode_tokens", None) or {}
        states: list[RequestState] = []
        requests = self.surface.scheduler.requests
        for request_id, num_new in self.surface.rows(output):
            request = requests[request_id]
            before = request.num_computed_tokens - num_new
            state = mirror.states.get(request_id)
            if state is not None:
                states.append(state)
                if state.status is not RequestStatus.RUNNING:
                    mirror.join(state, before, now)
            # Drafts are part of what a decode takes: plans know nothing of them, the correction learns it.
            num_own = num_new - len(drafts.get(request_id, ()))
            shape.add(before, max(num_own, 1), samples=request.num_computed_tokens >= request.num_tokens)
        if not shape.num_new_tokens:
            return
        in_flight = self.in_flight
        start = in_flight.next_start(now)
        seconds = self.model.step_time(shape)
        in_flight.busy_until = start + seconds
        in_flight.append(StepInFlight(in_flight.num_planned, states, (), now, seconds, 0.0))
        in_flight.num_planned += 1
        self._steps.append((output, shape))

    def take(self, output: Any, now: float) -> None:
        """Learn from a step whose results vLLM has taken."""
        if any(each is output for each, _ in self._steps):
            while self._steps:
                each, shape = self._steps.popleft()
                step = self.in_flight.end_oldest(now)
                if each is output:
                    self.feedback.observe(shape, step.planned_at, now)
                    break
        mirror = self.mirror
        delivered: list[tuple[RequestState, RequestOutput]] = []
        finished: list[RequestState] = []
        for request_id, _ in self.surface.rows(output):
            state = mirror.states.get(request_id)
            if state is None:
                continue
            request = mirror.requests[request_id]
            num_new = request.num_tokens - state.num_tokens
            if num_new > 0:
                before = state.num_output_tokens
                state.follow(request.num_tokens, state.num_computed_tokens, state.num_in_flight_tokens)
                tokens = [0] * num_new  # their number is all that counts
                delivered.append((state, RequestOutput(request_id, tokens, num_previous_tokens=before)))
            if request.is_finished():
                finished.append(state)
        self.slo.tracker.on_deliveries(delivered, now)
        for state in finished:
            self.slo.tracker.on_finish(state)
            mirror.drop(state)

    def _new_plan(self, now: float) -> StepPlan:
        mirror = self.mirror
        plan = StepPlan(
            config=self.config, kv=mirror.kv, running=mirror.running, waiting=mirror.waiting, now=now
        )
        plan.max_num_seqs -= self.surface.num_foreign_slots
        return plan


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
