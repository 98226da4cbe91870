"""The operators in plain torch: what quick ones are tested against, on any device and in any float type.

Legend: T tokens of a step, R rows, D model width, N query heads, K KV heads, G query heads per KV head, H
head width, F feed-forward width, V vocabulary, W columns of a block table, C keys of a row, X = (N + 2 K) H.

The draw in plain torch, in float64 and by sorting: what the quick one is tested against.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onbeat.engine.cuda.kernels import (
    BestBuffers,
    ChunkRows,
    DecodeRows,
    DrawParams,
    Int32Array,
    KernelSizes,
    LayerSpec,
    Norm,
    StepTensors,
)
from onbeat.engine.layers.mlp import ACTIVATIONS
from onbeat.engine.model_config import Activation
from onbeat.engine.torch_kv import LayerKVCache


def draw(logits_RV: Tensor, params: DrawParams, best: BestBuffers) -> Tensor:
    """Return each row's token, int64 [R]; see `Kernels.draw`."""
    is_random_R = params.temperatures_R > 0.0
    temperatures_R1 = torch.where(is_random_R, params.temperatures_R, 1.0)[:, None]
    wide_RV = logits_RV.double() + 0.0  # -0.0 becomes 0.0, which it is to rank with
    weights_RV = ((wide_RV - wide_RV.amax(-1, keepdim=True)) / temperatures_R1).exp_()

    sorted_RV, order_RV = wide_RV.sort(dim=-1, descending=True, stable=True)
    falling_RV = ((sorted_RV - sorted_RV[:, :1]) / temperatures_R1).exp_()
    kept_R, cumulative_RV = _kept(falling_RV, params)
    place_R = _located(cumulative_RV, kept_R, params.numbers_R)
    truncated_R = order_RV.gather(1, place_R[:, None])[:, 0]

    num_ids = logits_RV.shape[1]
    whole_R = _located(weights_RV.cumsum(-1), torch.full_like(kept_R, num_ids), params.numbers_R)
    is_truncated_R = (params.top_ks_R > 0) | (params.top_ps_R < 1.0) | (params.min_ps_R > 0.0)
    drawn_R = torch.where(is_truncated_R, truncated_R, whole_R)
    return torch.where(is_random_R, drawn_R, best.ids_R.long())


def _kept(falling_RV: Tensor, params: DrawParams) -> tuple[Tensor, Tensor]:
    """Return how long a prefix of the falling order min-p, top-k and top-p keep, and cumulative weights."""
    num_ids = falling_RV.shape[1]
    everything_R = torch.full_like(params.top_ks_R, num_ids, dtype=torch.int64)
    by_min_p_R = (falling_RV >= params.min_ps_R[:, None]).sum(-1)
    kept_R = torch.where(params.min_ps_R > 0.0, by_min_p_R, everything_R)
    kept_R = torch.where(params.top_ks_R > 0, torch.minimum(kept_R, params.top_ks_R.long()), kept_R)
    kept_R = kept_R.clamp(min=1)  # NaN is not above min-p
    cumulative_RV = falling_RV.cumsum(-1)
    # Of what the first two keep: of all where they keep all.
    targets_R1 = params.top_ps_R[:, None] * cumulative_RV.gather(1, kept_R[:, None] - 1)
    by_top_p_R = torch.searchsorted(cumulative_RV, targets_R1)[:, 0] + 1
    kept_R = torch.where(params.top_ps_R < 1.0, torch.minimum(kept_R, by_top_p_R), kept_R)
    return kept_R, cumulative_RV


