"""The operators in Triton, interpreted on the CPU in float32, against plain torch."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from onbeat.engine.model_config.architecture import Activation
from onbeat.engine.torch.kernels import DecodeRows, LayerSpec, Norm, StepTensors
from onbeat.engine.torch.kv import LayerKVCache
from tests.cpu.engine.cuda.kernel_sizes import kernel_sizes
from tests.cpu.engine.reference_kernels import ReferenceKernels

pytest.importorskip("triton", reason="triton is not installed: make test-triton")

from onbeat.engine.cuda import triton_ops

BLOCK_SIZE = 16
assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
REFERENCE = ReferenceKernels(kernel_sizes())


def assert_same_codes(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare numbers of 8 bits where the interpreter rounds to the nearest one.

    It loses what a significand carries over, so that none is looked at that may come from a carry, and cuts
    off numbers without a leading one. Few may come from either side of a middle.
    """
    ours, theirs = actual.view(torch.uint8), expected.view(torch.uint8)
    is_clear = (theirs & 0x78 != 0) & (theirs & 0x07 != 0)
    assert (ours == theirs)[is_clear].double().mean() > 0.999
    assert (ours == theirs)[theirs & 0x7F == 0].all()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("scales_rounded", [True, False])
@pytest.mark.parametrize("width", [64, 100, 576])
def test_add_norm_adds_in_place_and_normalises_the_sum(width: int, scales_rounded: bool) -> None:
    x_TD, residual_TD = torch.randn(5, width), torch.randn(5, width)
    norm = Norm(torch.randn(width), 1e-6, scales_rounded)
    expected_residual_TD, expected_TD = residual_TD.clone(), torch.empty(5, width)
    REFERENCE.add_norm(x_TD, expected_residual_TD, norm, expected_TD)
    triton_ops.add_norm(x_TD, residual_TD, norm, x_TD)
    assert_equal(residual_TD, expected_residual_TD)
    assert_close(x_TD, expected_TD)


def test_add_norm_of_a_residual_alone_may_write_over_it() -> None:
    residual_TD, norm = torch.randn(3, 96), Norm(torch.randn(96), 1e-6, scales_rounded=False)
    kept_TD, expected_TD, out_TD = residual_TD.clone(), torch.empty(3, 96), torch.empty(3, 96)
    REFERENCE.add_norm(None, residual_TD.clone(), norm, expected_TD)
    triton_ops.add_norm(None, residual_TD, norm, out_TD)
    assert_equal(residual_TD, kept_TD)
    triton_ops.add_norm(None, residual_TD, norm, residual_TD)
    assert_close(out_TD, expected_TD)
    assert_close(residual_TD, expected_TD)


