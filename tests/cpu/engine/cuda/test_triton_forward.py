"""Whole steps with the operators in Triton, interpreted, and attention in plain torch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: make test-triton")

from onbeat.engine.cuda import triton_draw, triton_ops
from onbeat.engine.cuda.fast import FastKernels
from onbeat.engine.model_config.architecture import Activation
from onbeat.engine.torch.kernels import BestBuffers, DrawParams, LayerSpec, Norm, StepTensors
from onbeat.engine.torch.kv import LayerKVCache
from onbeat.engine.torch.weights import load_weights
from tests.cpu.engine.cuda.recorded_flashinfer import Recorder, numbers
from tests.cpu.engine.cuda.test_copied_logits import check_drafts
from tests.cpu.engine.cuda.test_overlap import SETTINGS, requests_of
from tests.cpu.engine.forwards import on_kernels
from tests.cpu.engine.reference_kernels import ReferenceKernels
from tests.cpu.engine.step_driver import StepDriver
from tests.cpu.engine.tiny_models import StateCheckpoint, hf_tiny_model, random_prompt, tiny_model

SMALL = {"max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 32}


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

    def draw(self, logits_RV: Tensor, params: DrawParams, best: BestBuffers, ids_R: Tensor) -> None:
        triton_draw.draw(logits_RV, params, best, ids_R)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # infinities, in the interpreter
@pytest.mark.parametrize("piece_sizes", [(), (8, 32)])
@pytest.mark.parametrize("name", ["llama3", "mistral-sliding", "gemma3"])
def test_steps_compute_what_the_reference_computes(name: str, piece_sizes: tuple[int, ...]) -> None:
    """Chunks, decodes and both in one step; padding rows; norms and windows of each family."""
    weights = load_weights(
        StateCheckpoint(hf_tiny_model(name, torch.float64)), torch.float32, torch.device("cpu")
    )

    make = on_kernels(weights, InterpretedKernels, **SMALL, piece_sizes=piece_sizes)
    driver = StepDriver(make, max_model_len=64, max_num_seqs=4, num_blocks=16)
    for length in (2, 21, 9):
        driver.add(random_prompt(length), 4)
    driver.run(8)
    for live in driver.requests.values():
        token_ids, logits = tiny_model(name).reference(live.request.prompt_token_ids, 4)
        assert live.output_token_ids == token_ids
        torch.testing.assert_close(torch.stack(live.logits).double(), logits, rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_drafts_are_verified_by_tokens_that_the_kernels_draw() -> None:
    """In a step are rows with drafts and without, greedy ones and such as draw by each rule."""
    checkpoint = StateCheckpoint(hf_tiny_model("llama3", torch.float64))
    weights = load_weights(checkpoint, torch.float32, torch.device("cpu"))

    sizes = {"max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 96}
    check_drafts(on_kernels(weights, InterpretedKernels, **sizes), requests_of(SETTINGS, 8), 3)


def recorded_driver(recorder: Recorder) -> StepDriver:
    """Return what drives steps of a model with two kinds of layers; FlashInfer only notes its calls."""
    checkpoint = StateCheckpoint(hf_tiny_model("gemma3", torch.float64))
    weights = load_weights(checkpoint, torch.float32, torch.device("cpu"))

    make = on_kernels(weights, partial(FastKernels, library=recorder.library()), **SMALL)
    return StepDriver(make, max_model_len=64, max_num_seqs=4, num_blocks=16)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_planned_decodes_are_planned_for_each_window_before_their_step() -> None:
    """Decodes that share a step with chunks are chunks of one token."""
    recorder = Recorder()
    driver = recorded_driver(recorder)
    short, long = (driver.add(random_prompt(length), 3) for length in (5, 21))
    driver.step({short: 5})
    recorder.calls.clear()
    driver.step({short: 1, long: 8})
    called = [name for name, _ in recorder.calls]
    assert called == ["prefill plan"] * 2 + ["prefill run"] * 3
    plans, attended = (
        [arguments for name, arguments in recorder.calls if name == wanted]
        for wanted in ("prefill plan", "prefill run")
    )
    assert sorted(plan["window_left"] for plan in plans) == [-1, 19]
    assert all(len(call["q"]) == numbers(plans[0]["qo_indptr"])[-1] == 9 for call in attended)
    driver.step({long: 100})
    for key in (short, long):
        recorder.calls.clear()
        driver.step({key: 1})
        called = [name for name, _ in recorder.calls if name not in ("DecodeWrapper", "decode plan")]
        assert called == ["fast plan"] * 2 + ["decode run"] * 3
