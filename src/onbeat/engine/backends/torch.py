"""The engines on torch as backends: the reference, and when the GPU engine serves a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import torch

from onbeat.engine.backends.base import CheckpointBackend, Room
from onbeat.engine.cuda.forward import CudaForward, CudaOptions, kernel_sizes
from onbeat.engine.cuda.graphs import CudaGraphs, EagerGraphs, Graphs, graph_sizes, piece_sizes
from onbeat.engine.cuda.memory import MeasuredMemory, bytes_above, largest_steps, measure
from onbeat.engine.device import DeviceConfig, compute_capability
from onbeat.engine.dtypes import BFLOAT16
from onbeat.engine.engine_config import EngineConfig
from onbeat.engine.forward import ForwardPass
from onbeat.engine.kv_cache import KVCacheSpec
from onbeat.engine.memory import Footprint
from onbeat.engine.model_config import ModelConfig
from onbeat.engine.progress import Detail, OnProgress
from onbeat.engine.torch.forward import TorchForward
from onbeat.engine.torch.kernels import ChunkBackend, GraphKernels, KernelSizes
from onbeat.engine.torch.types import torch_device, torch_dtype
from onbeat.engine.torch.weights import TorchWeights, load_weights
from onbeat.engine.weights import Checkpoint, parameter_shapes
from onbeat.scheduler.scheduler_config import SchedulerConfig

HEAD_DIMS = (64, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)
OLDEST_CAPABILITY = (8, 0)
"""Computes in bfloat16, and FlashInfer's fa2 runs there. Only 9.0 has been tried."""

MakeKernels = Callable[[KernelSizes], GraphKernels]


def why_not(checkpoint: Checkpoint, device: DeviceConfig, block_size: int) -> str | None:
    """Return why the GPU engine cannot serve a model on a device; None where it can."""
    head_dim = checkpoint.config.head_dim
    if device.dtype != BFLOAT16:
        return f"it computes in bfloat16, not in {device.dtype.name}"
    if head_dim not in HEAD_DIMS:
        return f"heads of {head_dim} are not supported; 64, 128 and 256 are"
    if block_size not in BLOCK_SIZES:
        return f"block_size is {block_size}; it needs 16, 32, 64 or 128"
    capability = compute_capability(device.device)
    if capability < OLDEST_CAPABILITY:
        return f"it needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    if find_spec("flashinfer") is None:
        return "FlashInfer is not installed: pip install 'onbeat[gpu]'"
    kernel = missing_kernel(checkpoint.config)
    if kernel is not None:
        return f"the kernel {kernel} is neither ready-made nor can it be built here: nvcc is not found"
    return None


def missing_kernel(config: ModelConfig) -> str | None:
    """Return a kernel of FlashInfer that cannot be had here; the library is imported only now."""
    from onbeat.engine.cuda.flashinfer_attention import missing_kernel

    return missing_kernel(config)


def fast_kernels(sizes: KernelSizes, chunk_backend: ChunkBackend = "fa2") -> GraphKernels:
    """Return the quick operators; what they are written in is imported only now.

    Prompts by fa3 took 5 to 11 % less time on an H100. Its output has not been compared there yet, so it is
    only taken where it is asked for.
    """
    from onbeat.engine.cuda.fast import FastKernels

    return FastKernels(sizes, chunk_backend=chunk_backend)


class TorchBackend(CheckpointBackend):
    """The model in torch operators: any device and type.

    Parameters
    ----------
    name, checkpoint, device : what runs where.
    reason : why torch.
    """

    def __init__(self, name: str, checkpoint: Checkpoint, device: DeviceConfig, reason: str) -> None:
        self.name, self.model = name, checkpoint.config
        self.checkpoint, self.device = checkpoint, device
        self.description = f"by torch ({reason})"

    def needs(self, block_size: int) -> Footprint:
        """Return the memory of weights and KV in the device's type."""
        dtype = self.device.dtype
        kv_cache = KVCacheSpec.of_model(self.model, dtype=dtype, block_size=block_size)
        numbers = sum(map(math.prod, parameter_shapes(self.model).values()))
        return Footprint.of(self.model, kv_cache, numbers * dtype.itemsize)

    def build(
        self,
        limits: SchedulerConfig,
        say: OnProgress,  # noqa: ARG002
        room: Room | None = None,  # noqa: ARG002
    ) -> tuple[ForwardPass, SchedulerConfig]:
        """Load the weights and make the KV cache."""
        torch.set_num_threads(self.device.num_threads)
        dtype, device = torch_dtype(self.device.dtype), torch_device(self.device.device)
        weights = load_weights(self.checkpoint, dtype, device)
        forward = TorchForward(weights, num_blocks=limits.num_blocks, block_size=limits.block_size)
        return forward, limits


