"""Parameters as tensors on a device: what runs on torch reads a checkpoint by this."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from onbeat.engine.torch.types import numpy_dtype, to_tensor
from onbeat.engine.weights import Checkpoint


@runtime_checkable
class DeviceSource(Protocol):
    """A checkpoint that can make parameters on the device where they are wanted."""

    def get_on(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a parameter on a device; see `Checkpoint.get`."""
        ...


def parameter_on(checkpoint: Checkpoint, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a parameter on a device; on the CPU it may share memory with a file, so don't write to it.

    Raises
    ------
    ModelLoadError : the parameter is not there or cannot be read.
    """
    if isinstance(checkpoint, DeviceSource):
        return checkpoint.get_on(name, dtype, device)
    return to_tensor(checkpoint.get(name, numpy_dtype(dtype))).to(device)
