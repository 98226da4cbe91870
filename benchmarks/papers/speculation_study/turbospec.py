"""TurboSpec's comparison: mean latency with adaptive drafts, with fixed ones and without, at Poisson rates.

Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput", arXiv
2406.14066. Step times and drafting costs are the authors' own coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.papers.linear import LINEAR_SIGMA, turbospec_speculation
from onbeat.perfmodel.predictor import Predictor
from onbeat.perfmodel.residual import ResidualModel
from onbeat.scheduler.config import SchedulerConfig, SpeculationConfig
from onbeat.simulator.draft_acceptance import Acceptance
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.workload.arrivals import poisson_arrivals
from onbeat.workload.load_source import conversation_lengths
from onbeat.workload.offered import OfferedLoad

COEFFICIENTS = Path("data", "profiles", "turbospec", "latency_coefficients.csv")
"""In the folder of public data."""
RATES = (1, 2, 4, 8, 16)
"""Requests per second."""
ACCEPTANCES = (0.5, 0.7, 0.9)
FIXED = (1, 3, 5, 7)
NONE, ADAPTIVE = "none", "adaptive"
MODES = (NONE, *(f"fixed {k}" for k in FIXED), ADAPTIVE)
MOST_DRAFTS = max(FIXED)
MEAN_TOKENS = 300
"""Of prompts and of outputs, log-normal as of conversations."""


@dataclass(frozen=True, slots=True)
class Server:
    """One deployment of the published regression."""

    model: str
    tensor: int
    method: str

    @property
    def runs_model(self) -> bool:
        return self.method != "ngram"


SERVERS = {
    "Llama-8B, EAGLE": Server("llama-8b", 1, "eagle"),
    "Llama-70B TP 4, n-gram": Server("llama-70b", 4, "ngram"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyRun:
    """One run: a deployment, a rate, an acceptance, and how drafts are planned."""

    server: str
    rate: int
    acceptance: float
    mode: str
    num_requests: int
    coefficients: Path
    seed: int = 0

    def run(self) -> dict[str, float]:
        """Return the mean latency, seconds, and the tokens of a decode row."""
        server = SERVERS[self.server]
        seconds = turbospec_speculation(
            self.coefficients, model=server.model, tensor=server.tensor, method=server.method
        )
        result = simulate(
            make_load(self.rate, self.num_requests, self.seed),
            make_config(speculation_of(self.mode, server), acceptance=self.acceptance, seed=self.seed),
            Predictor(seconds, ResidualModel.log_normal(LINEAR_SIGMA)),
        )
        return {
            "latency": float(np.mean([record.e2e for record in result.records])),
            "tokens_per_row": 1.0 if result.drafts is None else result.drafts.tokens_per_row,
        }


def num_requests(rate: int, *, scale: float = 1.0) -> int:
    """Return how many requests a rate gets: half a minute of them, but enough for a mean."""
    return round(scale * max(100, 30 * rate))


def speculation_of(mode: str, server: Server) -> SpeculationConfig | None:
    if mode == NONE:
        return None
    most = SpeculationConfig(num_speculative_tokens=MOST_DRAFTS, runs_model=server.runs_model)
    if mode == ADAPTIVE:
        return most
    return replace(most, num_speculative_tokens=int(mode.removeprefix("fixed ")), draft_length="fixed")


def make_config(speculation: SpeculationConfig | None, *, acceptance: float, seed: int) -> SimulationConfig:
    limits = SchedulerConfig(
        policy="sarathi",
        num_blocks=26_000,
        max_model_len=8192,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        speculation=speculation,
    )
    return SimulationConfig(scheduler=limits, acceptance=Acceptance(rate=acceptance), seed=seed)


def make_load(rate: float, num_requests: int, seed: int) -> OfferedLoad:
    rng = np.random.default_rng(seed)
    prompts = conversation_lengths(MEAN_TOKENS, 1.0).draw(num_requests, rng)
    outputs = conversation_lengths(MEAN_TOKENS, 0.7).draw(num_requests, rng)
    return OfferedLoad(
        name="conversations",
        arrivals=poisson_arrivals(num_requests, rate=rate, rng=rng),
        num_prompt_tokens=prompts,
        num_output_tokens=np.maximum(2, outputs),
    )
