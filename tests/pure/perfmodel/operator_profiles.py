"""Operator profiles in Vidur's CSV format, made by formulas that a test can evaluate."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from onbeat.perfmodel.model_sizes import ModelSpec

MODEL = ModelSpec(
    name="tiny",
    num_layers=4,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=1024,
    vocab_size=2048,
    max_position_embeddings=4096,
)

OPERATORS = (
    "emb",
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
)
TOKENS = (1, 8, 64, 128, 256, 512, 1024)
BATCHES = (1, 2, 4, 16, 64)
CONTEXTS = (0, 64, 256, 1024, 2048)
CHUNKS = (16, 64, 256, 1024)
BYTES = (1024, 65536, 1048576)


def operator_ms(num_tokens: float) -> float:
    """One token operator."""
    return 0.01 + 1e-4 * num_tokens


def decode_ms(batch: float, cached: float) -> float:
    return 0.02 + 1e-5 * batch * cached


def chunk_ms(length: float, cached: float) -> float:
    return 0.03 + 1e-7 * length * (cached + length / 2)


def all_reduce_ms(num_bytes: float) -> float:
    return 0.015 + 1e-7 * num_bytes


def write_csv(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    rows = list(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def mlp_rows(tensor: int = 1) -> list[dict[str, object]]:
    sizes = {"n_head": 8, "n_kv_head": 2, "n_embd": 512, "n_expanded_embd": 1024, "vocab_size": 2048}
    return [
        {
            **{f"time_stats.{name}.median": operator_ms(tokens) for name in OPERATORS},
            **sizes,
            "num_tokens": tokens,
            "num_tensor_parallel_workers": tensor,
        }
        for tokens in TOKENS
    ]


def attention_rows(tensor: int = 1) -> list[dict[str, object]]:
    shared = {"n_embd": 512, "n_q_head": 8, "n_kv_head": 2, "num_tensor_parallel_workers": tensor}
    decodes = [
        {"batch_size": batch, "prefill_chunk_size": 0, "kv_cache_size": cached, "is_prefill": False}
        | {"time_stats.attn_decode.median": decode_ms(batch, cached), "time_stats.attn_prefill.median": ""}
        for batch in BATCHES
        for cached in CONTEXTS
    ]
    chunks = [
        {"batch_size": 1, "prefill_chunk_size": length, "kv_cache_size": cached, "is_prefill": True}
        | {"time_stats.attn_decode.median": "", "time_stats.attn_prefill.median": chunk_ms(length, cached)}
        for length in CHUNKS
        for cached in CONTEXTS
    ]
    return [{**row, **shared} for row in decodes + chunks]


def network_rows(
    operator: str, workers: int, milliseconds: Callable[[float], float]
) -> list[dict[str, object]]:
    return [
        {
            f"time_stats.{operator}.median": milliseconds(size),
            "num_workers": workers,
            "size": size,
            "devices_per_node": workers,
        }
        for size in BYTES
    ]


def write_profile_directory(directory: Path, tensor: int = 1) -> Path:
    write_csv(directory / "mlp.csv", mlp_rows(tensor))
    write_csv(directory / "attention.csv", attention_rows(tensor))
    if tensor > 1:
        write_csv(directory / "all_reduce.csv", network_rows("all_reduce", tensor, all_reduce_ms))
    return directory
