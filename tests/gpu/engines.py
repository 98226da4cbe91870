"""Forward passes of the GPU engine on a device, and a sampler that gives any two of them the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from onbeat.engine.backends.torch import fast_kernels
from onbeat.engine.cuda.forward import CudaForward, CudaOptions, kernel_sizes
from onbeat.engine.cuda.graphs import CudaGraphs, EagerGraphs, Graphs, piece_sizes
from onbeat.engine.draw import Logits
from onbeat.engine.sampled import BestTokens, SampledTokens
from onbeat.engine.sampling_row import SamplingRow
from onbeat.engine.torch.kernels import ChunkBackend
from onbeat.engine.torch.weights import TorchWeights
from tests.cpu.engine.forwards import MakeForward
from tests.cpu.engine.reference_kernels import ReferenceKernels
from tests.cpu.engine.seeing_sampler import SeesLogits
from tests.cpu.engine.step_driver import StepDriver

NUM_DRAFTS = 3
"""Of each row in steps that verify, which are graphs where others are in pieces."""


def graphs_on(device: torch.device) -> Graphs:
    """Return captured graphs on a GPU, calls on a CPU."""
    return CudaGraphs(device) if device.type == "cuda" else EagerGraphs()


def on_gpu_engine(
    weights: TorchWeights,
    *,
    graphs: bool = True,
    pieces: bool = False,
    fast: bool = False,
    chunk_backend: ChunkBackend = "fa2",
    max_num_seqs: int = 32,
    max_model_len: int = 512,
    max_num_batched_tokens: int = 1024,
) -> MakeForward:
    """Return what makes forward passes of the GPU engine where the weights are."""

    def make(*, num_blocks: int, block_size: int) -> CudaForward:
        options = CudaOptions(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            piece_sizes=piece_sizes(max_num_batched_tokens) if pieces else (),
            verify_widths=(1 + NUM_DRAFTS,) if pieces else (),
        )
        sizes = kernel_sizes(weights, options)
        quick = partial(fast_kernels, chunk_backend=chunk_backend)
        kernels = quick(sizes) if fast else ReferenceKernels(sizes)
        chosen = graphs_on(weights.device) if graphs else EagerGraphs()
        return CudaForward(weights, kernels, chosen, options)

    return make


class FixedTokens(SeesLogits):
    """Keeps the logits, and chooses tokens that do not depend on them: two engines see the same contexts."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.logits: list[torch.Tensor] = []
        self.best: list[list[int]] = []

    def sample(
        self, logits_RV: Logits | None, rows: Sequence[SamplingRow], best: BestTokens | None = None
    ) -> SampledTokens:
        assert logits_RV is not None
        self.logits.append(torch.from_numpy(logits_RV.astype(np.float32)))
        if best is not None:
            self.best.append(best.ids_R.tolist())
        ids = [(7919 * row.position + len(row.prompt_token_ids)) % self.vocab_size for row in rows]
        return SampledTokens(ids, [None] * len(rows))


def run_fixed(
    make: MakeForward,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    chunk: int,
    max_model_len: int = 512,
    max_num_seqs: int = 32,
) -> tuple[list[torch.Tensor], FixedTokens]:
    """Run prompts and some fixed tokens behind them; returns the logits of each, [tokens, V]."""
    num_blocks = sum(-(-(len(prompt) + num_tokens + 1) // 16) for prompt in prompts) + 1
    driver = StepDriver(make, num_blocks=num_blocks, max_model_len=max_model_len, max_num_seqs=max_num_seqs)
    sampler = FixedTokens(driver.runner.forward.config.vocab_size)
    driver.sampler = sampler  # type: ignore[assignment]
    driver.runner.sampler = sampler
    for prompt in prompts:
        driver.add(list(prompt), num_tokens)
    driver.run(chunk)
    return [torch.stack(live.logits) for live in driver.requests.values()], sampler


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |actual - expected| / |expected|; NaN where anything is."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
