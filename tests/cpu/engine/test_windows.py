"""What the start decides for models whose windows give KV back, and how much more their memory holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.start import build_engine, prepare
from onbeat.hub.files import ModelFiles
from onbeat.scheduler.scheduler_config import SchedulerLimits
from tests.cpu.e2e.tiny_directory import write_tiny_directory

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
    assert info.max_model_len == 4096
    assert any("1,600" in line and "4,096" in line for line in said)
