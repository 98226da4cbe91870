"""The reference engine: the model in torch operators, on any device and in any type.

Legend: T tokens of the step, R sampling rows, P tokens whose hidden states are wanted, D model width,
V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from onbeat.engine.attention.base import IntArray
from onbeat.engine.attention.torch_sdpa import ForwardContext, TorchAttention
from onbeat.engine.device import Device, DeviceConfig, wait_for
from onbeat.engine.forward import RowProducts, StepLogits
from onbeat.engine.input_batch import StepInputs
from onbeat.engine.kv_access import KVRegion
from onbeat.engine.kv_cache import KVCacheSpec
from onbeat.engine.layers.linear import select_linear_kernel
from onbeat.engine.model_config import ModelConfig
from onbeat.engine.models.model import Model, build_model
from onbeat.engine.torch_kv import allocate_kv, region_of
from onbeat.engine.torch_types import device_of, numpy_dtype, torch_device, torch_dtype
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
        on_progress: Callable[[str], None],  # noqa: ARG002
        spare_bytes: int = 0,  # noqa: ARG002
    ) -> TorchForward:
        torch.set_num_threads(self._device.num_threads)
        dtype, device = torch_dtype(self._device.dtype), torch_device(self._device.device)
        model = build_model(self._checkpoint, dtype=dtype, device=device)
        return TorchForward(model, num_blocks=limits.num_blocks, block_size=limits.block_size)


class TorchForward:
    """A model of torch operators: the reference, for any device and type.

    Parameters
    ----------
    model : built model.
    num_blocks : KV blocks, ids 0 to `num_blocks` - 1.
    block_size : tokens of a block, a multiple of 16.
    """

    def __init__(self, model: Model, *, num_blocks: int, block_size: int) -> None:
        self.model = model
        dtype = numpy_dtype(model.dtype)
        spec = KVCacheSpec.of_model(model.config, dtype=dtype, block_size=block_size)
        with torch.inference_mode():
            layers = allocate_kv(spec, num_blocks, model.device)
            self.attention = TorchAttention(model.config, layers)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def device(self) -> Device:
        return device_of(self.model.device)

    @property
    def settings(self) -> Mapping[str, str]:
        return {
            "backend": "torch",
            "linear_kernel": self.model.linear_kernel,
        }

    @torch.inference_mode()
    def run(
        self,
        inputs: StepInputs,
        *,
        wants_logits: bool,  # noqa: ARG002 -- always computed
    ) -> StepLogits:
        """Run one step; see `ForwardPass.run`."""
        context = ForwardContext(self.attention, self.attention.prepare(inputs.attention))
        hidden_TD = self.model.forward(
            torch.from_numpy(inputs.token_ids_T).to(self.model.device),
            torch.from_numpy(inputs.positions_T).to(self.model.device),
            context,
        )
        pooled_PD = self._pooled(hidden_TD, inputs.pooled_tokens)
        if not len(inputs.sampling_tokens):
            return StepLogits(None, hidden_PD=pooled_PD)
        sampling_tokens = torch.from_numpy(inputs.sampling_tokens).to(self.model.device)
        logits_RV = self.model.logits(hidden_TD.index_select(0, sampling_tokens))
        return StepLogits(logits_RV.cpu().numpy(), hidden_PD=pooled_PD)

    def _pooled(self, hidden_TD: Tensor, tokens: IntArray) -> NDArray[Any] | None:
        if not len(tokens):
            return None
        normed_PD = self.model.norm(hidden_TD.index_select(0, torch.from_numpy(tokens).to(self.model.device)))
        return (normed_PD if self.model.dtype == torch.float64 else normed_PD.float()).cpu().numpy()

    @torch.inference_mode()
    def scrub(self, block_ids: IntArray) -> None:
        """Make stored values of KV blocks finite."""
        self.attention.scrub(block_ids)

    def kv_regions(self) -> list[KVRegion]:
        """Return keys and values of each layer; see `GivesKV`."""
        return [region_of(part) for layer in self.attention.layers for part in layer]

    def touch_ahead(self) -> bool:
        """Return False: torch takes all memory at start."""
        return False

    def products(self) -> RowProducts:
        """Return products of the kernel that the model's layers have; see `ForwardPass.products`."""
        return _TorchProducts(self.model)

    def close(self) -> None:
        """Let go of nothing: torch keeps its threads, and memory goes with the object."""


class _TorchProducts:
    """A square matrix in the caches, times rows."""

    def __init__(self, model: Model) -> None:
        dtype, device = model.dtype, model.device
        weight_OI = torch.empty(_PRODUCT_WIDTH, _PRODUCT_WIDTH, dtype=dtype, device=device).normal_()
        self.flops_per_row = 2.0 * weight_OI.numel()
        self.num_bytes = weight_OI.nbytes
        self._linear = select_linear_kernel(dtype, device)(weight_OI)
        self._weight_OI = weight_OI
        self._device = device_of(device)

    @torch.inference_mode()
    def run(self, num_rows: int) -> float:
        x_TI = self._weight_OI.new_empty(num_rows, _PRODUCT_WIDTH).normal_()
        wait_for(self._device)
        start = perf_counter()
        self._linear(x_TI)
        wait_for(self._device)
        return perf_counter() - start

    def close(self) -> None:
        """Let go of nothing: memory goes with the object."""


_PRODUCT_WIDTH = 1024
