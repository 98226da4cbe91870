"""Products of the first layer, to be timed."""

from __future__ import annotations

from time import perf_counter

import torch
from torch.nn import functional

from onbeat.engine.cuda.weights import CudaWeights


class CudaProducts:
    """All four matrices of a layer, times rows; see `RowProducts`."""

    def __init__(self, weights: CudaWeights) -> None:
        layer = weights.layers[0]
        self._matrices = (layer.qkv_XD, layer.o_DX, layer.gate_up_FD, layer.down_DF)
        self._device = weights.device
        self.flops_per_row = 2.0 * sum(matrix.numel() for matrix in self._matrices)
        self.num_bytes = sum(matrix.nbytes for matrix in self._matrices)

    @torch.inference_mode()
    def run(self, num_rows: int) -> float:
        """Multiply, and return the seconds that it took."""
        inputs = [matrix.new_ones(num_rows, matrix.shape[1]) for matrix in self._matrices]
        self._synchronize()
        start = perf_counter()
        for x, matrix in zip(inputs, self._matrices, strict=True):
            functional.linear(x, matrix)
        self._synchronize()
        return perf_counter() - start

    def close(self) -> None:
        """Let go of nothing: the weights are the model's."""

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
