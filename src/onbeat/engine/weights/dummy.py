"""Random weights for tests and load experiments: right shapes, sensible scale, the same for the same seed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable

import torch

from onbeat.core.errors import ModelLoadError
from onbeat.engine.model_config import ModelConfig
from onbeat.engine.weights.parameters import parameter_shapes


class DummyCheckpoint:
    """A checkpoint of random numbers.

    Matrices are normal with standard deviation `1 / sqrt(input width)`, so that activations keep their size
    through the layers; biases are small; norms multiply by about one.

    Parameters
    ----------
    config : the model.
    seed : same seed, same weights, whatever the order of reading.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        self._config = config
        self._seed = seed
        self._shapes = parameter_shapes(config)

    @property
    def config(self) -> ModelConfig:
        """The model that the weights are of."""
        return self._config

    def names(self) -> Iterable[str]:
        """Return the parameters' names."""
        return self._shapes.keys()

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter; see `Checkpoint.get`."""
        return self.get_on(name, dtype, torch.device("cpu"))

    def get_on(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make a parameter on a device: billions of numbers take a GPU a moment, a CPU a minute.

        Other devices have other generators, and so other weights of the same seed.
        """
        shape = self._shapes.get(name)
        if shape is None:
            raise ModelLoadError(f"the {self._config.architecture} model has no parameter {name!r}")
        # A generator for each name: a parameter does not depend on which were read before it. The seed goes
        # into the hash because torch's CPU generator takes only the low 32 bits.
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        noise = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
        if len(shape) == 2:
            # Embeddings feed a norm in some families and are added as they are in others: unit rows over all.
            values = noise / math.sqrt(shape[1])
        elif name.endswith("norm.weight"):
            values = 1.0 - self._config.norm_weight_offset + 0.05 * noise
        else:
            values = 0.02 * noise
        return values.to(dtype)
