"""What the studies of policies share: loads, runs, checks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onbeat.simulator.result import SimulationResult
from onbeat.simulator.settings import ReplicaSettings
from onbeat.simulator.setup import build_simulation
from onbeat.simulator.simulate import simulate
from onbeat.workload.arrivals import poisson_arrivals
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.trace import Trace

SEEDS = (0, 1, 2)
A100 = "a100-80-sxm"


@dataclass(frozen=True)
class Options:
    data: Path
    jobs: int


def drawn_load(trace: Trace, *, num_requests: int, seed: int, rate: float = 1.0) -> OfferedLoad:
    """Return Poisson arrivals with lengths drawn from a trace."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(len(trace), size=num_requests)
    return OfferedLoad(
        name="drawn",
        arrivals=poisson_arrivals(num_requests, rate=rate, rng=rng),
        num_prompt_tokens=np.maximum(1, trace.num_prompt_tokens[rows]),
        num_output_tokens=np.maximum(1, trace.num_output_tokens[rows]),
    )


def run(load: OfferedLoad, settings: ReplicaSettings) -> SimulationResult:
    simulation = build_simulation(settings)
    return simulate(load, simulation.config, simulation.step_time)


def check(text: str, *, holds: bool) -> None:
    print(f"{'holds' if holds else 'DOES NOT HOLD'}: {text}")
