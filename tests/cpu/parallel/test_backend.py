"""What is decided before a rank starts: memory, threads, what is refused; and what reaches every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onbeat.core.errors import ConfigError
from onbeat.core.options import make
from onbeat.engine.attention.torch_sdpa import TorchSdpaBackend
from onbeat.engine.device import Device, DeviceConfig
from onbeat.engine.dtypes import FLOAT32
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.model_config import ModelConfig, RopeConfig
from onbeat.engine.parallel.backend import ParallelBackend
from onbeat.engine.torch_backend import TorchForward
from onbeat.engine.torch_kv import LayerKVCache
from onbeat.engine.weights import DummyCheckpoint
from onbeat.hub.files import ModelFiles
from tests.cpu.parallel.split import ThreadFollowers, split_forward

MODEL = ModelConfig(
    family="llama",
    architecture="LlamaForCausalLM",
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0),
    tie_word_embeddings=True,
)
CPU = DeviceConfig(Device("cpu"), FLOAT32, 3)


def backend(size: int, device: DeviceConfig = CPU, **options: Any) -> ParallelBackend:
    files = ModelFiles(kind="hf", path=Path("none"), name="tiny")
    config = make(EngineConfig, model=files, tensor_parallel_size=size, **options)
    return ParallelBackend(config, DummyCheckpoint(MODEL), device)


@pytest.mark.parametrize(("size", "kv_heads_on_all_ranks"), [(2, 2), (4, 4)])
def test_memory_is_that_of_all_ranks(size: int, kv_heads_on_all_ranks: int) -> None:
    spec = backend(size).kv_cache_spec(16)
    assert spec.block_bytes == 2 * 2 * 16 * kv_heads_on_all_ranks * 8 * 4
    embedding_and_norms = 64 * 32 + 5 * 32
    split_once = 2 * (2 * 32 * 32 + 3 * 48 * 32)
    keys_and_values = 2 * 2 * kv_heads_on_all_ranks * 8 * 32
    assert backend(size).weight_bytes() == 4 * (size * embedding_and_norms + split_once + keys_and_values)


def test_threads_are_shared_out_and_it_is_said() -> None:
    assert backend(2).description == "by torch, tensor parallel: 2 ranks of 1 thread each"
    assert "2 ranks of 2 threads each" in backend(2, replace(CPU, num_threads=5)).description
    assert backend(4).description.endswith(
        "4 ranks of 1 thread each, which is more than there are: ranks take turns"
    )


@pytest.mark.parametrize(
    ("options", "device", "message"),
    [
        ({"backend": "native"}, CPU, "native engine runs in one process, but tensor_parallel_size is 2"),
        ({"backend": "cuda"}, CPU, "the GPU engine runs in one process, but tensor_parallel_size is 2"),
        ({"quantization": "int8"}, CPU, "^quantization int8 needs the native engine"),
        ({"activation_quantization": "int8"}, CPU, "activation_quantization int8 needs the native engine"),
        ({"instruction_set": "portable"}, CPU, "instruction_set portable needs the native engine"),
        ({}, replace(CPU, device=Device("cuda", 0)), "on the CPU only, but the device is cuda:0"),
    ],
)
def test_what_does_not_go_with_a_split_is_refused(
    options: dict[str, Any], device: DeviceConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        backend(2, device, **options)


@torch.inference_mode()
def test_scrubbing_reaches_every_rank() -> None:
    split = split_forward(DummyCheckpoint(MODEL), 2, dtype=torch.float32, num_blocks=4, block_size=16)
    assert isinstance(split._followers, ThreadFollowers)
    caches = [caches_of(forward) for forward in (split._own, *split._followers.forwards)]
    for layers in caches:
        for layer in layers:
            layer.k_BKSH[1:3] = torch.nan
    split.scrub(np.array([1]))
    split.close()
    for layers in caches:
        for layer in layers:
            assert layer.k_BKSH.isnan().any(dim=(1, 2, 3)).tolist() == [False, False, True, False]


def caches_of(forward: object) -> list[LayerKVCache]:
    assert isinstance(forward, TorchForward)
    assert isinstance(forward.attention, TorchSdpaBackend)
    return list(forward.attention.layers)