@pytest.mark.parametrize("width", [64, 100, 576])
def test_tokens_become_8_bits_as_rows_of_weights_do(width: int) -> None:
    x_TD = torch.randn(5, width) * torch.tensor([1e-5, 1.0, 300.0, 0.0, 7.0])[:, None]
    x_TD[4, 3] = torch.nan
    values_TD, scales_T1 = triton_ops.in_fp8(x_TD)
    expected_TD, expected_T1 = REFERENCE.in_fp8(x_TD)
    assert_equal(scales_T1, expected_T1)
    assert scales_T1.isnan().flatten().tolist() == [False] * 4 + [True]
    assert_same_codes(values_TD[:4], expected_TD[:4])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_act_mul(activation: Activation) -> None:
    gate_up_TF2 = torch.randn(3, 2 * 1500) * 4
    gate_up_TF2[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -0.0])
    expected_TF, out_TF = torch.empty(3, 1500), torch.empty(3, 1500)
    REFERENCE.act_mul(gate_up_TF2, activation, expected_TF)
    triton_ops.act_mul(gate_up_TF2, activation, out_TF)
    assert_close(out_TF, expected_TF)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("norms", ["none", "scales rounded", "scaled before rounding"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(8, 2, 128), (9, 3, 64), (4, 1, 256), (2, 2, 64)]
)
def test_rope_store_rotates_queries_and_fills_the_cache(
    num_heads: int, num_kv_heads: int, head_dim: int, norms: str, kv_dtype: torch.dtype
) -> None:
    query_norm, key_norm = (
        None if norms == "none" else Norm(torch.randn(head_dim), eps, norms == "scales rounded")
        for eps in (1e-6, 1e-5)
    )
    layer = LayerSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=0.1,
        window=None,
        frequencies_H=1e4 ** -(torch.arange(0, head_dim, 2) / head_dim),
        factors_H=1.0 + 0.1 * (torch.arange(head_dim // 2) % 3),
        sinks_N=None,
        query_norm=query_norm,
        key_norm=key_norm,
    )
    step = StepTensors(
        torch.tensor([0, 1, 5, 100, 4000, 131071], dtype=torch.int32),
        torch.tensor([3, 17, 31, 64, 79, 0], dtype=torch.int32),
    )
    qkv_TX = torch.randn(6, (num_heads + 2 * num_kv_heads) * head_dim)
    kept_TX, expected_kv, kv = qkv_TX.clone(), _cache(layer, kv_dtype), _cache(layer, kv_dtype)
    expected_TNH, q_TNH = (torch.full((6, num_heads, head_dim), torch.nan) for _ in range(2))
    REFERENCE.rope_store(qkv_TX.clone(), step, layer, expected_kv, expected_TNH)
    triton_ops.rope_store(qkv_TX, step, layer, kv, q_TNH)
    assert_equal(qkv_TX, kept_TX)
    assert_close(q_TNH, expected_TNH)
    for part, expected in zip(kv, expected_kv, strict=True):
        if kv_dtype == torch.float32:
            assert_close(part, expected)
        else:
            assert_same_codes(part, expected)


def test_values_that_are_no_numbers_are_stored_as_they_are() -> None:
    """A row whose numbers overflowed must not touch its neighbour's, nor become finite."""
    layer = LayerSpec(
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        scale=0.1,
        window=None,
        frequencies_H=torch.ones(32),
        factors_H=torch.ones(32),
        sinks_N=None,
        query_norm=None,
        key_norm=None,
    )
    qkv_TX, kv = torch.randn(2, 4 * 64), _cache(layer)
    qkv_TX[0, 3 * 64 + 40] = (
        torch.nan
    )  # the second half of a value, which a rotation would mix with the first
    values_TH = qkv_TX[:, 3 * 64 :].clone()
    step = StepTensors(torch.tensor([7, 8], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32))
    triton_ops.rope_store(qkv_TX, step, layer, kv, torch.empty(2, 2, 64))
    assert_equal(kv.v_BKSH[0, 0, :2], values_TH)


def test_list_blocks_puts_the_blocks_of_rows_one_after_the_other() -> None:
    lens_R = torch.tensor([1, 16, 17, 600 * BLOCK_SIZE - 3, 5], dtype=torch.int32)
    table_RW = torch.from_numpy(np.random.default_rng(0).integers(0, 9999, (5, 700), dtype=np.int32))
    ends_R1 = torch.full((6,), -1, dtype=torch.int32)
    blocks, last_lens_R = torch.full((5 * 700,), -1, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    triton_ops.list_blocks(DecodeRows(table_RW, lens_R), BLOCK_SIZE, ends_R1, blocks, last_lens_R)
    num_blocks_R = [1, 1, 2, 600, 1]
    assert ends_R1.tolist() == [0, *np.cumsum(num_blocks_R).tolist()]
    assert last_lens_R.tolist() == [1, 16, 1, 13, 5]
    expected = torch.cat([table_RW[row, :num_blocks] for row, num_blocks in enumerate(num_blocks_R)])
    assert torch.equal(blocks[: len(expected)], expected)
    assert (blocks[len(expected) :] == -1).all()


def _cache(layer: LayerSpec, dtype: torch.dtype = torch.float32) -> LayerKVCache:
    shape = (6, layer.num_kv_heads, BLOCK_SIZE, layer.head_dim)
    return LayerKVCache(*(torch.zeros(shape, dtype=dtype) for _ in range(2)))
