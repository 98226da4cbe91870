"""Small loads and step-time models for the simulator's tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np

from onbeat.core.step import BatchShape, SchedulerOutput
from onbeat.core.step_stats import StepStats
from onbeat.core.step_time import StepTimeModel
from onbeat.metrics.record import RequestRecord
from onbeat.perfmodel.predictor import Predictor, ResidualModel
from onbeat.scheduler.cluster.fleet_config import FleetConfig
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.simulator.result import SimulationObserver
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.workload.offered import OfferedLoad


class ShapeTime(StepTimeModel):
    """A step-time model from a function of the shape."""

    def __init__(self, seconds: Callable[[BatchShape], float]) -> None:
        self.seconds = seconds
        self.num_predictions = 0

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        self.num_predictions += 1
        return self.seconds(shape)

    def max_chunk_tokens(self, shape, cached_tokens, budget, q=None) -> int:
        raise NotImplementedError

    def observe(self, shape: BatchShape, seconds: float) -> None:
        raise AssertionError("the simulator teaches the model nothing")

    def with_learning(self) -> Predictor:
        """Return a model for a scheduler of its own, which may ask and teach it anything."""
        return Predictor(self.seconds, ResidualModel.log_normal(0.0)).with_learning()


def linear_time() -> ShapeTime:
    """Weights, compute and context, in the proportions of a real device."""
    return ShapeTime(
        lambda shape: 5e-3 + 2.7e-5 * shape.num_new_tokens + 4.7e-8 * shape.decode_context_tokens
    )


class StepByStep(SimulationObserver):
    """An observer that wants every step, and keeps them."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, StepStats]] = []
        self.requests: list[RequestRecord] = []
        self.finished: list[RequestRecord] = []

    def on_request(self, record: RequestRecord) -> None:
        self.requests.append(record)

    def on_step(self, replica: int, stats: StepStats) -> None:
        self.steps.append((replica, stats))

    def on_finish(self, record: RequestRecord) -> None:
        self.finished.append(record)


class HearsOfRequests(StepByStep):
    """An observer that leaves runs of steps together."""

    wants_steps = False


def count_plans(monkeypatch) -> list[float]:
    """Return a list that gets the time of each plan from now on."""
    plans: list[float] = []
    schedule = Scheduler.schedule

    def counted(scheduler: Scheduler, now: float) -> SchedulerOutput | None:
        plans.append(now)
        return schedule(scheduler, now)

    monkeypatch.setattr(Scheduler, "schedule", counted)
    return plans


def make_load(prompts, outputs, arrivals=None, **columns) -> OfferedLoad:
    return OfferedLoad(
        name="test",
        num_prompt_tokens=np.asarray(prompts, dtype=np.int64),
        num_output_tokens=np.asarray(outputs, dtype=np.int64),
        arrivals=None if arrivals is None else np.asarray(arrivals, dtype=np.float64),
        **columns,
    )


def random_load(num_requests: int, *, rate: float, seed: int, prompt=60, output=40) -> OfferedLoad:
    rng = np.random.default_rng(seed)
    return make_load(
        rng.integers(1, prompt, num_requests),
        rng.integers(1, output, num_requests),
        np.cumsum(rng.exponential(1 / rate, num_requests)),
    )


def make_config(policy: str = "sarathi", *, scheduler=None, **changes) -> SimulationConfig:
    limits = {
        "num_blocks": 64,
        "block_size": 16,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256 if POLICIES[policy].whole_prompts else 32,
        "policy": policy,
    }
    return fleet_config(SchedulerConfig(**(limits | (scheduler or {}))), **changes)


def fleet_config(scheduler: SchedulerConfig, **changes) -> SimulationConfig:
    """Return a configuration from its fields and from those of its fleet."""
    names = {each.name for each in fields(FleetConfig)} - {"kinds"}
    fleet = FleetConfig(**{name: changes.pop(name) for name in names & changes.keys()})
    scheduler = replace(scheduler, num_micro_batches=changes.pop("pipeline", scheduler.num_micro_batches))
    return SimulationConfig(scheduler=scheduler, fleet=fleet, **changes)