class CudaBackend(TorchBackend):
    """The GPU engine; see `Backend`.

    Parameters
    ----------
    checkpoint, device : what runs where; `why_not` has found nothing.
    config : how it shall run.
    make_kernels : makes the operators.
    """

    has_graphs = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: DeviceConfig,
        config: EngineConfig,
        make_kernels: MakeKernels,
    ) -> None:
        super().__init__(config.model.name, checkpoint, device, "")
        self._torch_device = torch_device(device.device)
        self._config = config
        self._make_kernels = make_kernels
        self._weights: TorchWeights | None = None
        self._utilization = config.gpu_memory_utilization
        # The host waits for a router's choice, which no graph can do.
        self._is_eager = config.enforce_eager or checkpoint.config.experts is not None
        self._has_pieces = config.cuda_graph_pieces and not self._is_eager
        graphs = "without graphs" if self._is_eager else "decodes by CUDA graphs"
        pieces = ", steps with prompts in pieces" if self._has_pieces else ""
        self.description = f"by the GPU engine ({graphs}{pieces})"

    def fit_measured(self, limits: SchedulerConfig, room: Room, say: OnProgress) -> SchedulerConfig:
        """Load the weights, measure what the largest steps take, and give the rest to the KV cache.

        Parameters
        ----------
        limits : an estimate.
        """
        block_bytes, draft_bytes = self.needs(limits.block_size).block_bytes, 0
        if room.draft is not None:
            draft = room.draft.needs(limits.block_size)
            block_bytes, draft_bytes = block_bytes + draft.block_bytes, draft.weight_bytes
            if isinstance(room.draft, CudaBackend):
                # It verifies nothing.
                draft_bytes = room.draft._measured(replace(limits, speculation=None)).still_bytes
        measured = self._measured(limits)
        say(Detail(measured))
        return room.settle(
            measured.num_blocks(
                self._utilization,
                block_bytes=block_bytes,
                other_bytes=draft_bytes,
                wanted=None if self._config.kv_cache_memory_bytes is None else limits.num_blocks,
            )
        )

    def _measured(self, limits: SchedulerConfig) -> MeasuredMemory:
        """Load the weights, and find out what the largest steps take."""
        self._prepare()
        # The pieces of a size count as one graph: together they are a step.
        captured = (*graph_sizes(limits.max_num_seqs), *self._piece_sizes(limits))
        return measure(
            self._torch_device,
            lambda num_blocks: self._make(limits, num_blocks, EagerGraphs()),
            largest_steps(limits),
            block_bytes=self.needs(limits.block_size).block_bytes,
            num_graphs=0 if self._is_eager else len(captured),
        )

    def _piece_sizes(self, limits: SchedulerConfig) -> tuple[int, ...]:
        return piece_sizes(limits.max_num_batched_tokens) if self._has_pieces else ()

    def default_kv_bytes(self, spare_bytes: int, step_bytes: int) -> int:
        """Return an estimate, until it is measured."""
        return int((spare_bytes - step_bytes) * self._utilization)

    def build(
        self, limits: SchedulerConfig, say: OnProgress, room: Room | None = None
    ) -> tuple[ForwardPass, SchedulerConfig]:
        """Load the weights, measure memory, and capture the graphs."""
        if room is not None:
            limits = self.fit_measured(limits, room, say)
        self._prepare()
        graphs = EagerGraphs() if self._is_eager else CudaGraphs(self._torch_device)
        return self._make(limits, limits.num_blocks, graphs), limits

    def tell_excess(self, say: OnProgress) -> None:
        """Say it; see `Backend.tell_excess`."""
        if (excess := bytes_above(self._torch_device, self._utilization)) > 0:
            say(
                f"the GPU engine took {excess / 2**20:.0f} MiB more than its share of the memory: its graphs "
                "are larger than was planned for"
            )

    def _prepare(self) -> None:
        """Load the weights, once."""
        if self._weights is not None:
            return
        # Threads of torch would wait for their next work at full speed, on cores that other processes need.
        torch.set_num_threads(1)
        self._weights = load_weights(self.checkpoint, torch_dtype(self.device.dtype), self._torch_device)

    def _make(self, limits: SchedulerConfig, num_blocks: int, graphs: Graphs) -> CudaForward:
        options = CudaOptions(
            num_blocks=num_blocks,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            piece_sizes=self._piece_sizes(limits),
        )
        weights = self._weights
        assert weights is not None, "nothing is loaded"
        kernels = self._make_kernels(kernel_sizes(weights, options))
        return CudaForward(weights, kernels, graphs, options)
