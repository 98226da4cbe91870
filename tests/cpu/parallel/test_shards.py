"""The ranks' parts of a checkpoint make up the whole, and models that cannot be split are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.engine.dtypes import FLOAT32, FLOAT64
from onbeat.engine.model_config import Experts, ModelConfig, RopeConfig
from onbeat.engine.parallel.shards import (
    Shard,
    ShardedCheckpoint,
    check_degree,
    config_of_rank,
    kv_heads_of,
    vocabulary_rows,
)
from onbeat.engine.weights import DummyCheckpoint, parameter_shapes

CONFIG = ModelConfig(
    family="llama",
    architecture="LlamaForCausalLM",
    vocab_size=211,
    hidden_size=64,
    num_layers=1,
    num_heads=12,
    num_kv_heads=6,
    head_dim=8,
    intermediate_size=96,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0),
    attention_bias=True,
    attention_output_bias=True,
    qk_norm="head",
)
CHECKPOINT = DummyCheckpoint(CONFIG, seed=1)
LAYER = "model.layers.0"


def parts_of(name: str, size: int) -> list[NDArray[Any]]:
    return [ShardedCheckpoint(CHECKPOINT, Shard(rank, size)).get(name, FLOAT64) for rank in range(size)]


def whole(name: str) -> NDArray[Any]:
    return CHECKPOINT.get(name, FLOAT64)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_parts_have_the_shapes_of_the_smaller_model(size: int) -> None:
    for rank in range(size):
        part = ShardedCheckpoint(CHECKPOINT, Shard(rank, size))
        shapes = parameter_shapes(part.config)
        assert set(part.names()) == set(shapes)
        shapes["lm_head.weight"] = (len(range(211)[vocabulary_rows(211, Shard(rank, size))]), 64)
        assert {name: part.get(name, FLOAT32).shape for name in part.names()} == shapes


@pytest.mark.parametrize("size", [2, 3, 4, 12])
def test_split_parameters_come_together_again(size: int) -> None:
    for name in (
        "self_attn.q_proj.weight",
        "self_attn.q_proj.bias",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
    ):
        joined = np.concatenate(parts_of(f"{LAYER}.{name}", size))
        assert np.array_equal(joined, whole(f"{LAYER}.{name}"))
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        assert np.array_equal(
            np.concatenate(parts_of(f"{LAYER}.{name}", size), axis=1), whole(f"{LAYER}.{name}")
        )
    assert np.array_equal(np.concatenate(parts_of("lm_head.weight", size)), whole("lm_head.weight"))
    bias = f"{LAYER}.self_attn.o_proj.bias"
    assert np.array_equal(sum(parts_of(bias, size)), whole(bias))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", f"{LAYER}.self_attn.q_norm.weight"]
)
def test_what_is_not_split_is_whole_on_every_rank(name: str, size: int) -> None:
    assert all(np.array_equal(part, whole(name)) for part in parts_of(name, size))


def test_kv_heads_that_do_not_divide_are_held_more_than_once() -> None:
    assert [kv_heads_of(CONFIG, Shard(rank, 2)) for rank in range(2)] == [(0, 1, 2), (3, 4, 5)]
    assert [kv_heads_of(CONFIG, Shard(rank, 12)) for rank in (0, 1, 2, 11)] == [(0,), (0,), (1,), (5,)]
    # Three query heads a rank, two for a KV head: rank 0 has 0, 0, 1.
    assert [kv_heads_of(CONFIG, Shard(rank, 4)) for rank in range(2)] == [(0, 0, 1), (1, 2, 2)]
    heads = whole(f"{LAYER}.self_attn.k_proj.weight").reshape(6, 8, 64)
    part = parts_of(f"{LAYER}.self_attn.k_proj.weight", 4)[1].reshape(3, 8, 64)
    assert np.array_equal(part, heads[[1, 2, 2]])


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_every_query_head_keeps_its_kv_head(num_kv_heads: int, group: int, size: int) -> None:
    num_heads = num_kv_heads * group * size
    config = replace(CONFIG, num_heads=num_heads, num_kv_heads=num_kv_heads, intermediate_size=96 * size)
    for rank in range(size):
        shard = Shard(rank, size)
        held, local = kv_heads_of(config, shard), config_of_rank(config, shard)
        for query in range(local.num_heads):
            seen = held[query // (local.num_heads // local.num_kv_heads)]
            assert seen == (rank * local.num_heads + query) // (num_heads // num_kv_heads)


@given(st.integers(1, 40), st.integers(1, 9))
def test_every_token_has_one_rank(vocab_size: int, size: int) -> None:
    tokens = [
        token
        for rank in range(size)
        for token in range(vocab_size)[vocabulary_rows(vocab_size, Shard(rank, size))]
    ]
    assert tokens == list(range(vocab_size))


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 5, "size of 5 does not divide this model's 12 query heads and 96 feed-forward columns; "),
        (
            {"intermediate_size": 100},
            3,
            "divide this model's 100 feed-forward columns; sizes that do: 1, 2, 4",
        ),
        ({"num_heads": 9, "num_kv_heads": 3}, 2, "divide this model's 9 query heads; sizes that do: 1, 3"),
    ],
)
def test_a_size_that_does_not_divide_is_refused_with_those_that_do(changes, size: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_degree(replace(CONFIG, **changes), size)
    assert message in str(caught.value)


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="span all heads; leave --tensor-parallel-size out"):
        check_degree(replace(CONFIG, qk_norm="all"), 2)
    experts = Experts(num_experts=4, num_per_token=2, intermediate_size=30)
    with pytest.raises(ConfigError, match="30 columns of an expert; sizes that do: 1, 2, 3, 6"):
        check_degree(replace(CONFIG, experts=experts), 4)
    assert config_of_rank(replace(CONFIG, experts=experts), Shard(0, 2)).experts == replace(
        experts, intermediate_size=15
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_a_size_that_divides_is_taken(size: int) -> None:
    check_degree(CONFIG, size)
