"""The frequencies of rotary position embedding, with the kinds of scaling that `RopeConfig` knows.

Legend: P the part of a head that turns.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from onbeat.engine.model_config.architecture import RopeConfig

Frequencies = NDArray[np.float32]


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Frequencies:
    """Return the angle per position of each pair of dimensions that turns, [P / 2].

    Powers are computed in float64 and rounded, so that they are the same on every processor; all else is
    float32, as in the reference implementations.
    """
    width = config.rotary_dim or head_dim
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    if config.kind == "none":
        return np.zeros_like(exponents)
    powers = (config.theta ** exponents.astype(np.float64)).astype(np.float32)
    if config.kind == "factors":
        assert config.frequency_factors is not None, "kind 'factors' comes with frequency_factors"
        powers *= np.array(config.frequency_factors, np.float32)
    frequencies: Frequencies = np.float32(1) / powers
    if config.kind == "linear":
        return frequencies / np.float32(config.factor)
    return _scale_llama3(frequencies, config) if config.kind == "llama3" else frequencies


def _scale_llama3(frequencies: Frequencies, config: RopeConfig) -> Frequencies:
    """Divide low frequencies by the factor, keep high ones, blend between (Llama 3.1)."""
    context = config.original_max_position_embeddings
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelengths = np.float32(2 * math.pi) / frequencies
    smooth = (np.float32(context) / wavelengths - np.float32(low)) / np.float32(high - low)
    divided = frequencies / np.float32(config.factor)
    blended = (1 - smooth) * divided + smooth * frequencies
    scaled = np.where(wavelengths > context / low, divided, blended)
    return np.where(wavelengths < context / high, frequencies, scaled)
