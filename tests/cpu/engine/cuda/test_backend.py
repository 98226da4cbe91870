"""When the GPU engine serves, and what is said where it cannot."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onbeat.core.errors import ConfigError
from onbeat.engine import memory, start
from onbeat.engine.backends import base
from onbeat.engine.backends import torch as cuda_backend
from onbeat.engine.backends.table import choose_backend
from onbeat.engine.backends.torch import CudaBackend, TorchBackend
from onbeat.engine.container import FreeMemory
from onbeat.engine.device import Device, DeviceConfig
from onbeat.engine.dtypes import BFLOAT16, FLOAT32
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.model_config.architecture import Experts, ModelConfig, RopeConfig
from onbeat.engine.weights.dummy import DummyCheckpoint
from onbeat.hub.files import ModelFiles
from onbeat.perfmodel.device_spec import known_device
from onbeat.scheduler.replica.token_budget import LARGEST_BUDGET
from onbeat.scheduler.scheduler_config import SchedulerLimits
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve

CUDA = DeviceConfig(Device("cuda"), BFLOAT16, num_threads=1)
CPU = DeviceConfig(Device("cpu"), BFLOAT16, num_threads=1)
MODEL = ModelConfig(
    family="llama",
    architecture="LlamaForCausalLM",
    vocab_size=128,
    hidden_size=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=96,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
)

LLAMA_8B = replace(
    MODEL,
    vocab_size=128_256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14_336,
    max_position_embeddings=131_072,
)
EXPERTS = Experts(num_experts=4, num_per_token=2, intermediate_size=32)


def config(**changes: Any) -> EngineConfig:
    files = ModelFiles(kind="hf", path=Path("/nowhere"), name="tiny")
    return replace(EngineConfig(model=files), **changes)


def test_it_serves_on_a_gpu_unless_torch_is_asked_for(hopper: None) -> None:
    checkpoint = DummyCheckpoint(MODEL)
    chosen = choose_backend(config(), checkpoint, CUDA)
    assert isinstance(chosen, CudaBackend)
    assert ("CUDA graphs" in chosen.description, "prompts" in chosen.description) == (True, False)
    assert isinstance(choose_backend(config(backend="cuda"), checkpoint, CUDA), CudaBackend)
    assert isinstance(choose_backend(config(backend="torch"), checkpoint, CUDA), TorchBackend)
    eager = choose_backend(config(enforce_eager=True), checkpoint, CUDA)
    assert "without graphs" in eager.description
    pieces = choose_backend(config(cuda_graph_pieces=True), checkpoint, CUDA)
    assert re.search(r"CUDA graphs.* pieces", pieces.description)
    with pytest.raises(ConfigError, match=r"--enforce-eager.*--cuda-graph-pieces"):
        config(cuda_graph_pieces=True, enforce_eager=True)


@pytest.mark.parametrize(
    ("device", "model", "block_size", "reason"),
    [
        (replace(CUDA, dtype=FLOAT32), {}, 16, "bfloat16.*float32"),
        (CUDA, {"head_dim": 96}, 16, "96.* 64, 128 and 256"),
        (CUDA, {}, 48, "block_size is 48.* 16, 32, 64 or 128"),
    ],
)
def test_torch_serves_what_it_cannot_and_says_why(
    hopper: None, device: DeviceConfig, model: dict[str, Any], block_size: int, reason: str
) -> None:
    checkpoint = DummyCheckpoint(replace(MODEL, **model))
    limits = SchedulerLimits(block_size=block_size)
    chosen = choose_backend(config(limits=limits), checkpoint, device)
    assert re.search(rf"torch \(.*: .*{reason}", chosen.description)
    with pytest.raises(ConfigError, match=f"{reason}.*--backend"):
        choose_backend(config(limits=limits, backend="cuda"), checkpoint, device)


def test_older_gpus_and_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch, hopper: None) -> None:
    monkeypatch.setattr(cuda_backend, "find_spec", lambda _: None)
    sentence = choose_backend(config(), DummyCheckpoint(MODEL), CUDA).description
    assert "pip install 'onbeat[gpu]'" in sentence
    monkeypatch.setattr(cuda_backend, "compute_capability", lambda _: (7, 5))
    sentence = choose_backend(config(), DummyCheckpoint(MODEL), CUDA).description
    assert re.search(r" 8\.0.* 7\.5", sentence)


@pytest.mark.parametrize(
    ("changes", "device", "message"),
    [
        ({"backend": "cuda"}, CPU, "GPU engine.*CUDA.*cpu"),
        ({"backend": "native"}, CUDA, "native engine.*CPU.*cuda"),
        ({"quantization": "int8"}, CUDA, "GPU engine.*--quantization"),
    ],
)
def test_what_cannot_be_had_is_refused(
    hopper: None, changes: dict[str, Any], device: DeviceConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_backend(config(**changes), DummyCheckpoint(MODEL), device)


def test_a_router_waits_for_the_host_so_there_are_no_graphs(hopper: None) -> None:
    chosen = choose_backend(config(), DummyCheckpoint(replace(MODEL, experts=EXPERTS)), CUDA)
    assert isinstance(chosen, CudaBackend)
    assert "without graphs" in chosen.description


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan")])
def test_a_share_of_memory_is_a_share(share: float) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        config(gpu_memory_utilization=share)


def test_a_kernel_that_cannot_be_had_is_named(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cure = "nvcc is not found: install it"
    monkeypatch.setattr(cuda_backend, "unbuilt_kernel", lambda *_: ("batch_prefill", cure))
    chosen = choose_backend(config(), DummyCheckpoint(MODEL), CUDA)
    assert isinstance(chosen, TorchBackend)
    assert not isinstance(chosen, CudaBackend)
    assert all(words in chosen.description for words in ("batch_prefill", cure))


def test_the_start_says_what_is_compiled_and_that_a_card_is_untried(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = choose_backend(config(), DummyCheckpoint(MODEL), CUDA)
    assert isinstance(chosen, CudaBackend)
    before = [*chosen.remarks(config(device="cuda"))]
    monkeypatch.setattr(cuda_backend, "compute_capability", lambda _: (8, 9))
    monkeypatch.setattr(cuda_backend, "unbuilt_kernel", lambda *_: ("batch_prefill", None))
    untried, compiling = [*chosen.remarks(config(device="cuda"))][len(before) :]
    assert "8.9" in untried
    assert "compiling" in compiling


@pytest.mark.parametrize(
    ("changes", "block_size"),
    [
        ({}, 64),
        ({"limits": SchedulerLimits(block_size=32)}, 32),
        ({"backend": "torch"}, 16),
    ],
)
def test_blocks_are_larger_on_the_gpu_engine_unless_a_size_is_given(
    hopper: None, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], block_size: int
) -> None:
    """A step is planned again where a row gets another block."""
    monkeypatch.setattr(base, "device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(start, "detect_device", lambda *_: CUDA)
    monkeypatch.setattr(start, "open_weights", lambda _: DummyCheckpoint(MODEL))
    monkeypatch.setattr(memory, "free_memory", lambda _: FreeMemory(70 * 2**30, "the device cuda"))
    loader = start.prepare(config(**changes))
    assert loader.limits.block_size == block_size
    assert loader.settle(loader.limits.num_blocks).block_size == block_size


@pytest.mark.parametrize(
    ("name", "limits", "num_tokens"),
    [
        ("NVIDIA L4", {}, 1280),
        ("NVIDIA H100 80GB HBM3", {}, 7808),
        ("NVIDIA L4", {"max_num_batched_tokens": 4096}, 4096),
        ("NVIDIA L4", {"policy": "sarathi"}, 512),
        ("NVIDIA of tomorrow", {}, LARGEST_BUDGET),
        ("Tesla V100-SXM2-32GB", {}, LARGEST_BUDGET),  # which has no arithmetic of this format
    ],
)
def test_a_data_sheet_bounds_the_largest_step_as_in_simulations(
    hopper: None, monkeypatch: pytest.MonkeyPatch, name: str, limits: dict[str, Any], num_tokens: int
) -> None:
    monkeypatch.setattr(base, "device_name", lambda _: name)
    monkeypatch.setattr(start, "detect_device", lambda *_: CUDA)
    monkeypatch.setattr(start, "open_weights", lambda _: DummyCheckpoint(LLAMA_8B))
    monkeypatch.setattr(memory, "free_memory", lambda _: FreeMemory(70 * 2**30, "the device cuda"))
    settled = start.prepare(config(limits=SchedulerLimits(**limits))).limits
    assert settled.max_num_batched_tokens == num_tokens
    if num_tokens in (1280, 7808):
        settings = Deployment(model="Llama-3.1-8B", device=known_device(name) or "")
        simulated = resolve(settings).kind.scheduler
        assert simulated.max_num_batched_tokens == num_tokens
        assert simulated.block_size == 16  # of simulations, whatever the device
