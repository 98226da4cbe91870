"""How the reference engine is made."""

from __future__ import annotations

import math

import torch

from onbeat.engine.device import DeviceConfig
from onbeat.engine.kv_cache import KVCacheSpec
from onbeat.engine.progress import OnProgress
from onbeat.engine.torch.forward import TorchForward
from onbeat.engine.torch.types import torch_device, torch_dtype
from onbeat.engine.torch.weights import load_weights
from onbeat.engine.weights import Checkpoint, parameter_shapes
from onbeat.scheduler.scheduler_config import SchedulerConfig


class TorchBackend:
    """The model in torch operators: any device and type.

    Parameters
    ----------
    checkpoint, device : what runs where.
    reason : why torch.
    """

    weights_format: str | None = None
    embedding_format: str | None = None

    def __init__(self, checkpoint: Checkpoint, device: DeviceConfig, reason: str) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self.description = f"by torch ({reason})"

    def weight_bytes(self) -> int:
        shapes = parameter_shapes(self._checkpoint.config)
        return sum(map(math.prod, shapes.values())) * self._device.dtype.itemsize

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        return KVCacheSpec.of_model(self._checkpoint.config, dtype=self._device.dtype, block_size=block_size)

    def build(
        self,
        limits: SchedulerConfig,
        *,
        on_progress: OnProgress,  # noqa: ARG002
        spare_bytes: int = 0,  # noqa: ARG002
    ) -> TorchForward:
        torch.set_num_threads(self._device.num_threads)
        dtype, device = torch_dtype(self._device.dtype), torch_device(self._device.device)
        weights = load_weights(self._checkpoint, dtype, device)
        return TorchForward(weights, num_blocks=limits.num_blocks, block_size=limits.block_size)
