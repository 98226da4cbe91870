"""Random weights for tests and load experiments: right shapes, sensible scale, the same for the same seed."""

from __future__ import annotations

import math
import re
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.weights.checkpoint import ALL_ROWS, Checkpoint, QuantizedRows
from onbeat.engine.weights.quantized import decoded, random_blocks

if TYPE_CHECKING:
    import torch

_PIECE_NUMBERS = 1 << 16
"""A piece in float32 stays in the processor's cache: an embedding of 2 GiB would take as much again."""
_NORM = re.compile(r"norm(_\d)?\.weight$")


class DummyCheckpoint(Checkpoint):
    """A checkpoint of random numbers.

    Numbers are uniform, which is quick to make. Matrices have the standard deviation `1 / sqrt(input
    width)`, so that activations keep their size through the layers; biases are small; norms multiply by about
    one.

    Parameters
    ----------
    config : the model.
    seed : same seed, same weights, whatever the order of reading.
    form : of quantized layers, a type that `random_blocks` knows; None for plain numbers. Of a model whose
        experts are in MXFP4, nothing else is.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0, form: str | None = None) -> None:
        super().__init__(config)
        self._seed = seed
        self._form = form

    def get(self, name: str, dtype: np.dtype[Any], rows: slice = ALL_ROWS) -> NDArray[Any]:
        """Return a parameter; see `Checkpoint.get`."""
        shape = self.shape_of(name)
        if self._form is not None and (blocks := self.quantized_rows(name)) is not None:
            return decoded(self._form, blocks.read(ALL_ROWS)).reshape(shape).astype(dtype)[rows]
        first, end, _ = rows.indices(shape[0])
        low, width = self._range(name)
        values = np.empty((end - first, *shape[1:]), dtype)
        bits = np.random.PCG64DXSM(self._seed_of(name))
        generator = np.random.Generator(bits.advance(first * math.prod(shape[1:]) // 2))  # two a draw
        for start in range(0, values.size, _PIECE_NUMBERS):
            piece = values.reshape(-1)[start : start + _PIECE_NUMBERS]
            numbers = generator.random(len(piece), dtype=np.float32)
            numbers *= np.float32(width)
            numbers += np.float32(low)
            piece[:] = numbers
        return values

    def quantized_rows(self, name: str) -> QuantizedRows | None:
        """Return random rows in blocks; see `Checkpoint.quantized_rows`."""
        shape, form = self.shape_of(name), self._form
        is_layer = ".layers." in name and not name.endswith(".mlp.gate.weight")
        if form is None or not is_layer or len(shape) != 2 or shape[1] % 32:
            return None
        if form == "MXFP4" and ".experts." not in name:
            return None
        size = shape[0], shape[1]
        return QuantizedRows(
            form, lambda rows: random_blocks(form, size, self._seed_of(name))[rows], np.arange(shape[0])
        )

    def get_on(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make a parameter on a device; see `Checkpoint.get`.

        A GPU makes billions of numbers in a moment, a CPU in seconds. Its generator is another one, so its
        weights of the same seed differ.
        """
        import torch

        from onbeat.engine.torch.types import numpy_dtype, to_tensor

        if device.type == "cpu" or self._form is not None:
            return to_tensor(self.get(name, numpy_dtype(dtype))).to(device)
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
        is_norm = _NORM.search(name) is not None
        if len(shape) >= 2 and not is_norm:
            # Embeddings feed a norm in some families and are added as they are in others: unit rows over all.
            deviation = 1 / math.sqrt(shape[-1])
        elif is_norm or name.endswith(("scale", "scalar")):
            offset = 0.0 if "linear_attn" in name else self.config.norm_weight_offset
            mean, deviation = 1.0 - offset, 0.05
        return mean - math.sqrt(3) * deviation, math.sqrt(12) * deviation
