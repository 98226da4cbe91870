"""Number formats of weights, KV cache and arithmetic."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from types import MappingProxyType

from onbeat.core.errors import ConfigError

_WIDE = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}
BYTES = MappingProxyType(_WIDE | {"int4": 0.5, "mxfp4": 17 / 32, "nvfp4": 9 / 16})
"""Bytes of one number. Those of mxfp4 and nvfp4 hold their scales, of 32 and 16 numbers; others do not (4 %
of int4 weights in groups of 128, 0.02 % of fp8 in blocks of 128 x 128)."""
_PUBLISHED = ("mxfp4", "nvfp4")
"""Formats that a model is published in, or not to be had."""
_GROUP_BYTES = MappingProxyType({"int8": 2.0, "int4": 4.0})
"""Bytes that a group of weights shares: a scale; a scale and an offset."""

SIXTEEN_BIT = ("bf16", "fp16")


def bytes_of(dtype: str) -> float:
    """Return the bytes of one number of a format.

    Raises
    ------
    ConfigError : an unknown format.
    """
    try:
        return BYTES[dtype]
    except KeyError:
        raise ConfigError(f"unknown number format {dtype!r}; known are {', '.join(BYTES)}") from None


def narrower_formats(dtype: str) -> tuple[str, ...]:
    """Return the formats with fewer bytes a number that any weights can be cast to, the widest first."""
    narrower = [name for name, size in BYTES.items() if size < bytes_of(dtype) and name not in _PUBLISHED]
    return tuple(sorted(narrower, key=lambda name: -BYTES[name]))


@dataclass(frozen=True, slots=True)
class Precision:
    """How numbers are stored and multiplied.

    Raises
    ------
    ConfigError : an unknown format.
    """

    weights: str = "bf16"
    """Of the matrices in the layers."""
    kv: str = "bf16"
    compute: str = "bf16"
    """Of the matrix products; attention uses 16 bits where this is smaller."""
    embedding: str | None = None
    """Of the embedding and the LM head; None: as the layers, or 16 bits where those use fewer."""
    group: int | None = None
    """Neighbours among int8 and int4 weights that share a scale (int4: an offset too); None counts none."""

    def __post_init__(self) -> None:
        for dtype in (self.weights, self.kv, self.compute, self.embedding or self.weights):
            bytes_of(dtype)
        if self.group is not None and self.group < 1:
            raise ConfigError(f"the group of quantized weights is {self.group}; it must be at least 1")

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight in the layers, with its part of what its group shares."""
        return self._stored_bytes(self.weights)

    @property
    def embedding_bytes(self) -> float:
        """Bytes of one number of the embedding and the LM head."""
        return max(BYTES[self.weights], 2.0) if self.embedding is None else self._stored_bytes(self.embedding)

    @property
    def kv_bytes(self) -> float:
        """Bytes of one number in the KV cache."""
        return BYTES[self.kv]

    @property
    def is_narrow(self) -> bool:
        """Whether matrices multiply in fewer than 16 bits."""
        return BYTES[self.compute] < BYTES["bf16"]

    @property
    def activation_bytes(self) -> float:
        """Bytes of one number of the hidden states between layers."""
        return max(BYTES[self.compute], 2.0)

    def _stored_bytes(self, dtype: str) -> float:
        return BYTES[dtype] + (0.0 if self.group is None else _GROUP_BYTES.get(dtype, 0.0) / self.group)

    def __str__(self) -> str:
        embedding = "" if self.embedding is None else f" ({self.embedding} embedding)"
        group = "" if self.group is None else f" in groups of {self.group}"
        return f"{self.weights} weights{embedding}{group}, {self.kv} KV, {self.compute} arithmetic"


def precision_by_weights(weights: str, *, kv: str | None = None, computes: Collection[str] = ()) -> Precision:
    """Return the formats that go with those of the weights.

    Parameters
    ----------
    kv : of the KV cache; None is that of the weights, at least 16 bits wide.
    computes : formats that the device has arithmetic of; without one for mxfp4 or nvfp4, such weights are
        multiplied in 16 bits, and int4 always is.

    Raises
    ------
    ConfigError : an unknown format.
    """
    if kv is None:
        kv = weights if bytes_of(weights) >= BYTES["bf16"] else "bf16"
    is_wide = weights == "int4" or (weights in _PUBLISHED and weights not in computes)
    return Precision(weights=weights, kv=kv, compute="bf16" if is_wide else weights)
