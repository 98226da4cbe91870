"""How a step's numbers travel: one piece of pinned memory, copied to the device at once.

The words on the device are the input of a captured graph, which reads them where they are: nothing is
unpacked. The order of the parts depends on their counts alone, so that both sides find them by the same rule.

Legend: T tokens of the step, R rows that decode, N rows that sample, U changed entries of the block tables.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from onbeat.engine.torch.kernels import Int32Array

_DOUBLES = 4
_TOKEN_PARTS, _DECODE_PARTS, _SAMPLE_PARTS, _UPDATE_PARTS = 4, 2, 3, 2


class StepCounts(NamedTuple):
    """How long the parts are."""

    tokens: int
    decodes: int
    samples: int
    updates: int

    @property
    def num_words(self) -> int:
        """Of 32 bits each."""
        return (
            (2 * _DOUBLES + _SAMPLE_PARTS) * self.samples
            + _TOKEN_PARTS * self.tokens
            + _DECODE_PARTS * self.decodes
            + _UPDATE_PARTS * self.updates
        )


class StepWords(NamedTuple):
    """The parts, as NumPy's arrays or torch's tensors over the same words; int32 unless said otherwise."""

    temperatures_N: Any
    """float64, as are the next three; see `DrawParams`."""
    top_ps_N: Any
    min_ps_N: Any
    numbers_N: Any
    ids_T: Any
    """Token ids; `UNKNOWN_TOKEN` where it is the one that was last chosen for the token's slot."""
    positions_T: Any
    kv_slots_T: Any
    token_slots_T: Any
    """Request slot of each token."""
    lens_R: Any
    """Tokens that each decoding row sees."""
    slots_R: Any
    """Request slot of each decoding row, the line of the block tables."""
    sampled_N: Any
    """Token that each sampling row samples behind."""
    write_slots_N: Any
    """Request slot that the chosen token is for; the padding slot where nobody will read it."""
    top_ks_N: Any
    update_places_U: Any
    """Place in the flat block tables."""
    update_blocks_U: Any
    """What is to be there."""


def host_words(words: Int32Array, counts: StepCounts) -> StepWords:
    """Return the parts in host memory."""
    return _parts(words, counts, np.float64)


def device_words(words: Tensor, counts: StepCounts) -> StepWords:
    """Return the parts on the device."""
    return _parts(words, counts, torch.float64)


def _parts(words: Any, counts: StepCounts, double: Any) -> StepWords:
    parts: list[Any] = []
    start = 2 * _DOUBLES * counts.samples
    doubles = words[:start].view(double)
    parts += [doubles[part * counts.samples : (part + 1) * counts.samples] for part in range(_DOUBLES)]
    for length, num_parts in (
        (counts.tokens, _TOKEN_PARTS),
        (counts.decodes, _DECODE_PARTS),
        (counts.samples, _SAMPLE_PARTS),
        (counts.updates, _UPDATE_PARTS),
    ):
        for _ in range(num_parts):
            parts.append(words[start : start + length])
            start += length
    return StepWords(*parts)