def _located(cumulative_RV: Tensor, kept_R: Tensor, numbers_R: Tensor) -> Tensor:
    """Return the first place whose cumulative weight exceeds the number's share; see `draw.locate`."""
    totals_R1 = cumulative_RV.gather(1, kept_R[:, None] - 1)
    place_R1 = torch.searchsorted(cumulative_RV, numbers_R[:, None] * totals_R1, right=True)
    last_R1 = torch.searchsorted(cumulative_RV, totals_R1)
    # Numbers that are none have no place.
    return torch.minimum(place_R1, last_R1)[:, 0].clamp(max=cumulative_RV.shape[1] - 1)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One row of a `plan_chunks`."""

    start: int
    end: int
    """Tokens among those of the planned rows."""
    context_len: int
    blocks: Tensor
    """int64, on the device."""


class ReferenceKernels:
    """Plain torch, in float32 (float64 in a float64 model) wherever more than a product is computed."""

    name = "torch"

    def __init__(self, sizes: KernelSizes) -> None:
        self._sizes = sizes
        self._wide = torch.float64 if sizes.dtype == torch.float64 else torch.float32

    def add_norm(self, x_TD: Tensor | None, residual_TD: Tensor, norm: Norm, out_TD: Tensor) -> None:
        """Add and normalise; see `Kernels.add_norm`."""
        if x_TD is not None:
            residual_TD.add_(x_TD)
        out_TD.copy_(_normalised(residual_TD, norm))

    def rope_store(
        self, qkv_TX: Tensor, step: StepTensors, layer: LayerSpec, kv: LayerKVCache, q_TNH: Tensor
    ) -> None:
        """Rotate and store; see `Kernels.rope_store`."""
        num_heads, num_kv_heads = layer.num_heads, layer.num_kv_heads
        heads_TXH = qkv_TX.view(len(qkv_TX), num_heads + 2 * num_kv_heads, layer.head_dim)
        k_TKH, v_TKH = heads_TXH[:, num_heads:].chunk(2, dim=1)
        angles_T1H = step.positions_T[:, None, None].float() * layer.frequencies_H.repeat(2)
        cos_T1H, sin_T1H = angles_T1H.cos().to(self._wide), angles_T1H.sin().to(self._wide)
        rotated_TKH = self._rotated(k_TKH, layer.key_norm, cos_T1H, sin_T1H)
        q_TNH.copy_(self._rotated(heads_TXH[:, :num_heads], layer.query_norm, cos_T1H, sin_T1H))
        slots_T = step.kv_slots_T.long()
        where = (slots_T // self._sizes.block_size, slots_T % self._sizes.block_size)
        kv.k_BKSH.transpose(1, 2).index_put_(where, rotated_TKH)
        kv.v_BKSH.transpose(1, 2).index_put_(where, v_TKH)

    def act_mul(self, gate_up_TF2: Tensor, activation: Activation, out_TF: Tensor) -> None:
        """Activate the gate and multiply; see `Kernels.act_mul`."""
        gate_TF, up_TF = gate_up_TF2.to(self._wide).chunk(2, dim=-1)
        out_TF.copy_(ACTIVATIONS[activation](gate_TF).mul_(up_TF))

    def plan_decodes(self, lens_R: Int32Array, layers: Sequence[LayerSpec]) -> None:
        """Do nothing: lengths are read on the device."""

    def start_decodes(self, rows: DecodeRows) -> None:
        """Do nothing: each layer gathers for itself."""

    def attend_decodes(
        self, q_RNH: Tensor, kv: LayerKVCache, rows: DecodeRows, layer: LayerSpec, out_RNH: Tensor
    ) -> None:
        """Attend with one query a row; see `Kernels.attend_decodes`."""
        num_rows = len(q_RNH)
        k_RKCH, v_RKCH = (self._gathered(part, rows.table_RW.long()) for part in kv)
        keys_C = torch.arange(k_RKCH.shape[2], device=q_RNH.device)
        lens_R1 = rows.lens_R[:, None]
        hidden_RC = keys_C >= lens_R1
        if layer.window is not None:
            hidden_RC |= keys_C < lens_R1 - layer.window
        hidden_R11C = hidden_RC[:, None, None]
        q_RKGH = q_RNH.reshape(num_rows, layer.num_kv_heads, -1, layer.head_dim).to(self._wide)
        scores_RKGC = (
            (q_RKGH @ k_RKCH.transpose(2, 3)).mul_(layer.scale).masked_fill_(hidden_R11C, -torch.inf)
        )
        # What is hidden may be another request's NaN, which a weight of zero would let through.
        mixed_RKGH = scores_RKGC.softmax(-1) @ v_RKCH.masked_fill(hidden_RC[:, None, :, None], 0.0)
        out_RNH.copy_(mixed_RKGH.view(out_RNH.shape))

    def plan_chunks(self, rows: ChunkRows, layer: LayerSpec) -> list[_Chunk]:
        """Cut the step into rows; see `Kernels.plan_chunks`."""
        ends, block_ends = np.cumsum(rows.query_lens_R), np.cumsum(rows.num_blocks_R)
        blocks = torch.from_numpy(rows.block_ids.astype(np.int64)).to(self._sizes.device)
        return [
            _Chunk(end - query_len, end, context_len, blocks[block_end - num_blocks : block_end])
            for end, query_len, context_len, block_end, num_blocks in zip(
                ends.tolist(),
                rows.query_lens_R.tolist(),
                rows.context_lens_R.tolist(),
                block_ends.tolist(),
                rows.num_blocks_R.tolist(),
                strict=True,
            )
        ]

    def attend_chunks(
        self, q_TNH: Tensor, kv: LayerKVCache, plan: list[_Chunk], layer: LayerSpec, out_TNH: Tensor
    ) -> None:
        """Attend row by row; see `Kernels.attend_chunks`."""
        for chunk in plan:
            k_KCH, v_KCH = (
                self._gathered(part, chunk.blocks[None])[0, :, : chunk.context_len] for part in kv
            )
            num_tokens = chunk.end - chunk.start
            keys_C = torch.arange(chunk.context_len, device=q_TNH.device)
            positions_T1 = keys_C[chunk.context_len - num_tokens :, None]
            hidden_TC = keys_C > positions_T1
            if layer.window is not None:
                hidden_TC |= keys_C <= positions_T1 - layer.window
            q_KGTH = (
                q_TNH[chunk.start : chunk.end]
                .reshape(num_tokens, layer.num_kv_heads, -1, layer.head_dim)
                .permute(1, 2, 0, 3)
                .to(self._wide)
            )
            scores_KGTC = (q_KGTH @ k_KCH[:, None].transpose(2, 3)).mul_(layer.scale)
            mixed_KGTH = scores_KGTC.masked_fill_(hidden_TC, -torch.inf).softmax(-1) @ v_KCH[:, None]
            out_TNH[chunk.start : chunk.end] = mixed_KGTH.permute(2, 0, 1, 3).flatten(1, 2)

    def best(self, logits_RV: Tensor, out: BestBuffers) -> None:
        """Find the most likely tokens; see `Kernels.best`."""
        peaks_R, ids_R = logits_RV.max(-1)
        out.ids_R.copy_(ids_R)
        out.peaks_R.copy_(peaks_R)

    def draw(self, logits_RV: Tensor, params: DrawParams, best: BestBuffers, ids_R: Tensor) -> None:
        """Choose tokens; see `Kernels.draw`."""
        ids_R.copy_(draw(logits_RV, params, best))

    def _rotated(self, x_TNH: Tensor, norm: Norm | None, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
        wide_TNH = (x_TNH if norm is None else _normalised(x_TNH, norm)).to(self._wide)
        first, second = wide_TNH.chunk(2, dim=-1)
        turned_TNH = torch.cat((-second, first), dim=-1)
        return (wide_TNH * cos_T1H + turned_TNH * sin_T1H).to(x_TNH.dtype)

    def _gathered(self, part_BKSH: Tensor, table_RW: Tensor) -> Tensor:
        """Return the keys or values of rows, one after the other: [R, K, C, H]."""
        return part_BKSH[table_RW].transpose(1, 2).flatten(2, 3).to(self._wide)


def _normalised(x: Tensor, norm: Norm) -> Tensor:
    # In float64, too, for the reference implementations do so.
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    return norm.scale_D * wide.to(x.dtype) if norm.scales_rounded else (wide * norm.scale_D).to(x.dtype)
