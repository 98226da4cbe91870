"""Paged attention against attention computed request by request in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.engine.dtypes import BFLOAT16, FLOAT32
from onbeat.engine.memory import KVCacheSpec, num_blocks_in
from onbeat.engine.model_config.architecture import KVHeads
from onbeat.engine.torch.forward import TorchKernels
from onbeat.engine.torch.kernels import ChunkRows
from onbeat.engine.torch.kv import allocate_kv
from tests.cpu.engine.naive_attention import Case, Row, layer_spec, naive_attention, run_paged
from tests.examples import examples

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


DECODES = Case(
    [Row(3, 1), Row(100, 1), Row(37, 5)], heads=(4, 2), head_dim=16, block_size=16, window=None, seed=2
)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@examples(60)
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


def test_rows_of_one_token_attend_together_where_they_are_about_as_long() -> None:
    kernels, layer = TorchKernels(torch.float32, CPU, 16), layer_spec(DECODES.config())
    query_lens_R = np.array([1, 30, 1, 5, 1, 1], np.int32)
    num_blocks_R = np.array([4, 4, 5, 4, 400, 1], np.int32)
    rows = ChunkRows(query_lens_R, num_blocks_R * 16, num_blocks_R, np.arange(418, dtype=np.int32))
    plan = kernels.plan_chunks(rows, layer)
    starts = [0, 1, 31, 32, 37, 38]
    assert sorted(group.tokens.tolist()[0] for group in plan) == [0, 1, 32, 37, 38]
    assert next(group.tokens.tolist() for group in plan if group.num_rows > 1) == [starts[0], starts[2]]


def test_garbage_in_unused_slots_does_not_show() -> None:
    case = DECODES
    clean = run_paged(case, torch.float32, CPU)
    dirty = run_paged(case, torch.float32, CPU, unused_slots=1e4)
    torch.testing.assert_close(clean, dirty, rtol=0, atol=0)


@pytest.mark.parametrize("block_size", [0, 8, 20, -16])
def test_block_size_must_be_a_multiple_of_16(block_size: int) -> None:
    with pytest.raises(ConfigError, match=str(block_size)):
        KVCacheSpec(heads=(KVHeads(1, 8),), dtype=FLOAT32, block_size=block_size)


def test_blocks_in_a_budget() -> None:
    spec = KVCacheSpec(heads=(KVHeads(3, 64),) * 30, dtype=BFLOAT16, block_size=16)
    assert spec.block_bytes == 2 * 30 * 16 * 3 * 64 * 2
    assert num_blocks_in(10 * spec.block_bytes + 1, spec.block_bytes, 16) == 10
    layers = allocate_kv(spec, 10, torch.device("cpu"))
    assert sum(part.nbytes for layer in layers for part in layer) == 10 * spec.block_bytes
    with pytest.raises(ConfigError, match="no block"):
        num_blocks_in(spec.block_bytes - 1, spec.block_bytes, 16)
