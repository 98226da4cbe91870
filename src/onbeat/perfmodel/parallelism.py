"""How one replica is spread over devices."""

from __future__ import annotations

from dataclasses import dataclass

from onbeat.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Degrees of tensor and pipeline parallelism.

    Raises
    ------
    ConfigError : a degree below 1.
    """

    tensor: int = 1
    """Devices that share every layer (TP)."""
    pipeline: int = 1
    """Stages that the layers are cut into (PP)."""

    def __post_init__(self) -> None:
        for name, degree in (("tensor", self.tensor), ("pipeline", self.pipeline)):
            if degree < 1:
                raise ConfigError(f"the {name}-parallel degree is {degree}; it must be at least 1")

    @property
    def num_devices(self) -> int:
        """Devices of one replica."""
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        return f"TP {self.tensor}, PP {self.pipeline}"
