"""Set-ups of the policy papers, small enough for tests."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from onbeat.core.options import change, make
from onbeat.metrics.distribution import percentile
from onbeat.metrics.summary import collect_samples
from onbeat.planner.capacity import CapacityTask, find_capacity
from onbeat.planner.cases import ReplicaCase
from onbeat.planner.objectives import sarathi
from onbeat.planner.parallel import Pool
from onbeat.planner.search import SearchOptions
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve
from onbeat.simulator.result import SimulationResult
from onbeat.simulator.simulate import simulate
from onbeat.workload.arrivals import gamma_arrivals
from onbeat.workload.offered import OfferedLoad

Tokens = NDArray[np.int64]

A100 = "a100-80-sxm"
MISTRAL = make(Deployment, model="mistralai/Mistral-7B-v0.1", device=A100, max_model_len=8192)
YI = make(Deployment, model="01-ai/Yi-34B-200K", device=A100, tensor_parallel=2, max_model_len=8192)


def shared_data() -> Path:
    """Return the folder of public traces; skip where there is none."""
    folder = os.environ.get("ONBEAT_SHARED")
    if not folder:
        pytest.skip("ONBEAT_SHARED names the folder of recorded traces")
    return Path(folder) / "data"


def chat_lengths(num_requests: int, *, max_tokens: int, seed: int) -> tuple[Tokens, Tokens]:
    """Return (prompt, output) tokens like those of ShareGPT's conversations in Sarathi-Serve's table 2.

    Log-normal through the published medians and 90th percentiles: 1730 and 5696 in, 415 and 834 out.
    """
    rng = np.random.default_rng(seed)
    drawn = (4 * num_requests, 2)
    lengths = np.ceil(np.exp(rng.normal(np.log([1730, 415]), [0.93, 0.545], drawn))).astype(int)
    prompts, outputs = lengths[lengths.sum(axis=1) <= max_tokens][:num_requests].T
    assert len(prompts) == num_requests
    return prompts, outputs


def chat_load(num_requests: int, *, rate: float = 1.0, max_tokens: int = 8192, seed: int = 0) -> OfferedLoad:
    prompts, outputs = chat_lengths(num_requests, max_tokens=max_tokens, seed=seed)
    return OfferedLoad(
        name="chat",
        arrivals=gamma_arrivals(num_requests, rate=rate, rng=np.random.default_rng(seed + 1000)),
        num_prompt_tokens=prompts,
        num_output_tokens=outputs,
    )


@dataclass(frozen=True)
class Server:
    """A policy with its limits."""

    policy: str
    max_num_seqs: int
    budget: int

    @property
    def settings(self) -> Deployment:
        return change(
            MISTRAL,
            policy=self.policy,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
        )


@lru_cache
def chat_capacity(server: Server, tbt: float) -> float:
    """Return the highest rate that keeps the paper's objective (`keeps_objective`), within 5 %."""
    task = CapacityTask(
        case=ReplicaCase(settings=server.settings),
        load=chat_load(300),
        objective=sarathi(tbt),
        options=SearchOptions(tolerance=0.05),
    )
    [found] = Pool(1).run(find_capacity, [task])
    assert found is not None
    assert found.bracket is not None, found.reason
    return found.bracket.low


def keeps_objective(server: Server, rate: float, tbt: float) -> bool:
    """Return whether P99 TBT is within `tbt` and the median scheduling delay at most 2 s."""
    records = run(chat_load(300, rate=rate), server.settings).records
    delay = np.median([not_none(record.scheduled) - record.arrival for record in records])
    return percentile(collect_samples(records)["itl"], 99) <= tbt and bool(delay <= 2.0)


def not_none(value: float | None) -> float:
    assert value is not None
    return value


LATENCY_FACTOR = 5.0
NUM_IDLE_REQUESTS = 50
RATE_TOLERANCE = 1.1


def run(load: OfferedLoad, settings: Deployment) -> SimulationResult:
    simulation = resolve(settings)
    return simulate(load, simulation.config, simulation.step_time)


def orca_load(lengths: str, seed: int, num_requests: int) -> OfferedLoad:
    """Return Orca's lengths: uniform ones, or one for all."""
    rng = np.random.default_rng(seed)
    is_uniform = lengths == "uniform"
    return OfferedLoad(
        name=lengths,
        arrivals=gamma_arrivals(num_requests, rate=1.0, rng=rng),
        num_prompt_tokens=rng.integers(32, 513, num_requests) if is_uniform else np.full(num_requests, 272),
        num_output_tokens=rng.integers(1, 129, num_requests) if is_uniform else np.full(num_requests, 64),
    )


def latency(load: OfferedLoad, settings: Deployment) -> float:
    """Return the median of latency per output token, seconds."""
    records = run(load, settings).records
    return float(np.median([record.e2e / record.num_output_tokens for record in records]))


def most_latency(load: OfferedLoad, settings: Deployment) -> float:
    """Return 5 times what a load's first requests take, each alone on the machine."""
    alone = load.at_rate(0.01).take(np.arange(NUM_IDLE_REQUESTS))
    return LATENCY_FACTOR * latency(alone, settings)


def rate_at_latency(load: OfferedLoad, settings: Deployment) -> float:
    """Return the highest rate that keeps the latency (`keeps_latency`), at most 10 % too low."""
    limit = most_latency(load, settings)
    low, high = 0.1, 50.0
    while high > RATE_TOLERANCE * low:
        middle = (low * high) ** 0.5
        fits = latency(load.at_rate(middle), settings) <= limit
        low, high = (middle, high) if fits else (low, middle)
    return low


def keeps_latency(load: OfferedLoad, settings: Deployment, rate: float) -> bool:
    """Return whether the normalised latency at a rate is within 5 times the idle machine's."""
    return latency(load.at_rate(rate), settings) <= most_latency(load, settings)
