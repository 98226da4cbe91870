"""MLCEngine's set-up: a closed loop on Llama-3-70B with an 8B draft model, both fp8, on four H100.

The MLC community's post "Optimizing and Characterizing High-Throughput Low-Latency LLM Inference in
MLCEngine" (blog.mlc.ai, October 2024): three drafts cut the latency by more than 25 % at low concurrency, and
at high concurrency they gain nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onbeat.core.options import make
from onbeat.core.step_time import StepTimeModel
from onbeat.perfmodel.model_sizes import ModelSpec
from onbeat.perfmodel.models import make_step_time_model
from onbeat.perfmodel.predictor import Predictor
from onbeat.perfmodel.speculative import SpeculativeStepTime
from onbeat.simulator.draft_acceptance import Acceptance
from onbeat.simulator.settings import ReplicaSettings
from onbeat.simulator.setup import Simulation, build_simulation
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import SimulationConfig
from onbeat.simulator.speculation import SpeculationSettings
from onbeat.workload.load_source import conversation_lengths
from onbeat.workload.offered import OfferedLoad

CONCURRENCIES = (1, 4, 8, 10, 16, 20, 30, 64, 128)
NUM_DRAFTS = 3
ACCEPTANCE = 0.7
OFF, FIXED, ADAPTIVE = "off", "fixed 3", "adaptive"
MODES = (OFF, FIXED, ADAPTIVE)
VARIANTS = {"roofline": 0.0, "with host": 80e-6}
"""Seconds that a forward pass takes for each of its sequences beside the device's work. 80 us describe
MLCEngine on Llama-3-8B; every pass of either model takes them here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRun:
    """One run: so many users, each with one request under way."""

    variant: str
    concurrency: int
    mode: str
    num_requests: int
    seed: int = 0

    def run(self) -> dict[str, float]:
        """Return the mean TPOT, seconds, output tokens per second, and the tokens of a decode row."""
        simulation = build(self.mode, max_concurrency=self.concurrency, seed=self.seed)
        config, step_time = with_host(simulation, VARIANTS[self.variant])
        result = simulate(make_load(self.num_requests, self.seed), config, step_time)
        tpots = [record.tpot for record in result.records if record.tpot is not None]
        return {
            "tpot": float(np.mean(tpots)),
            "throughput": sum(record.num_output_tokens for record in result.records) / result.duration,
            "tokens_per_row": 1.0 if result.drafts is None else result.drafts.tokens_per_row,
        }


def num_requests(concurrency: int, *, scale: float = 1.0) -> int:
    """Return how many requests a level gets: several for each user, but enough for a mean."""
    return max(concurrency, round(scale * max(40, 4 * concurrency)))


def build(mode: str, *, max_concurrency: int, seed: int) -> Simulation:
    speculation = None
    if mode != OFF:
        speculation = SpeculationSettings(
            num_speculative_tokens=NUM_DRAFTS,
            is_adaptive=mode == ADAPTIVE,
            draft_model="meta-llama/Meta-Llama-3-8B",
            acceptance=Acceptance(rate=ACCEPTANCE),
        )
    return build_simulation(
        make(
            ReplicaSettings,
            model="meta-llama/Meta-Llama-3-70B",
            device="h100-sxm",
            dtype="fp8",
            tensor_parallel=4,
            policy="sarathi",
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            max_concurrency=max_concurrency,
            speculation=speculation,
            seed=seed,
        )
    )


def with_host(simulation: Simulation, per_row: float) -> tuple[SimulationConfig, StepTimeModel]:
    """Return what a run needs where each sequence of a forward pass takes so many seconds more."""

    def predictor(model: ModelSpec) -> Predictor:
        roofline = make_step_time_model(
            "roofline",
            model=model,
            device=simulation.device,
            parallelism=simulation.parallelism,
            precision=simulation.precision,
        )
        return Predictor(lambda shape: roofline.step_time(shape) + per_row * shape.num_sequences)

    target = predictor(simulation.model)
    if simulation.draft is None:
        return simulation.config, target
    draft = predictor(simulation.draft)
    return simulation.config, SpeculativeStepTime(target, draft)


def make_load(num_requests: int, seed: int) -> OfferedLoad:
    rng = np.random.default_rng(seed)
    prompts = conversation_lengths(306, 1.0).draw(num_requests, rng)
    outputs = conversation_lengths(500, 0.7).draw(num_requests, rng)
    return OfferedLoad(
        name="conversations",
        arrivals=None,
        num_prompt_tokens=prompts,
        num_output_tokens=np.maximum(2, outputs),
    )
