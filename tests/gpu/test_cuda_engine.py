"""The GPU engine on a GPU: with operators of plain torch it is exact, with the quick ones close to them."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest
import torch

from onbeat.engine.draw import Logits
from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_config.hf import model_config_from_hf
from onbeat.engine.model_runner import ModelRunner
from onbeat.engine.sampled import BestTokens, SampledTokens
from onbeat.engine.sampler import Sampler
from onbeat.engine.sampling_row import SamplingRow
from onbeat.engine.torch.weights import TorchWeights, load_weights
from onbeat.engine.weights.dummy import DummyCheckpoint
from tests.cpu.engine.cuda.test_copied_logits import check_drafts
from tests.cpu.engine.cuda.test_overlap import (
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    NUM_BLOCKS,
    SERIAL_SETTINGS,
    SETTINGS,
    Plan,
    requests_of,
    run,
)
from tests.cpu.engine.step_driver import StepDriver
from tests.cpu.engine.tiny_models import FAMILIES, StateCheckpoint, hf_tiny_model, random_prompt, tiny_model
from tests.cpu.golden.test_embeddings_tiny import check, serve, to_embed
from tests.gpu.engines import on_gpu_engine, relative_error, run_fixed
from tests.pure.scheduler.driver import make_config

pytestmark = pytest.mark.gpu

needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed"
)
CUDA = torch.device("cuda")
PROMPT_LENGTHS = (1, 17, 100, 197)
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
QUICK: dict[str, dict[str, Any]] = {
    "llama-128": {**_LLAMA, "head_dim": 128, "num_attention_heads": 8},
    "llama-64": _LLAMA,
    "mistral-64-window": {
        **_LLAMA,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 50,
    },
    "qwen3-64": {**_LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
}


def quick_config(name: str) -> ModelConfig:
    return model_config_from_hf(QUICK[name])


@functools.cache
def exact_weights(name: str, dtype: torch.dtype) -> Any:
    checkpoint = StateCheckpoint(hf_tiny_model(name, torch.float64))
    return load_weights(checkpoint, dtype, CUDA)


@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.parametrize("chunk", [7, 1000])
def test_greedy_tokens_equal_the_reference(name: str, chunk: int) -> None:
    driver = StepDriver(on_gpu_engine(exact_weights(name, torch.float64)))
    for length in PROMPT_LENGTHS:
        driver.add(random_prompt(length), 10)
    driver.run(chunk)
    for live in driver.requests.values():
        token_ids, logits = tiny_model(name).reference(live.request.prompt_token_ids, 10)
        assert live.output_token_ids == token_ids
        torch.testing.assert_close(torch.stack(live.logits).cpu(), logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_graphs_compute_what_calls_compute(name: str, pieces: bool) -> None:
    weights = exact_weights(name, torch.float32)
    prompts = [random_prompt(length) for length in PROMPT_LENGTHS]
    by_graphs, _ = run_fixed(on_gpu_engine(weights, pieces=pieces), prompts, num_tokens=12, chunk=1000)
    by_calls, _ = run_fixed(on_gpu_engine(weights, graphs=False), prompts, num_tokens=12, chunk=1000)
    for actual, expected in zip(by_graphs, by_calls, strict=True):
        assert relative_error(actual, expected) <= 1e-5


@pytest.mark.parametrize("name", list(FAMILIES))
def test_embeddings_equal_the_reference(name: str) -> None:
    prompts = [random_prompt(length) for length in PROMPT_LENGTHS]
    requests = [to_embed(prompt, "mean", f"e{index}") for index, prompt in enumerate(prompts)]
    make = on_gpu_engine(exact_weights(name, torch.float64))
    check(serve(make, requests, policy="sarathi", max_num_batched_tokens=64), name, "mean", prompts)


class _Watching(Sampler):
    """Samples, and keeps the logits as the driver wants them."""

    trusts_device = False

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.logits: list[torch.Tensor] = []

    def sample(self, logits_RV: Logits | None, rows: Any, best: BestTokens | None = None) -> SampledTokens:
        assert logits_RV is not None
        self.logits.append(torch.from_numpy(logits_RV.copy()))
        return super().sample(logits_RV, rows, best)

    def needs_logits(self, rows: list[SamplingRow]) -> bool:  # type: ignore[override]
        return True


def test_a_row_of_nan_fails_alone_and_its_blocks_serve_again() -> None:
    name = "llama3"
    driver = StepDriver(on_gpu_engine(exact_weights(name, torch.float64)), num_blocks=25)
    sampler = _Watching(211)
    driver.sampler = driver.runner.sampler = sampler  # type: ignore[assignment]
    bad, good = (driver.add(random_prompt(length), 10) for length in (40, 60))
    driver.step({bad: 1000, good: 1000})
    block = driver.requests[bad].block_ids[0]
    state: Any = driver.runner.forward
    with torch.inference_mode():
        state._state.kv[0].v_BKSH[block].fill_(torch.nan)
    output = driver.step({bad: 1000, good: 1000})
    assert output.failed is not None
    assert list(output.failed) == [bad]
    driver.release(bad)
    driver.requests[bad].max_tokens = 0
    again = driver.add(random_prompt(300), 3)  # needs the blocks that were freed
    driver.run(64)
    for key in (good, again):
        live = driver.requests[key]
        token_ids, _ = tiny_model(name).reference(live.request.prompt_token_ids, live.max_tokens)
        assert live.output_token_ids == token_ids


def overlapping_weights(*, fast: bool) -> TorchWeights:
    if not fast:
        weights: TorchWeights = exact_weights("llama3", torch.float64)
        return weights
    return load_weights(DummyCheckpoint(quick_config("llama-64")), torch.bfloat16, CUDA)


@pytest.mark.parametrize("fast", [False, pytest.param(True, marks=needs_flashinfer)])
@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_steps_that_overlap_choose_the_tokens_of_steps_one_by_one(
    seed: int, pieces: bool, fast: bool
) -> None:
    weights = overlapping_weights(fast=fast)
    make = on_gpu_engine(
        weights,
        fast=fast,
        pieces=pieces,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=256,
    )

    def tokens(depth: int) -> dict[str, list[int]]:
        limits = make_config(num_blocks=NUM_BLOCKS, max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN)
        forward = make(num_blocks=NUM_BLOCKS, block_size=16)
        runner = ModelRunner(limits, forward, Sampler(weights.config.vocab_size))
        return run(runner, Plan(seed, 4 * SETTINGS + SERIAL_SETTINGS).steps(60), depth)

    assert tokens(depth=2) == tokens(depth=1)


@pytest.mark.parametrize("pieces", [False, True])
def test_drafts_are_verified_by_tokens_that_the_gpu_draws(pieces: bool) -> None:
    make = on_gpu_engine(exact_weights("llama3", torch.float64), pieces=pieces)
    check_drafts(make, requests_of(SETTINGS + SERIAL_SETTINGS, 30), 4)


@needs_flashinfer
@pytest.mark.parametrize("name", list(QUICK))
@pytest.mark.parametrize("chunk", [7, 1000])
def test_quick_operators_come_close_to_plain_ones(name: str, chunk: int) -> None:
    weights = load_weights(DummyCheckpoint(quick_config(name)), torch.bfloat16, CUDA)
    prompts = [random_prompt(length) for length in PROMPT_LENGTHS]
    quick, seen = run_fixed(on_gpu_engine(weights, fast=True), prompts, num_tokens=10, chunk=chunk)
    plain, _ = run_fixed(on_gpu_engine(weights), prompts, num_tokens=10, chunk=chunk)
    for actual, expected in zip(quick, plain, strict=True):
        assert relative_error(actual, expected) <= 3e-2
    best = [logits_RV.argmax(-1).tolist() for logits_RV in seen.logits]
    assert seen.best == best
