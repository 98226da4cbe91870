"""What the start decides for models whose windows give KV back, and how much more their memory holds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from onbeat.engine.engine_config import EngineConfig, MemoryShare
from onbeat.engine.start import build_engine, prepare
from onbeat.engine.step_time_spec import model_spec_of
from onbeat.engine.weights.open import read_model_config
from onbeat.hub.files import ModelFiles
from onbeat.perfmodel.memory import held_bytes_per_token, kv_groups
from onbeat.perfmodel.precision import Precision
from onbeat.scheduler.replica.token_budget import settle
from onbeat.scheduler.scheduler_config import SchedulerLimits
from tests.cpu.e2e.tiny_directory import write_tiny_directory
from tests.cpu.engine.gemma4_models import WINDOWED
from tests.cpu.engine.tiny_models import hf_tiny_model, tiny_model

GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 11,
    "max_position_embeddings": 8192,
    "head_dim": 16,
    "sliding_window": 64,
    "query_pre_attn_scalar": 16,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
}
GEMMA3["layer_types"] = GEMMA3["layer_types"][1:]
TABLE_BYTES = 2 * 2 * 16 * 2 * 16 * 4
"""Keys and values of two layers, 16 tokens, two heads of 16, in float32."""
CACHE_BYTES = 100 * 6 * TABLE_BYTES


def config(path: Path, *, limits: SchedulerLimits, **asked: Any) -> EngineConfig:
    files = ModelFiles(kind="hf", path=write_tiny_directory(path, **GEMMA3), name="tiny")
    common: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "threads": 1}
    return EngineConfig(model=files, limits=limits, kv_cache_memory_bytes=CACHE_BYTES, **common, **asked)


def test_nine_layers_go_in_groups_of_two_and_free_what_they_passed(tmp_path: Path) -> None:
    """Of 100 blocks of all layers, or 1600 tokens, one request may be as long as 372 blocks."""
    limits = SchedulerLimits(max_num_seqs=32, max_num_batched_tokens=512)
    fitted = prepare(config(tmp_path, limits=limits)).limits
    assert (fitted.num_tables, fitted.window_length, fitted.num_blocks) == (6, 64, 100)
    most_windowed = (64 + 512) // 16 + 2
    assert fitted.max_model_len == (600 - 5 * most_windowed) * 16
    whole = prepare(config(tmp_path, limits=SchedulerLimits(max_num_seqs=32, max_model_len=64))).limits
    assert whole.num_tables == 1, "a window as long as the longest request frees nothing"


def test_requests_may_be_longer_than_the_blocks_of_all_layers(tmp_path: Path) -> None:
    said: list[str] = []
    limits = SchedulerLimits(max_num_seqs=32, max_num_batched_tokens=512, max_model_len=4096)
    core, info = build_engine(config(tmp_path, limits=limits), lambda line: said.append(str(line)))
    core.shutdown()
    assert info.limits.max_model_len == 4096
    assert any("1,600" in line and "4,096" in line for line in said)
    # 256 blocks of the first table, and 38 of each of five others: one request of 446 of 600 blocks
    assert any(re.search(r"\b64 tokens.*\b5 groups.*\b1 of\b", line) for line in said)
    assert info.limits.num_blocks == 600
    assert info.limits.num_blocks_for(4096) == 256 + 5 * 38


def test_a_model_whose_layers_all_have_windows_keeps_the_kv_of_an_eighth(tmp_path: Path) -> None:
    values = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
    values |= {"num_hidden_layers": 16, "max_position_embeddings": 8192}
    files = ModelFiles(kind="hf", path=write_tiny_directory(tmp_path, **values), name="tiny")
    limits = SchedulerLimits(max_num_seqs=32, max_num_batched_tokens=512)
    asked = EngineConfig(model=files, limits=limits, load_format="dummy", dtype="float32", threads=1)
    loader = prepare(replace(asked, kv_cache_memory_bytes=2**22))
    model, fitted = loader.backend.model, loader.limits
    assert (fitted.num_tables, fitted.window_length) == (8, 64)
    assert [model.place(index, 8) for index in (0, 1, 2, 15)] == [(0, 0), (0, 1), (1, 0), (7, 1)]
    assert fitted.max_model_len > 3 * fitted.num_blocks * fitted.block_size


def test_the_default_cache_holds_the_longest_request_that_was_asked_for(tmp_path: Path) -> None:
    """Of 340 MiB a quarter is usual, but 65,536 tokens of 2 KiB, which fit, take 128."""
    values: dict[str, Any] = {"num_hidden_layers": 8, "max_position_embeddings": 65536}
    files = ModelFiles(kind="hf", path=write_tiny_directory(tmp_path, **values), name="tiny")
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=65536)
    small = MemoryShare(340 * 2**20, 1)
    asked = EngineConfig(
        model=files, limits=limits, load_format="dummy", dtype="float32", threads=1, memory_share=small
    )
    assert 0 <= prepare(asked).limits.num_blocks * 16 - 65536 <= 32
    more = replace(asked, limits=replace(limits, max_model_len=None))
    assert prepare(more).limits.max_model_len < 65536


@pytest.mark.parametrize(
    "name", ["gemma3", "gpt-oss", "olmo3", "mistral-sliding", "qwen2", "gemma4", *WINDOWED]
)
def test_an_engine_and_a_simulation_share_one_rule(name: str) -> None:
    """Of how layers go in groups, and of what a block of all groups takes."""
    model = tiny_model(name).weights.config
    spec, num_tables = model_spec_of(model, name), 1 + model.kv_groups.num_windowed
    assert kv_groups(spec) == model.kv_groups
    held = held_bytes_per_token(spec, Precision("fp32", "fp32", "fp32"), num_tables)
    kept = [2 * num * width * 4 for num, width in model.kept_heads]
    assert held == sum(kept[number] for number in model.layers_of_block(num_tables)) * num_tables


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("name", WINDOWED)
def test_a_live_engine_has_the_blocks_that_a_simulation_counts(
    name: str, backend: Any, tmp_path: Path
) -> None:
    """Of models with two head sizes; and it keeps no more of them than it counts."""
    values = json.loads(json.dumps(hf_tiny_model(name, torch.float32).config.to_dict()))
    values |= {"architectures": ["Gemma4ForCausalLM"], "max_position_embeddings": 8192, "dtype": "float32"}
    values |= {"vocab_size": 259, "vocab_size_per_layer_input": 259}
    files = ModelFiles(kind="hf", path=write_tiny_directory(tmp_path, **values), name="tiny")
    limits = SchedulerLimits(max_num_seqs=32, max_num_batched_tokens=512)
    common: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "threads": 1, "backend": backend}
    asked = EngineConfig(model=files, limits=limits, kv_cache_memory_bytes=3 << 20, **common)
    core, info = build_engine(asked, lambda _: None)
    core.shutdown()
    spec = model_spec_of(read_model_config(files), name)
    windows: dict[str, Any] = kv_groups(spec).windows(spec.sliding_window, 8192)
    held = held_bytes_per_token(spec, Precision("fp32", "fp32", "fp32"), windows["num_tables"])
    num_blocks = int((3 << 20) // (held * 16))
    simulated = settle(limits, num_blocks=num_blocks, model_len=8192, **windows)
    assert simulated.max_model_len > 1.5 * num_blocks * 16
    assert (info.limits.num_blocks, info.limits.max_model_len) == (
        simulated.num_pages,
        simulated.max_model_len,
    )
