"""Engines that draft with models: tiny targets in float32, drafts near them, and what a run gave."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from onbeat.core.request import Request, SamplingParams
from onbeat.engine.core import EngineCore
from onbeat.engine.executor import ThreadExecutor
from onbeat.engine.forward import ForwardPass, StepLogits
from onbeat.engine.input_batch import StepInputs
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.native.library import NativeLibrary
from onbeat.engine.sampler import Sampler
from onbeat.engine.speculation.draft_model import DraftModelProposer
from onbeat.engine.speculation.proposer import Proposer
from onbeat.engine.torch.forward import TorchForward
from onbeat.engine.torch.weights import TorchWeights, load_weights
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig, SpeculationConfig
from tests.cpu.engine.engines import CudaEngine, NativeEngine, TinyEngine
from tests.cpu.engine.forwards import MakeForward, on_cuda_engine, on_native, on_torch
from tests.cpu.engine.tiny_models import StateCheckpoint, hf_tiny_model, random_prompt

VOCAB_SIZE = 211
MAX_MODEL_LEN = 160
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)

MakeProposer = Callable[[ForwardPass, SchedulerConfig], Proposer]


def make_near(engine: TinyEngine, name: str, noise: float = 0.0) -> MakeForward:
    """Return what makes forward passes, in float32, of a tiny model whose weights are off by some noise."""
    library = engine.library if isinstance(engine, NativeEngine) else None
    return _make_near(library, isinstance(engine, CudaEngine), name, noise)


@functools.cache
def _make_near(library: NativeLibrary | None, on_cuda: bool, name: str, noise: float) -> MakeForward:
    hf_model = hf_tiny_model(name, torch.float32)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in hf_model.parameters():
            parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    checkpoint = StateCheckpoint(hf_model)
    if library is not None:
        return on_native(library, checkpoint, dtype=torch.float32)
    if on_cuda:
        return on_cuda_engine(checkpoint, dtype=torch.float32)
    return on_torch(load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu")))


def by_draft_model(make_draft: MakeForward, max_catch_up_tokens: int = 256) -> MakeProposer:
    """Return what makes a proposer with a model of its own."""

    def make(forward: ForwardPass, limits: SchedulerConfig) -> Proposer:
        return DraftModelProposer(
            make_draft(num_blocks=limits.num_blocks, block_size=limits.block_size),
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            vocab_size=forward.config.vocab_size,
            max_catch_up_tokens=max_catch_up_tokens,
        )

    return make


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to serve; see `SchedulerConfig`."""

    num_drafts: int = 3
    """Of each row in each step."""
    depth: int = 1
    """Steps in flight."""
    budget: int = 64
    num_blocks: int = 400
    max_num_seqs: int = 8
    repeats: int = 1
    """How often the whole set is sent; from the second time on the prefix cache holds it."""
    is_cached: bool = True

    def __str__(self) -> str:
        return "-".join(str(value) for value in (self.num_drafts, self.depth, self.num_blocks, self.repeats))


@dataclass
class Outcome:
    tokens: list[list[int]]
    num_drafted: int
    num_accepted: int
    num_preemptions: int
    num_prefix_hits: int
    num_mixed_steps: int
    num_steps: int

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_drafted


def serve(
    make_forward: MakeForward,
    make_proposer: MakeProposer | None,
    requests: Sequence[tuple[Sequence[int], SamplingParams]],
    setting: Setting,
) -> Outcome:
    """Run requests through scheduler and model runner; without a proposer nothing is speculated."""
    limits = SchedulerConfig(
        policy="sarathi",
        num_blocks=setting.num_blocks,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.budget,
        enable_prefix_caching=setting.is_cached,
        speculation=None
        if make_proposer is None
        else SpeculationConfig(
            num_speculative_tokens=setting.num_drafts, draft_length="fixed", runs_model=True
        ),
    )
    forward = make_forward(num_blocks=limits.num_blocks, block_size=limits.block_size)
    proposer = None if make_proposer is None else make_proposer(forward, limits)
    sampler = Sampler(forward.config.vocab_size)
    runner = ModelRunner(limits, forward, sampler, proposer)
    scheduler = Scheduler(limits)
    core = EngineCore(scheduler, ThreadExecutor(runner), max_in_flight_steps=setting.depth)
    outcome = Outcome([], 0, 0, 0, 0, 0, 0)
    for repeat in range(setting.repeats):
        outcome.tokens += _run(core, requests, f"{repeat}-", outcome)
    scheduler.check_invariants()
    assert scheduler.kv.pool.num_used_blocks == 0
    core.shutdown()
    outcome.num_preemptions = scheduler.table.num_preemptions
    outcome.num_prefix_hits = scheduler.table.num_prefix_hits
    return outcome


def _run(
    core: EngineCore, requests: Sequence[tuple[Sequence[int], SamplingParams]], prefix: str, outcome: Outcome
) -> list[list[int]]:
    """Send a request every second step, so that prompts, drafts and decodes meet; add to the outcome."""
    tokens: dict[str, list[int]] = {f"{prefix}{index}": [] for index in range(len(requests))}
    drafted: dict[str, tuple[int, int]] = {}
    pending = list(enumerate(requests))
    num_steps = 0
    while pending or core.has_work:
        if pending and num_steps % 2 == 0:
            index, (prompt, sampling) = pending.pop(0)
            core.add(
                Request(request_id=f"{prefix}{index}", prompt_token_ids=tuple(prompt), sampling=sampling)
            )
        num_steps += 1
        message = core.step()
        if message is None:
            continue
        assert message.stats is not None
        shape = message.stats.shape
        outcome.num_mixed_steps += bool(shape.num_chunks and shape.num_draft_tokens)
        for output in message.outputs:
            assert output.error is None, output.error
            tokens[output.request_id] += output.new_token_ids
            drafted[output.request_id] = (output.num_drafted_tokens, output.num_accepted_tokens)
    outcome.num_steps += num_steps
    outcome.num_drafted += sum(num for num, _ in drafted.values())
    outcome.num_accepted += sum(num for _, num in drafted.values())
    return list(tokens.values())


def prompts(
    lengths: Sequence[int], sampling: SamplingParams = GREEDY
) -> list[tuple[list[int], SamplingParams]]:
    return [(random_prompt(length), sampling) for length in lengths]


class CountingForward(TorchForward):
    """A forward pass that notes the rows' new tokens of each pass, largest first."""

    def __init__(self, weights: TorchWeights, *, num_blocks: int, block_size: int) -> None:
        super().__init__(weights, num_blocks=num_blocks, block_size=block_size)
        self.passes: list[list[int]] = []

    def run(self, inputs: StepInputs, *, wants_logits: bool) -> StepLogits:
        self.passes.append(sorted(inputs.attention.query_lens_R.tolist(), reverse=True))
        return super().run(inputs, wants_logits=wants_logits)

    def take(self) -> list[list[int]]:
        """Return the passes since the last call."""
        passes, self.passes = self.passes, []
        return passes
