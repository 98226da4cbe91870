"""Number formats of weights, KV cache and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from onbeat.core.errors import ConfigError

BYTES = MappingProxyType({"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5})
"""Bytes of one number, without the scales of quantized formats (4 % of int4 weights in groups of 128)."""

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


@dataclass(frozen=True, slots=True)
class Precision:
    """How numbers are stored and multiplied.

    Raises
    ------
    ConfigError : an unknown format.
    """

    weights: str = "bf16"
    """Of the matrices in the layers; embedding and LM head stay at 16 bits where this is smaller."""
    kv: str = "bf16"
    compute: str = "bf16"
    """Of the matrix products; attention uses 16 bits where this is smaller."""

    def __post_init__(self) -> None:
        for dtype in (self.weights, self.kv, self.compute):
            bytes_of(dtype)

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight in the layers."""
        return BYTES[self.weights]

    @property
    def embedding_bytes(self) -> float:
        """Bytes of one number of the embedding and the LM head, which quantization leaves alone."""
        return max(BYTES[self.weights], 2.0)

    @property
    def kv_bytes(self) -> float:
        """Bytes of one number in the KV cache."""
        return BYTES[self.kv]

    @property
    def activation_bytes(self) -> float:
        """Bytes of one number of the hidden states between layers."""
        return max(BYTES[self.compute], 2.0)

    def __str__(self) -> str:
        return f"{self.weights} weights, {self.kv} KV, {self.compute} arithmetic"
