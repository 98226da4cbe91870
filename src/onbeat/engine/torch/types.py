"""Number types and arrays of NumPy and of torch, and rows of 8 bits: only what runs on torch imports this.

Legend: F rows, D numbers of each.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onbeat.engine.device import CPU, Device
from onbeat.engine.dtypes import BFLOAT16, FLOAT8, FLOAT32, FLOAT64

FP8 = torch.float8_e4m3fn
_TORCH_TYPES = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16, FLOAT64: torch.float64, FLOAT8: FP8}
_NUMPY_TYPES = {theirs: ours for ours, theirs in _TORCH_TYPES.items()}


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Return torch's name of a number type."""
    return _TORCH_TYPES[dtype]


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return NumPy's name of a number type."""
    return _NUMPY_TYPES[dtype]


def torch_device(device: Device) -> torch.device:
    """Return torch's name of a device."""
    return torch.device(str(device))


def device_of(device: torch.device) -> Device:
    """Return the device that torch calls so."""
    assert device.type in ("cpu", "cuda"), device
    return Device("cuda", device.index) if device.type == "cuda" else CPU


def to_tensor(array: NDArray[Any]) -> Tensor:
    """Return an array as a tensor on the CPU that shares its memory."""
    if array.dtype == BFLOAT16:  # which torch.from_numpy does not know
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


_LARGEST_FP8 = 448.0
"""Of e4m3."""
_SMALLEST_SCALE = 2.0**-100


class Fp8Matrix(NamedTuple):
    """Rows of numbers in 8 bits (Micikevicius et al., "FP8 Formats for Deep Learning", 2022)."""

    values_FD: Tensor
    """float8_e4m3fn."""
    scales_F1: Tensor
    """float32: what the numbers of a row are multiplied by."""

    @classmethod
    def of(cls, rows_FD: Tensor) -> Fp8Matrix:
        """Return rows in 8 bits, the largest number of each as the largest that these have."""
        scales_F1 = rows_FD.abs().amax(-1, keepdim=True).float() / _LARGEST_FP8
        scales_F1 = scales_F1.clamp_(min=_SMALLEST_SCALE)
        return cls((rows_FD / scales_F1).to(FP8), scales_F1)


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers as a KV cache of some type has them: too large ones become the largest of 8 bits."""
    return x.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(dtype) if dtype == FP8 else x


Matrix = Tensor | Fp8Matrix
