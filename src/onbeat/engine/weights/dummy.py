"""Random weights for tests and load experiments: right shapes, sensible scale, the same for the same seed."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from onbeat.engine.model_config import ModelConfig
from onbeat.engine.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch


class DummyCheckpoint(Checkpoint):
    """A checkpoint of random numbers.

    Numbers are uniform, which is quick to make. Matrices have the standard deviation `1 / sqrt(input
    width)`, so that activations keep their size through the layers; biases are small; norms multiply by about
    one.

    Parameters
    ----------
    config : the model.
    seed : same seed, same weights, whatever the order of reading.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__(config)
        self._seed = seed

    def get(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a parameter; see `Checkpoint.get`."""
        low, width = self._range(name)
        generator = np.random.Generator(np.random.SFC64(self._seed_of(name)))
        values = generator.random(self._shapes[name], dtype=np.float32)
        values *= np.float32(width)
        values += np.float32(low)
        return values.astype(dtype, copy=False)

    def get_on(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make a parameter on a device; see `DeviceSource`.

        A GPU makes billions of numbers in a moment, a CPU in seconds. Its generator is another one, so its
        weights of the same seed differ.
        """
        import torch

        from onbeat.engine.torch.types import numpy_dtype, to_tensor

        if device.type == "cpu":
            return to_tensor(self.get(name, numpy_dtype(dtype)))
        low, width = self._range(name)
        generator = torch.Generator(device).manual_seed(self._seed_of(name))
        values = torch.rand(self._shapes[name], generator=generator, dtype=torch.float32, device=device)
        return values.mul_(width).add_(low).to(dtype)

    def _seed_of(self, name: str) -> int:
        """Return a seed for each name: a parameter does not depend on which were read before it."""
        return zlib.crc32(f"{self._seed} {name}".encode())

    def _range(self, name: str) -> tuple[float, float]:
        """Return the least value of a parameter's numbers, and the width of their range."""
        shape = self.shape_of(name)
        mean, deviation = 0.0, 0.02
        if len(shape) == 2:
            # Embeddings feed a norm in some families and are added as they are in others: unit rows over all.
            deviation = 1 / math.sqrt(shape[1])
        elif name.endswith("norm.weight"):
            mean, deviation = 1.0 - self.config.norm_weight_offset, 0.05
        return mean - math.sqrt(3) * deviation, math.sqrt(12) * deviation
