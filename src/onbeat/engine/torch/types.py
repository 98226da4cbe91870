"""Between NumPy's and torch's number types and arrays: only what runs on torch imports this."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onbeat.engine.device import CPU, Device
from onbeat.engine.dtypes import BFLOAT16, FLOAT32, FLOAT64

_TORCH_TYPES = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16, FLOAT64: torch.float64}
_NUMPY_TYPES = {theirs: ours for ours, theirs in _TORCH_TYPES.items()}


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Return torch's name of a number type of `DTYPES`."""
    return _TORCH_TYPES[dtype]


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return NumPy's name of a number type of `DTYPES`."""
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
