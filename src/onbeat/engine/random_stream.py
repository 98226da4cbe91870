"""The random numbers of sampling: a function of a request's seed and the token's position alone.

A counter-based stream needs no state, so a token is the same whatever the batch, the chunks, a preemption or
the device: the host hashes (seed, position) and the sampler inverts a cumulative distribution.

References
----------
Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014 (SplitMix64).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_DOUBLE_UNIT = 2.0**-53


def mix(value: int) -> int:
    """Return SplitMix64's finalizer of an integer modulo 2**64: each bit changes half of the output bits."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def mix_words(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return `mix` of many values at once."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def stream_start(seed: int) -> int:
    """Return the state of the generator of a seed before its first number."""
    return mix(seed + GOLDEN_GAMMA)


def uniforms(starts: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `uniform` of many seeds at once, of which `stream_start` is given."""
    words = mix_words(starts + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN_GAMMA))
    numbers: NDArray[np.float64] = (words >> np.uint64(11)).astype(np.float64) * _DOUBLE_UNIT
    return numbers


def uniform(seed: int, position: int, *, draw: int = 0) -> float:
    """Return the uniform number in [0, 1) that chooses one output token.

    Parameters
    ----------
    seed : of the request; any integer, taken modulo 2**64.
    position : index of the token among the request's output tokens, below 2**32.
    draw : 1 for the token that replaces one which a grammar refuses; independent of draw 0.

    Notes
    -----
    The seed is scrambled first, so that consecutive seeds start at unrelated points; position k is then the
    k-th number of the SplitMix64 generator that starts there.
    """
    index = (draw << 32) + position + 1
    return (mix(stream_start(seed) + index * GOLDEN_GAMMA) >> 11) * _DOUBLE_UNIT
