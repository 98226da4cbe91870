"""Whole steps with the operators in Triton, interpreted, and attention in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: make test-triton")

from onbeat.engine.cuda import triton_draw, triton_ops
from onbeat.engine.cuda.forward import CudaForward, CudaOptions, kernel_sizes
from onbeat.engine.cuda.graphs import EagerGraphs
from onbeat.engine.cuda.kernels import BestBuffers, LayerSpec, Norm, StepTensors
from onbeat.engine.cuda.reference import ReferenceKernels
from onbeat.engine.cuda.weights import load_weights
from onbeat.engine.kv_cache import LayerKVCache
from onbeat.engine.model_config import Activation
from tests.cpu.engine.step_driver import StepDriver
from tests.cpu.engine.tiny_models import StateCheckpoint, hf_tiny_model, random_prompt, tiny_model


class InterpretedKernels(ReferenceKernels):
    """As `FastKernels`, but for attention, which FlashInfer computes on GPUs alone."""

    def add_norm(self, x_TD: Tensor | None, residual_TD: Tensor, norm: Norm, out_TD: Tensor) -> None:
        triton_ops.add_norm(x_TD, residual_TD, norm, out_TD)

    def rope_store(
        self, qkv_TX: Tensor, step: StepTensors, layer: LayerSpec, kv: LayerKVCache, q_TNH: Tensor
    ) -> None:
        triton_ops.rope_store(qkv_TX, step, layer, kv, q_TNH)

    def act_mul(self, gate_up_TF2: Tensor, activation: Activation, out_TF: Tensor) -> None:
        triton_ops.act_mul(gate_up_TF2, activation, out_TF)

    def best(self, logits_RV: Tensor, out: BestBuffers) -> None:
        triton_draw.best(logits_RV, out)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # infinities, in the interpreter
@pytest.mark.parametrize("name", ["llama3", "mistral-sliding", "gemma3"])
def test_steps_compute_what_the_reference_computes(name: str) -> None:
    """Chunks, decodes and both in one step; padding rows; norms and windows of each family."""
    weights = load_weights(
        StateCheckpoint(hf_tiny_model(name, torch.float64)), torch.float32, torch.device("cpu")
    )

    def make(*, num_blocks: int, block_size: int) -> CudaForward:
        options = CudaOptions(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=4,
            max_model_len=64,
            max_num_batched_tokens=32,
        )
        kernels = InterpretedKernels(kernel_sizes(weights, options))
        return CudaForward(weights, kernels, EagerGraphs(), options)

    driver = StepDriver(make, max_model_len=64, max_num_seqs=4, num_blocks=16)
    for length in (2, 21, 9):
        driver.add(random_prompt(length), 4)
    driver.run(8)
    for live in driver.requests.values():
        token_ids, logits = tiny_model(name).reference(live.request.prompt_token_ids, 4)
        assert live.output_token_ids == token_ids
        torch.testing.assert_close(torch.stack(live.logits).double(), logits, rtol=0, atol=1e-3)
