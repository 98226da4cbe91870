"""The draw in plain torch, in float64 and by sorting: what the quick one is tested against.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onbeat.engine.cuda.kernels import BestBuffers, DrawParams


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
