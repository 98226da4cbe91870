"""The small operators of a layer in Triton: one kernel each, in float32, rounded as the reference rounds.

A launch depends on shapes alone, and no argument that varies from step to step is specialised on, so that
every kernel that a graph will hold has been compiled by the first step that runs it.

Legend: T tokens of a step, D model width, N query heads, K KV heads, H head width, F feed-forward width,
X = (N + 2 K) H.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onbeat.engine.model_config.architecture import Activation
from onbeat.engine.torch.kernels import DecodeRows, LayerSpec, Norm, StepTensors
from onbeat.engine.torch.kv import LayerKVCache
from onbeat.engine.torch.types import Fp8Matrix

_HEADS_TOGETHER = 4
"""Heads of a token that one program rotates, so that a cosine serves several."""
_FEATURES_TOGETHER = 1024
"""Outputs of an activation that one program computes."""
_BLOCKS_TOGETHER = 512
"""Entries of a block table that are copied at once."""


def add_norm(x_TD: Tensor | None, residual_TD: Tensor, norm: Norm, out_TD: Tensor) -> None:
    """Add and normalise; see `Kernels.add_norm`."""
    num_tokens, width = residual_TD.shape
    block = triton.next_power_of_2(width)
    _add_norm[(num_tokens,)](
        residual_TD if x_TD is None else x_TD,
        residual_TD,
        norm.scale_D,
        out_TD,
        norm.eps,
        WIDTH=width,
        BLOCK=block,
        ADDS=x_TD is not None,
        SCALES_ROUNDED=norm.scales_rounded,
        num_warps=_warps(block),
    )


def rope_store(qkv_TX: Tensor, step: StepTensors, layer: LayerSpec, kv: LayerKVCache, q_TNH: Tensor) -> None:
    """Rotate and store; see `Kernels.rope_store`."""
    num_heads = layer.num_heads + 2 * layer.num_kv_heads
    head_dim, norm = layer.head_dim, layer.query_norm
    assert (norm is None) == (layer.key_norm is None), "queries and keys have norms, or neither"
    assert head_dim & (head_dim - 1) == 0, f"a head of {head_dim} numbers is no power of two"
    query_scale_H, key_scale_H = (
        (layer.frequencies_H, layer.frequencies_H)  # not read
        if norm is None or layer.key_norm is None
        else (norm.scale_D, layer.key_norm.scale_D)
    )
    _rope_store[(len(qkv_TX), triton.cdiv(num_heads, _HEADS_TOGETHER))](
        qkv_TX,
        q_TNH,
        kv.k_BKSH,
        kv.v_BKSH,
        step.positions_T,
        step.kv_slots_T,
        layer.frequencies_H,
        layer.factors_H,
        query_scale_H,
        key_scale_H,
        0.0 if norm is None else norm.eps,
        0.0 if layer.key_norm is None else layer.key_norm.eps,
        NUM_HEADS=layer.num_heads,
        NUM_KV_HEADS=layer.num_kv_heads,
        PAIRS=head_dim // 2,
        BLOCK_SIZE=kv.k_BKSH.shape[2],
        TOGETHER=_HEADS_TOGETHER,
        NORMS=norm is not None,
        SCALES_ROUNDED=norm is not None and norm.scales_rounded,
        num_warps=1 if head_dim <= 128 else 2,
    )


def act_mul(gate_up_TF2: Tensor, activation: Activation, out_TF: Tensor) -> None:
    """Activate the gate and multiply; see `Kernels.act_mul`."""
    num_tokens, width = out_TF.shape
    _act_mul[(num_tokens, triton.cdiv(width, _FEATURES_TOGETHER))](
        gate_up_TF2,
        out_TF,
        WIDTH=width,
        BLOCK=_FEATURES_TOGETHER,
        GELU=activation == "gelu_pytorch_tanh",
        num_warps=4,
    )


def in_fp8(x_TD: Tensor) -> Fp8Matrix:
    """Turn tokens into 8 bits a number; see `Kernels.in_fp8`."""
    num_tokens, width = x_TD.shape
    values_TD = torch.empty_like(x_TD, dtype=torch.float8_e4m3fn)
    scales_T1 = torch.empty(num_tokens, 1, dtype=torch.float32, device=x_TD.device)
    block = triton.next_power_of_2(width)
    _in_fp8[(num_tokens,)](x_TD, values_TD, scales_T1, WIDTH=width, BLOCK=block, num_warps=_warps(block))
    return Fp8Matrix(values_TD, scales_T1)


def list_blocks(
    rows: DecodeRows, block_size: int, ends_R1: Tensor, blocks: Tensor, last_lens_R: Tensor
) -> None:
    """Write the blocks of rows one after the other, as planned attention reads them.

    Parameters
    ----------
    ends_R1 : int32 [R + 1]: 0, and where each row's blocks end.
    blocks : int32, room for all.
    last_lens_R : int32 [R]: tokens in each row's last block.
    """
    num_rows, num_columns = rows.table_RW.shape
    _list_blocks[(num_rows,)](
        rows.table_RW,
        rows.lens_R,
        ends_R1,
        blocks,
        last_lens_R,
        num_rows,
        num_columns,
        ROWS_BLOCK=triton.next_power_of_2(num_rows),
        BLOCK_SIZE=block_size,
        TOGETHER=_BLOCKS_TOGETHER,
        num_warps=4,
    )


def _warps(block: int) -> int:
    """Return warps for a program that holds `block` numbers, 16 to a thread."""
    return min(max(block // 512, 1), 16)


@triton.jit
def _scaled(x, scale, TYPE: tl.constexpr, SCALES_ROUNDED: tl.constexpr):
    """Return normalised float32 numbers times their scale, rounded to TYPE (see `Norm`)."""
    if SCALES_ROUNDED:
        x = x.to(TYPE).to(tl.float32)
    return (x * scale.to(tl.float32)).to(TYPE)


@triton.jit
def _add_norm(
    x_ptr,
    residual_ptr,
    scale_ptr,
    out_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    SCALES_ROUNDED: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    scale = tl.load(scale_ptr + columns, mask=mask, other=0.0)
    x = tl.load(residual_ptr + start + columns, mask=mask, other=0.0)
    type_: tl.constexpr = x.dtype
    if ADDS:
        x = (x.to(tl.float32) + tl.load(x_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)).to(
            type_
        )
        tl.store(residual_ptr + start + columns, x, mask=mask)
    wide = x.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    tl.store(out_ptr + start + columns, _scaled(wide, scale, type_, SCALES_ROUNDED), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rope_store(
    qkv_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    positions_ptr,
    slots_ptr,
    frequencies_ptr,
    factors_ptr,
    query_scale_ptr,
    key_scale_ptr,
    query_eps,
    key_eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOGETHER: tl.constexpr,
    NORMS: tl.constexpr,
    SCALES_ROUNDED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)[:, None]
    pairs = tl.arange(0, PAIRS)[None, :]
    is_query = heads < NUM_HEADS
    is_key = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
    mask = (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & (pairs >= 0)

    slot = tl.load(slots_ptr + token).to(tl.int64)
    angles = tl.load(positions_ptr + token).to(tl.float32) * tl.load(frequencies_ptr + pairs)
    from_ = qkv_ptr + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * 2 * PAIRS) + heads * (2 * PAIRS) + pairs
    first = tl.load(from_, mask=mask, other=0.0)
    second = tl.load(from_ + PAIRS, mask=mask, other=0.0)
    type_: tl.constexpr = first.dtype
    a, b = first, second
    if NORMS:
        x, y = first.to(tl.float32), second.to(tl.float32)
        mean = (tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)) / (2 * PAIRS)
        factor = tl.rsqrt(mean[:, None] + tl.where(is_query, query_eps, key_eps))
        query_first = tl.load(query_scale_ptr + pairs).to(tl.float32)
        query_second = tl.load(query_scale_ptr + PAIRS + pairs).to(tl.float32)
        key_first = tl.load(key_scale_ptr + pairs).to(tl.float32)
        key_second = tl.load(key_scale_ptr + PAIRS + pairs).to(tl.float32)
        a = _scaled(x * factor, tl.where(is_query, query_first, key_first), type_, SCALES_ROUNDED)
        b = _scaled(y * factor, tl.where(is_query, query_second, key_second), type_, SCALES_ROUNDED)

    factors = tl.load(factors_ptr + pairs)
    cos, sin = tl.cos(angles) * factors, tl.sin(angles) * factors
    a, b = a.to(tl.float32), b.to(tl.float32)
    turned_first = (a * cos - b * sin).to(type_)
    turned_second = (b * cos + a * sin).to(type_)

    to_query = q_ptr + token * (NUM_HEADS * 2 * PAIRS) + heads * (2 * PAIRS) + pairs
    tl.store(to_query, turned_first, mask=is_query & mask)
    tl.store(to_query + PAIRS, turned_second, mask=is_query & mask)
    # Offsets into the cache pass 2**31 numbers: `slot` is an int64.
    kv_heads = heads - NUM_HEADS - tl.where(is_value, NUM_KV_HEADS, 0)
    place = ((slot // BLOCK_SIZE) * NUM_KV_HEADS + kv_heads) * BLOCK_SIZE + slot % BLOCK_SIZE
    place = place * (2 * PAIRS) + pairs
    tl.store(keys_ptr + place, turned_first, mask=is_key & mask)
    tl.store(keys_ptr + place + PAIRS, turned_second, mask=is_key & mask)
    tl.store(values_ptr + place, first, mask=is_value & mask)
    tl.store(values_ptr + place + PAIRS, second, mask=is_value & mask)


@triton.jit
def _act_mul(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate = tl.load(gate_up_ptr + token * (2 * WIDTH) + columns, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + token * (2 * WIDTH) + WIDTH + columns, mask=mask, other=0.0)
    x = gate.to(tl.float32)
    # x (1 + tanh(y)) / 2 = x sigmoid(2 y), so both activations are x sigmoid(...).
    inner = 1.5957691216057308 * (x + 0.044715 * x * x * x) if GELU else x
    product = x / (1.0 + tl.exp(-inner)) * up.to(tl.float32)
    tl.store(out_ptr + token * WIDTH + columns, product.to(gate.dtype), mask=mask)


@triton.jit
def _in_fp8(x_ptr, values_ptr, scales_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0) / 448.0, 7.888609052210118e-31)  # 2**-100
    scale = tl.where(tl.max((x != x).to(tl.int32), axis=0) > 0, float("nan"), scale)
    tl.store(scales_ptr + token, scale)
    values = tl.div_rn(x, scale).to(tl.float8e4nv)
    tl.store(values_ptr + token * WIDTH + columns, values, mask=columns < WIDTH)


@triton.jit(
    do_not_specialize=["num_rows", "num_columns"],
    do_not_specialize_on_alignment=["lens_ptr", "last_lens_ptr"],
)
def _list_blocks(
    table_ptr,
    lens_ptr,
    ends_ptr,
    blocks_ptr,
    last_lens_ptr,
    num_rows,
    num_columns,
    ROWS_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    row = tl.program_id(0)
    rows = tl.arange(0, ROWS_BLOCK)
    lens = tl.load(lens_ptr + rows, mask=rows < num_rows, other=0)
    num_blocks = (lens + BLOCK_SIZE - 1) // BLOCK_SIZE
    start = tl.sum(tl.where(rows < row, num_blocks, 0), axis=0)
    mine = tl.sum(tl.where(rows == row, num_blocks, 0), axis=0)
    tl.store(ends_ptr + row, start)
    tl.store(ends_ptr + row + 1, start + mine)  # what the next row writes, too
    tl.store(last_lens_ptr + row, tl.load(lens_ptr + row) - (mine - 1) * BLOCK_SIZE)
    column = tl.full([], 0, tl.int32)
    while column < mine:
        columns = column + tl.arange(0, TOGETHER)
        mask = columns < mine
        block_ids = tl.load(table_ptr + row.to(tl.int64) * num_columns + columns, mask=mask, other=0)
        tl.store(blocks_ptr + start + columns, block_ids, mask=mask)
        column += TOGETHER
