"""Rotary position embedding, with the kinds of frequency scaling that `RopeConfig` knows.

Legend: T tokens, N heads, H head width.
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

    cos_T1H: Tensor
    sin_T1H: Tensor
    """The first half of the last dimension is negated: what `x` rolled by half a head is multiplied by."""

    def apply(self, x_TNH: Tensor) -> Tensor:
        """Return `x_TNH` rotated (new tensor)."""
        half = x_TNH.shape[-1] // 2
        return torch.addcmul(x_TNH * self.cos_T1H, x_TNH.roll(half, -1), self.sin_T1H)


class RotaryEmbedding:
    """Rotations by position.

    Angles are computed in float32 for every type, as the reference implementations do, and anew for each
    step: a few operators a step are cheaper than a table of all positions of a long context.
    """

    def __init__(
        self, config: RopeConfig, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype = dtype
        self.frequencies_H = inverse_frequencies(config, head_dim).repeat(2).to(device)
        self.sign_H = torch.ones(head_dim, device=device)
        self.sign_H[: head_dim // 2] = -1

    def at(self, positions_T: Tensor) -> Rotation:
        """Return the rotations of a step's tokens."""
        angles_T1H = positions_T[:, None, None].float() * self.frequencies_H
        return Rotation(angles_T1H.cos().to(self.dtype), (angles_T1H.sin() * self.sign_H).to(self.dtype))


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Return the angle per position of each pair of dimensions, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies: Tensor = 1.0 / (config.theta**exponents)
    if config.kind == "default":
        return frequencies
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _scale_llama3(frequencies, config)
    assert config.frequency_factors is not None, "kind 'factors' comes with frequency_factors"
    return frequencies / torch.tensor(config.frequency_factors, dtype=torch.float32)


def _scale_llama3(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, blend between (Llama 3.1)."""
    context = config.original_max_position_embeddings
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (context / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / config.factor + smooth * frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / config.factor, blended)
    return torch.where(wavelengths < context / high, frequencies, scaled)
