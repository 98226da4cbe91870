"""Cases whose capacity is known, and records made by hand."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

import numpy as np

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.metrics.record import RequestRecord
from onbeat.planner.cases import BuiltCase, Labels
from onbeat.planner.parallel import TaskContext
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.simulator.result import SimulationResult
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass

PROMPT = 128


class AffineStep(StepTimeModel):
    """A step-time model: a fixed time and a time for each new token."""

    def __init__(self, fixed: float, per_token: float) -> None:
        self.fixed, self.per_token = fixed, per_token

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        return self.fixed + self.per_token * shape.num_new_tokens

    def max_chunk_tokens(
        self, shape: BatchShape, cached_tokens: int, budget: float, q: float | None = None
    ) -> int:
        return max(0, int((budget - self.step_time(shape)) / self.per_token))

    def observe(self, shape: BatchShape, seconds: float) -> None: ...


@dataclass(frozen=True)
class FakeCase:
    """One replica with an affine step time. With one request at a time it is a server with fixed service."""

    fixed: float = 1.0
    per_token: float = 0.0
    max_num_seqs: int = 1
    token_budget: int = PROMPT
    policy: str = "sarathi"
    num_blocks: int = 4096
    labels: Labels = ()
    error: str = ""

    def build(self) -> BuiltCase:
        if self.error:
            raise ConfigError(self.error)
        scheduler = SchedulerConfig(
            num_blocks=self.num_blocks,
            max_model_len=min(4096, self.num_blocks * 16),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.token_budget,
            policy=self.policy,
            enable_prefix_caching=False,
        )
        return BuiltCase(SimulationConfig(scheduler=scheduler), AffineStep(self.fixed, self.per_token), 2)


def make_load(
    num_requests: int,
    *,
    seed: int | None = None,
    prompt: int = PROMPT,
    output: int = 1,
    slo: SLO | None = None,
) -> OfferedLoad:
    """Return equal requests at one a second: evenly spaced, or Poisson with a seed."""
    if seed is None:
        arrivals = np.arange(1, num_requests + 1, dtype=np.float64)
    else:
        gaps = np.random.default_rng(seed).exponential(size=num_requests)
        arrivals = np.cumsum(gaps) * num_requests / gaps.sum()
    load = OfferedLoad(
        name="fake",
        num_prompt_tokens=np.full(num_requests, prompt, dtype=np.int64),
        num_output_tokens=np.full(num_requests, output, dtype=np.int64),
        arrivals=arrivals,
    )
    return load if slo is None else load.with_classes([SLOClass(name="all", slo=slo)], seed=0)


def make_record(
    times: Iterable[float], *, arrival: float = 0.0, scheduled: float | None = 0.0, slo: SLO | None = None
) -> RequestRecord:
    """Return a completed request with one token at each time."""
    deliveries = array("d", times)
    return RequestRecord(
        request_id="r",
        arrival=arrival,
        num_prompt_tokens=10,
        slo=slo,
        scheduled=scheduled,
        delivery_times=deliveries,
        delivery_sizes=array("I", [1] * len(deliveries)),
        end=deliveries[-1],
        finish_reason="length",
        num_output_tokens=len(deliveries),
    )


def make_result(records: list[RequestRecord], *, num_requests: int | None = None) -> SimulationResult:
    return SimulationResult(
        records=records,
        num_requests=len(records) if num_requests is None else num_requests,
        duration=max((record.end for record in records), default=0.0),
        wall_seconds=0.0,
        is_complete=True,
    )


@dataclass
class Hearing:
    """What a task says while it runs."""

    events: list[object] = field(default_factory=list)
    is_stop_wanted: bool = False
    most_events: float = inf
    """After so many it is asked to end."""

    @property
    def context(self) -> TaskContext:
        return TaskContext(self.events.append, lambda: len(self.events) >= self.most_events, self._stop)

    def _stop(self) -> None:
        self.is_stop_wanted = True


def quiet() -> TaskContext:
    """Return a context that nobody listens to."""
    return Hearing().context
