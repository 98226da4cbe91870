"""Which forward pass serves: decided at start, by what was asked for, the machine and the build."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from onbeat.core.errors import ConfigError
from onbeat.engine.config import EngineConfig
from onbeat.engine.device import DeviceConfig
from onbeat.engine.forward import ForwardPass, TorchForward
from onbeat.engine.kv_cache import KVCacheSpec
from onbeat.engine.models.registry import build_model
from onbeat.engine.native.forward import NativeForward, NativeOptions
from onbeat.engine.native.layouts import PLAIN_LAYOUTS, WeightLayouts
from onbeat.engine.native.library import NativeLibrary, NotLoaded, load_library
from onbeat.engine.native.packing import LAYER_NORMS, WeightPacker
from onbeat.engine.parallel.backend import ParallelBackend
from onbeat.engine.weights import Checkpoint, parameter_shapes

NATIVE_HEAD_MULTIPLE = 16
"""The native KV cache pads heads to a multiple of this width."""


class Backend(Protocol):
    """How one checkpoint becomes a forward pass on one device."""

    @property
    def description(self) -> str:
        """What runs, and why it and not another, for people."""
        ...

    @property
    def weights_format(self) -> str | None:
        """Number format of most weights; None where they are of the model's type."""
        ...

    @property
    def embedding_format(self) -> str | None:
        """Number format of the LM head, likewise."""
        ...

    @property
    def torch_threads(self) -> int:
        """Threads that torch gets while steps run."""
        ...

    def weight_bytes(self) -> int:
        """Return about how much memory the weights will take."""
        ...

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec: ...

    def build(self, *, num_blocks: int, block_size: int) -> ForwardPass:
        """Load the weights and make the KV cache.

        Raises
        ------
        ConfigError : a weight cannot be read, or memory is short.
        """
        ...


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
        self.torch_threads = device.num_threads

    def weight_bytes(self) -> int:
        shapes = parameter_shapes(self._checkpoint.config)
        return sum(map(math.prod, shapes.values())) * self._device.dtype.itemsize

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        return KVCacheSpec.of_model(self._checkpoint.config, dtype=self._device.dtype, block_size=block_size)

    def build(self, *, num_blocks: int, block_size: int) -> ForwardPass:
        model = build_model(self._checkpoint, dtype=self._device.dtype, device=self._device.device)
        return TorchForward(model, num_blocks=num_blocks, block_size=block_size)


class NativeBackend:
    """The native CPU engine.

    Parameters
    ----------
    library : what runs.
    checkpoint, device : the weights, and type and threads.
    layouts : how each matrix keeps its numbers.
    """

    # Threads of torch wait for their next work at full speed, on the cores that the engine computes with.
    # What is left to torch, the draws of random rows, is done by the thread that calls.
    torch_threads = 1

    def __init__(
        self, library: NativeLibrary, checkpoint: Checkpoint, device: DeviceConfig, layouts: WeightLayouts
    ) -> None:
        self._library = library
        self._checkpoint = checkpoint
        self._device = device
        self._layouts = layouts
        self.weights_format: str | None = layouts.number_format()
        self.embedding_format: str | None = layouts.embedding_format()
        self.description = (
            f"by the native engine ({library.instruction_sets[0]}, {self.weights_format} weights)"
        )

    def weight_bytes(self) -> int:
        return self._layouts.num_bytes()

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        return KVCacheSpec.of_model(
            self._checkpoint.config,
            dtype=self._device.dtype,
            block_size=block_size,
            head_dim_multiple=NATIVE_HEAD_MULTIPLE,
        )

    def build(self, *, num_blocks: int, block_size: int) -> ForwardPass:
        # Already now: its threads would wait for one another in each of thousands of small conversions.
        torch.set_num_threads(self.torch_threads)
        num_threads = self._device.num_threads
        packer = WeightPacker(self._library, self._checkpoint, self._layouts, num_threads=num_threads)
        options = NativeOptions(
            dtype=self._device.dtype, num_blocks=num_blocks, block_size=block_size, num_threads=num_threads
        )
        return NativeForward(self._library, self._checkpoint.config, packer.pack(), options)


def choose_backend(config: EngineConfig, checkpoint: Checkpoint, device: DeviceConfig) -> Backend:
    """Take the native engine where it can run and nothing else is asked for.

    Raises
    ------
    ConfigError : what was asked for cannot run here.
    """
    if config.tensor_parallel_size > 1:
        return ParallelBackend(config, checkpoint, device)
    if config.backend == "torch":
        found: NativeLibrary | NotLoaded = NotLoaded("as asked for")
    else:
        found = _usable_library(checkpoint, device)
    if isinstance(found, NativeLibrary):
        layouts = WeightLayouts(checkpoint, dtype=device.dtype, quantization=config.quantization)
        return NativeBackend(found, checkpoint, device, layouts)
    if config.backend == "native":
        raise ConfigError(f"the native engine cannot run: {found.reason}; leave --backend out to use torch")
    if config.quantization == "int8":
        raise ConfigError(
            f"quantization int8 needs the native engine, but the model would run by torch ({found.reason}); "
            "leave --quantization out"
        )
    reason = found.reason if config.backend == "torch" else f"not by the native engine: {found.reason}"
    return TorchBackend(checkpoint, device, reason)


def _usable_library(checkpoint: Checkpoint, device: DeviceConfig) -> NativeLibrary | NotLoaded:
    if device.device.type != "cpu":
        return NotLoaded(f"it runs on the CPU, not on {device.device}")
    if device.dtype not in PLAIN_LAYOUTS:
        return NotLoaded(f"it does not compute in {device.dtype_name}")
    if checkpoint.config.family not in LAYER_NORMS:
        return NotLoaded(f"it does not run models of the family {checkpoint.config.family}")
    return load_library()
