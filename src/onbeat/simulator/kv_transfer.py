"""How long KV takes from the replica that computed it to the one that reads it."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from onbeat.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransfer:
    """A link of which every transfer gets the whole bandwidth.

    Transfers are short next to the time between two of them (under 0.1 % of a request's time in DistServe,
    OSDI 2024, section 6.3), so they are not made to share it.

    Raises
    ------
    ConfigError : a size or bandwidth that is not above 0, or a negative latency.
    """

    bytes_per_token: float
    """KV of one token, over all layers and devices."""
    bandwidth: float
    """Bytes per second."""
    latency: float = 0.0
    """Seconds before the first byte arrives."""

    def __post_init__(self) -> None:
        for name in ("bytes_per_token", "bandwidth"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise ConfigError(f"{name} of the KV transfer is {value:g}; it must be above 0")
        if not (isfinite(self.latency) and self.latency >= 0):
            raise ConfigError(f"latency of the KV transfer is {self.latency:g} s; it must be 0 or more")

    def seconds(self, num_tokens: int) -> float:
        """Return the time of the KV of so many tokens."""
        return self.latency + num_tokens * self.bytes_per_token / self.bandwidth
