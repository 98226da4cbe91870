"""`TorchKernels` with what graphs need: what quick operators are tested against, in any float type.

Legend: R rows, N query heads, K KV heads, G query heads per KV head, H head width, V vocabulary, C keys of a
row.

The draw in plain torch, in float64 and by sorting: what the quick one is tested against.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onbeat.engine.torch.forward import TorchKernels
from onbeat.engine.torch.kernels import (
    BestBuffers,
    DecodeRows,
    DrawParams,
    Int32Array,
    KernelSizes,
    LayerSpec,
)
from onbeat.engine.torch.kv import LayerKVCache


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


class ReferenceKernels(TorchKernels):
    """Plain torch, with what steps need that are replayed from graphs."""

    def __init__(self, sizes: KernelSizes) -> None:
        super().__init__(sizes.dtype, sizes.device, sizes.block_size)
        self._wide = torch.float64 if sizes.dtype == torch.float64 else torch.float32

    def plan_decodes(self, lens_R: Int32Array, layers: Sequence[LayerSpec], width: int = 1) -> None:
        """Do nothing: lengths are read on the device."""

    def start_decodes(self, rows: DecodeRows) -> None:
        """Do nothing: each layer gathers for itself."""

    def attend_decodes(
        self, q_RNH: Tensor, kv: LayerKVCache, rows: DecodeRows, layer: LayerSpec, out_RNH: Tensor
    ) -> None:
        """Attend as if each new token were a row; see `GraphKernels.attend_decodes`."""
        num_rows = len(q_RNH)
        before_T = torch.arange(rows.width - 1, -1, -1, device=q_RNH.device).repeat(len(rows.lens_R))
        rows = DecodeRows(
            rows.table_RW.repeat_interleave(rows.width, 0),
            rows.lens_R.repeat_interleave(rows.width) - before_T,
        )
        k_RKCH, v_RKCH = (
            part[rows.table_RW.long()].transpose(1, 2).flatten(2, 3).to(self._wide) for part in kv
        )
        keys_C = torch.arange(k_RKCH.shape[2], device=q_RNH.device)
        lens_R1 = rows.lens_R[:, None]
        hidden_RC = keys_C >= lens_R1
        if layer.window is not None:
            hidden_RC |= keys_C < lens_R1 - layer.window
        hidden_R11C = hidden_RC[:, None, None]
        q_RKGH = q_RNH.reshape(num_rows, layer.num_kv_heads, -1, layer.head_dim).to(self._wide)
        scores_RKGC = (q_RKGH @ k_RKCH.transpose(2, 3)).mul_(layer.scale)
        if layer.softcap is not None:
            scores_RKGC.div_(layer.softcap).tanh_().mul_(layer.softcap)
        scores_RKGC.masked_fill_(hidden_R11C, -torch.inf)
        if layer.sinks_N is not None:
            sinks_RKG1 = layer.sinks_N.view(1, layer.num_kv_heads, -1, 1).expand(num_rows, -1, -1, -1)
            scores_RKGC = torch.cat((scores_RKGC, sinks_RKG1), -1)
        shares_RKGC = scores_RKGC.softmax(-1)[..., : len(keys_C)]
        # What is hidden may be another request's NaN, which a weight of zero would let through.
        mixed_RKGH = shares_RKGC @ v_RKCH.masked_fill(hidden_RC[:, None, :, None], 0.0)
        out_RNH.copy_(mixed_RKGH.view(out_RNH.shape))

    def draw(self, logits_RV: Tensor, params: DrawParams, best: BestBuffers, ids_R: Tensor) -> None:
        """Choose tokens; see `GraphKernels.draw`."""
        ids_R.copy_(draw(logits_RV, params, best))
