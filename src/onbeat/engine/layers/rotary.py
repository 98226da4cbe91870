"""Rotary position embedding.

Legend: T tokens, N heads, H head width, P the part of it that turns.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onbeat.engine.model_config import RopeConfig, inverse_frequencies


class Rotation(NamedTuple):
    """Cosines and signed sines of one step's positions."""

    cos_T1P: Tensor
    sin_T1P: Tensor
    """The first half of the last dimension is negated: what `x` rolled by half of it is multiplied by."""

    def apply(self, x_TNH: Tensor) -> Tensor:
        """Return `x_TNH` rotated (new tensor)."""
        width = self.cos_T1P.shape[-1]
        x_TNP = x_TNH[..., :width]
        turned_TNP = torch.addcmul(x_TNP * self.cos_T1P, x_TNP.roll(width // 2, -1), self.sin_T1P)
        return turned_TNP if width == x_TNH.shape[-1] else torch.cat((turned_TNP, x_TNH[..., width:]), -1)


class RotaryEmbedding:
    """Rotations by position.

    Angles are computed in float32 for every type, as the reference implementations do, and anew for each
    step: a few operators a step are cheaper than a table of all positions of a long context.
    """

    def __init__(
        self, config: RopeConfig, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype = dtype
        self.factor = config.attention_factor
        self.frequencies_P = torch.from_numpy(inverse_frequencies(config, head_dim)).repeat(2).to(device)
        self.sign_P = torch.ones_like(self.frequencies_P)
        self.sign_P[: len(self.sign_P) // 2] = -1

    def at(self, positions_T: Tensor) -> Rotation:
        """Return the rotations of a step's tokens."""
        angles_T1P = positions_T[:, None, None].float() * self.frequencies_P
        cos_T1P, sin_T1P = angles_T1P.cos() * self.factor, angles_T1P.sin() * self.sign_P * self.factor
        return Rotation(cos_T1P.to(self.dtype), sin_T1P.to(self.dtype))
