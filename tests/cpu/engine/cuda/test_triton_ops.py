"""The operators in Triton, interpreted on the CPU in float32, against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from onbeat.engine.cuda.kernels import DecodeRows, LayerSpec, Norm, StepTensors
from onbeat.engine.cuda.reference import ReferenceKernels
from onbeat.engine.kv_cache import LayerKVCache
from tests.cpu.engine.cuda.kernel_sizes import kernel_sizes

pytest.importorskip("triton", reason="triton is not installed: make test-triton")

from onbeat.engine.cuda import triton_ops

BLOCK_SIZE = 16
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
REFERENCE = ReferenceKernels(kernel_sizes())


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
    torch.testing.assert_close(residual_TD, expected_residual_TD, rtol=0, atol=0)
    torch.testing.assert_close(x_TD, expected_TD, **CLOSE)


def test_add_norm_of_a_residual_alone_may_write_over_it() -> None:
    residual_TD, norm = torch.randn(3, 96), Norm(torch.randn(96), 1e-6, scales_rounded=False)
    kept_TD, expected_TD, out_TD = residual_TD.clone(), torch.empty(3, 96), torch.empty(3, 96)
    REFERENCE.add_norm(None, residual_TD.clone(), norm, expected_TD)
    triton_ops.add_norm(None, residual_TD, norm, out_TD)
    torch.testing.assert_close(residual_TD, kept_TD, rtol=0, atol=0)
    triton_ops.add_norm(None, residual_TD, norm, residual_TD)
    torch.testing.assert_close(out_TD, expected_TD, **CLOSE)
    torch.testing.assert_close(residual_TD, expected_TD, **CLOSE)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_act_mul(activation: str) -> None:
    gate_up_TF2 = torch.randn(3, 2 * 1500) * 4
    gate_up_TF2[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -0.0])
    expected_TF, out_TF = torch.empty(3, 1500), torch.empty(3, 1500)
    REFERENCE.act_mul(gate_up_TF2, activation, expected_TF)
    triton_ops.act_mul(gate_up_TF2, activation, out_TF)
    torch.testing.assert_close(out_TF, expected_TF, **CLOSE)


@pytest.mark.parametrize("norms", ["none", "scales rounded", "scaled before rounding"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(8, 2, 128), (9, 3, 64), (4, 1, 256), (2, 2, 64)]
)
def test_rope_store_rotates_queries_and_fills_the_cache(
    num_heads: int, num_kv_heads: int, head_dim: int, norms: str
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
        query_norm=query_norm,
        key_norm=key_norm,
    )
    step = StepTensors(
        torch.tensor([0, 1, 5, 100, 4000, 131071], dtype=torch.int32),
        torch.tensor([3, 17, 31, 64, 79, 0], dtype=torch.int32),
    )
    qkv_TX = torch.randn(6, (num_heads + 2 * num_kv_heads) * head_dim)
    expected_TX, expected_kv, kv = qkv_TX.clone(), _cache(layer), _cache(layer)
    REFERENCE.rope_store(expected_TX, step, layer, expected_kv)
    triton_ops.rope_store(qkv_TX, step, layer, kv, _queries(qkv_TX, layer))
    torch.testing.assert_close(_queries(qkv_TX, layer), _queries(expected_TX, layer), **CLOSE)
    for part, expected in zip(kv, expected_kv, strict=True):
        torch.testing.assert_close(part, expected, **CLOSE)


def test_values_that_are_no_numbers_are_stored_as_they_are() -> None:
    """A row whose numbers overflowed must not touch its neighbour's, nor become finite."""
    layer = LayerSpec(
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        scale=0.1,
        window=None,
        frequencies_H=torch.ones(32),
        query_norm=None,
        key_norm=None,
    )
    qkv_TX, kv = torch.randn(2, 4 * 64), _cache(layer)
    qkv_TX[0, 3 * 64 + 40] = (
        torch.nan
    )  # the second half of a value, which a rotation would mix with the first
    values_TH = qkv_TX[:, 3 * 64 :].clone()
    step = StepTensors(torch.tensor([7, 8], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32))
    triton_ops.rope_store(qkv_TX, step, layer, kv, _queries(qkv_TX, layer))
    torch.testing.assert_close(kv.v_BKSH[0, 0, :2], values_TH, rtol=0, atol=0, equal_nan=True)


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


def _cache(layer: LayerSpec) -> LayerKVCache:
    shape = (6, layer.num_kv_heads, BLOCK_SIZE, layer.head_dim)
    return LayerKVCache(torch.zeros(shape), torch.zeros(shape))


def _queries(qkv_TX: Tensor, layer: LayerSpec) -> Tensor:
    return qkv_TX.view(len(qkv_TX), -1, layer.head_dim)[:, : layer.num_heads]
