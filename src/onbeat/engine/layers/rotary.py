"""Rotary position embedding, with the kinds of frequency scaling that `RopeConfig` knows.

Legend: T tokens, N heads, H head width, P the part of it that turns.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from onbeat.engine.model_config import RopeConfig


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
        self.frequencies_P = inverse_frequencies(config, head_dim).repeat(2).to(device)
        self.sign_P = torch.ones_like(self.frequencies_P)
        self.sign_P[: len(self.sign_P) // 2] = -1

    def at(self, positions_T: Tensor) -> Rotation:
        """Return the rotations of a step's tokens."""
        angles_T1P = positions_T[:, None, None].float() * self.frequencies_P
        cos_T1P, sin_T1P = angles_T1P.cos() * self.factor, angles_T1P.sin() * self.sign_P * self.factor
        return Rotation(cos_T1P.to(self.dtype), sin_T1P.to(self.dtype))


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Return the angle per position of each pair of dimensions that turns, float32 [P / 2]."""
    width = config.rotary_dim or head_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    if config.kind == "none":
        return torch.zeros_like(exponents)
    frequencies: Tensor = 1.0 / (config.theta**exponents)
    if config.kind == "default":
        return frequencies
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _scale_llama3(frequencies, config)
    assert config.frequency_factors is not None, "kind 'factors' comes with frequency_factors"
    return 1.0 / (torch.tensor(config.frequency_factors, dtype=torch.float32) * config.theta**exponents)


def _scale_llama3(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, blend between (Llama 3.1)."""
    context = config.original_max_position_embeddings
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (context / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / config.factor + smooth * frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / config.factor, blended)
    return torch.where(wavelengths < context / high, frequencies, scaled)
