"""Runs a scheduler that plans against the clock: steps take as long as a model of them says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from onbeat.core.errors import RequestRejected
from onbeat.core.request import Request, SamplingParams
from onbeat.core.slo import SLO, ShedMode, SLOMode
from onbeat.core.step import BatchShape, SchedulerOutput
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.request_state import RequestState, SLOState
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.replica.slo.composer import GAP_QUANTILE
from onbeat.scheduler.scheduler_config import SchedulerConfig
from tests.pure.scheduler.driver import Driver

MOST_TOKENS = 1 << 20


@dataclass
class FakeStepTime(StepTimeModel):
    """A device in small: a fixed cost, tokens, context that is read, and attention within chunks."""

    fixed: float = 2e-3
    per_token: float = 1e-4
    per_context: float = 1e-7
    per_pair: float = 1e-7
    spread: float = 0.0
    """The q-quantile is the mean x (1 + spread x q)."""

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        if not shape.num_new_tokens:
            return 0.0
        context = shape.decode_context_tokens + shape.chunk_cached_tokens
        mean = (
            self.fixed
            + shape.num_new_tokens * self.per_token
            + context * self.per_context
            + shape.query_key_pairs * self.per_pair
        )
        return mean if q is None else mean * (1 + self.spread * q)

    def max_chunk_tokens(
        self, shape: BatchShape, cached_tokens: int, budget: float, q: float | None = None
    ) -> int:
        def seconds(num_tokens: int) -> float:
            trial = replace(shape)
            trial.add(cached_tokens, num_tokens, samples=True)
            return self.step_time(trial, q)

        low, high = 0, MOST_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            if seconds(middle) <= budget:
                low = middle
            else:
                high = middle - 1
        return low

    def observe(self, shape: BatchShape, seconds: float) -> None: ...

    @property
    def smallest_step(self) -> float:
        """Seconds of one decode with next to no context."""
        return self.fixed + self.per_token + self.per_context

    def idle_seconds(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """Return how long a request takes that has the machine for itself."""
        shape = BatchShape()
        shape.add(0, num_prompt_tokens, samples=True)
        decode = self.smallest_step + self.per_context * (num_prompt_tokens + num_output_tokens)
        return self.step_time(shape) + num_output_tokens * decode


def make_config(policy: str = "slo", **changes) -> SchedulerConfig:
    values: dict[str, Any] = {
        "num_blocks": 512,
        "block_size": 16,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "policy": policy,
    }
    return SchedulerConfig(**(values | changes))


def make_request(
    request_id: str,
    num_prompt_tokens: int,
    max_tokens: int,
    *,
    arrival: float = 0.0,
    slo: SLO | None = None,
    salt: str | None = None,
    **changes,
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(range(num_prompt_tokens)),
        sampling=SamplingParams(max_tokens=max_tokens),
        arrival=arrival,
        cache_salt=salt if salt is not None else request_id,
        slo=slo,
        **({"shed": ShedMode.OFF} | changes),
    )


def make_state(
    request: Request,
    *,
    mode: SLOMode = "stream",
    sort_key: tuple[float, ...] = (0.0,),
    max_model_len: int = 100_000,
) -> RequestState:
    """Return a request that has just arrived, with its deadlines."""
    state = RequestState(request, sort_key=sort_key, max_model_len=max_model_len, slo=SLOState())
    max_output_tokens = state.max_total_tokens - state.num_prompt_tokens
    state.slo.begin(request, mode, now=request.arrival, max_output_tokens=max_output_tokens)
    return state


class TimedDriver(Driver):
    """A `Driver` with a clock; remembers when each request's deliveries came."""

    def __init__(self, config: SchedulerConfig, model: FakeStepTime, *, depth: int = 1) -> None:
        unplanned = replace(config, policy="sarathi", shed_order="most", max_queue_seconds=None)
        super().__init__(unplanned, depth=depth)
        self.scheduler = Scheduler(config, model)
        self.model = model
        self.requests: dict[str, Request] = {}
        self.times: dict[str, list[float]] = {}
        self.rejected: dict[str, RequestRejected] = {}
        self._last_end = 0.0

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        try:
            self.scheduler.add(request, self.now)
        except RequestRejected as error:
            self.rejected[request.request_id] = error
            return
        self.outputs[request.request_id] = list(request.resumed_token_ids)
        self.times[request.request_id] = []

    def receive(self, outputs) -> None:
        for output in outputs:
            if output.new_token_ids:
                self.times[output.request_id].append(self.now)
        super().receive(outputs)

    def step(self) -> bool:
        """Plan a step, or let the oldest one end; False once there is nothing to do."""
        if len(self.in_flight) < self.depth:
            scheduled = self.scheduler.schedule(self.now)
            self.receive(self.scheduler.planner.take_expired())
            if scheduled is not None:
                self.check_step(scheduled)
                self.log.append(scheduled)
                self.in_flight.append(scheduled)
                if len(self.in_flight) < self.depth:
                    return True
        if self.in_flight:
            seconds = self.model.step_time(self.in_flight[0].shape)
            self.now = self._last_end = max(self.now, self._last_end) + seconds
            self.collect()
            return True
        if self.scheduler.num_unfinished:
            self.now += self.model.smallest_step
            return True
        return False

    def check_step(self, scheduled: SchedulerOutput) -> None:
        super().check_step(scheduled)
        check_budget(scheduled, self.model, self.scheduler.config.slo_mode)

    def serve(
        self, requests: Iterable[Request], *, until: float = float("inf"), watch: str | None = None
    ) -> None:
        """Let requests come when they arrive; run until all, or the one watched, have ended, or some time."""
        pending = sorted(requests, key=lambda request: request.arrival)
        index = num_idle = 0
        while self.now < until and watch not in self.finished:
            while index < len(pending) and pending[index].arrival <= self.now:
                self.add(pending[index])
                index += 1
            num_planned, num_ended = len(self.log), len(self.finished)
            is_busy = self.step()
            is_moving = self.in_flight or (num_planned, num_ended) != (len(self.log), len(self.finished))
            num_idle = 0 if is_moving else num_idle + 1
            if not is_busy:
                if index == len(pending):
                    return
                self.now = max(self.now, pending[index].arrival)
                num_idle = 0
            assert num_idle < 2, "requests are left but nothing is planned"

    def lateness(self, request_id: str) -> list[float]:
        """Seconds by which each token came after its deadline; negative where it was early."""
        request = self.requests[request_id]
        assert request.slo is not None
        times = self.times[request_id]
        due = request.arrival + (request.slo.ttft or 0.0)
        first = max(due, times[0])
        tbt = request.slo.tbt or 0.0
        return [times[0] - due] + [time - first - k * tbt for k, time in enumerate(times[1:], start=1)]


def check_budget(scheduled: SchedulerOutput, model: StepTimeModel, mode: SLOMode) -> None:
    """A step is predicted to be within its budget, unless its smallest row alone would not be.

    Predicted is what the policy plans with: the mean, or in `gap` mode a quantile.
    """
    budget = scheduled.budget
    if budget is None:
        return
    q = GAP_QUANTILE if mode == "gap" else None
    smallest = min(model.step_time(one_row(row.num_computed_tokens), q) for row in scheduled.rows)
    seconds = model.step_time(scheduled.shape, q)
    assert seconds <= budget + 1e-9 or smallest > budget - 1e-9, (
        f"a step of {seconds} s is planned with {budget} s"
    )


def one_row(num_computed_tokens: int) -> BatchShape:
    shape = BatchShape()
    shape.add(num_computed_tokens, 1, samples=True)
    return shape
