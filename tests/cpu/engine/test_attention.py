"""Paged attention against attention computed request by request in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.engine.attention.sdpa_metadata import group_rows
from onbeat.engine.dtypes import BFLOAT16, FLOAT32
from onbeat.engine.kv_cache import KVCacheSpec
from onbeat.engine.torch_kv import allocate_kv
from tests.cpu.engine.naive_attention import Case, Row, naive_attention, run_paged

CPU = torch.device("cpu")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}

rows = st.lists(
    st.builds(
        Row,
        num_computed_tokens=st.sampled_from([0, 1, 15, 16, 31, 70, 250]),
        num_new_tokens=st.sampled_from([1, 1, 1, 2, 7, 32, 33, 90, 300]),
    ),
    min_size=1,
    max_size=8,
)
cases = st.builds(
    Case,
    rows=rows,
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (9, 3), (8, 1)]),
    head_dim=st.sampled_from([8, 64]),
    block_size=st.sampled_from([16, 32]),
    window=st.sampled_from([None, 1, 5, 40, 1000]),
    seed=st.integers(0, 1000),
)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@settings(max_examples=60, deadline=None)
@given(case=cases)
def test_equals_attention_request_by_request(dtype: torch.dtype, case: Case) -> None:
    actual = run_paged(case, dtype, CPU)
    torch.testing.assert_close(
        actual.double(), naive_attention(case, dtype), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def test_every_layer_attends_with_its_own_window() -> None:
    case = Case(
        [Row(60, 3), Row(0, 40), Row(20, 1)], heads=(4, 2), head_dim=16, block_size=16, window=9, seed=1
    )
    sliding = run_paged(case, torch.float64, CPU, layer_index=1)
    full = run_paged(case, torch.float64, CPU, layer_index=0)
    torch.testing.assert_close(sliding, naive_attention(case, torch.float64))
    torch.testing.assert_close(full, naive_attention(case.without_window(), torch.float64))
    assert not torch.allclose(sliding, full)


@given(
    lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=256),
    group_cost=st.sampled_from([1, 40, 1000]),
)
def test_groups_are_few_and_hold_every_row_once(lengths: list[int], group_cost: int) -> None:
    lengths_R = np.array(lengths)
    groups = group_rows(np.ones(len(lengths), np.int64), lengths_R, group_cost)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    assert len(groups) <= 2 * np.log2(4000) + 2
    padding = sum(int((lengths_R[group].max() - lengths_R[group]).sum()) for group in groups)
    # Within a bucket lengths differ by the square root of two at most; more is padded only where it is cheap.
    assert padding <= 0.42 * sum(lengths) + group_cost * (len(groups) + 2 * np.log2(4000) + 2)


def test_decodes_of_different_lengths_are_not_padded_to_the_longest() -> None:
    lengths_R = np.array([4] * 100 + [400])
    groups = group_rows(np.ones(101, np.int64), lengths_R, 40)
    assert [len(group) for group in groups] == [100, 1]


def test_chunks_and_decodes_are_not_padded_to_one_another() -> None:
    groups = group_rows(np.array([1, 30, 1, 5, 100]), np.array([4, 4, 4, 4, 4]), 40)
    assert [group.tolist() for group in groups] == [[0, 2], [3], [1]]


def test_garbage_in_unused_slots_does_not_show() -> None:
    case = Case(
        [Row(3, 1), Row(100, 1), Row(37, 5)], heads=(4, 2), head_dim=16, block_size=16, window=None, seed=2
    )
    clean = run_paged(case, torch.float32, CPU)
    dirty = run_paged(case, torch.float32, CPU, unused_slots=1e4)
    torch.testing.assert_close(clean, dirty, rtol=0, atol=0)


@pytest.mark.parametrize("block_size", [0, 8, 20, -16])
def test_block_size_must_be_a_multiple_of_16(block_size: int) -> None:
    with pytest.raises(ConfigError, match=str(block_size)):
        KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=8, dtype=FLOAT32, block_size=block_size)


def test_blocks_in_a_budget() -> None:
    spec = KVCacheSpec(num_layers=30, num_kv_heads=3, head_dim=64, dtype=BFLOAT16, block_size=16)
    assert spec.block_bytes == 2 * 30 * 16 * 3 * 64 * 2
    assert spec.num_blocks_in(10 * spec.block_bytes + 1) == 10
    layers = allocate_kv(spec, 10, torch.device("cpu"))
    assert sum(part.nbytes for layer in layers for part in layer) == 10 * spec.block_bytes
    with pytest.raises(ConfigError, match="no block"):
        spec.num_blocks_in(spec.block_bytes - 1)
