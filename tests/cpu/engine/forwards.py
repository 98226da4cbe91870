"""Forward passes for tests: the same weights on torch and on the native engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from onbeat.engine.cuda.forward import CudaForward, CudaOptions, kernel_sizes
from onbeat.engine.cuda.graphs import EagerGraphs
from onbeat.engine.engine_config import ActivationQuantization, Quantization
from onbeat.engine.forward import ForwardPass
from onbeat.engine.native.forward import NativeForward, NativeModel
from onbeat.engine.native.layouts import WeightLayouts
from onbeat.engine.native.library import CallStatus, NativeLibrary, PackedMatrix, address
from onbeat.engine.native.packing import NativeWeights, WeightPacker
from onbeat.engine.native.structures import NativeOptions
from onbeat.engine.torch.forward import TorchForward
from onbeat.engine.torch.kernels import GraphKernels, KernelSizes
from onbeat.engine.torch.types import numpy_dtype
from onbeat.engine.torch.weights import TorchWeights, load_weights
from onbeat.engine.weights.checkpoint import Checkpoint
from tests.cpu.engine.reference_kernels import ReferenceKernels

NUM_SLOTS = 64
"""Requests whose states are kept, where layers keep any."""
MOST_DRAFTS = 16
"""Of a request in a step, likewise."""


class MakeForward(Protocol):
    """Makes a forward pass with an empty KV cache."""

    def __call__(self, *, num_blocks: int, block_size: int) -> ForwardPass: ...


def rows_of(matrix: PackedMatrix) -> NDArray[np.float32]:
    """Return the numbers of a packed matrix, [outputs, inputs]."""
    rows = np.empty((matrix.num_outputs, matrix.num_inputs), np.float32)
    for output, row in enumerate(rows):
        assert (
            matrix._functions.ob_matrix_row(matrix.handle, output, address(row, np.float32)) == CallStatus.OK
        )
    return rows


def on_torch(weights: TorchWeights) -> MakeForward:
    return partial(TorchForward, weights, num_slots=NUM_SLOTS, most_drafts=MOST_DRAFTS)


def pack(
    library: NativeLibrary,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization = "none",
    num_threads: int = 1,
) -> NativeWeights:
    layouts = WeightLayouts(checkpoint, dtype=numpy_dtype(dtype), quantization=quantization)
    return WeightPacker(library, checkpoint, layouts, num_threads=num_threads).pack()


def on_native(
    library: NativeLibrary,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization = "none",
    activation_quantization: ActivationQuantization = "auto",
    num_threads: int = 1,
    instruction_set: str | None = None,
    batch_invariant: bool = False,
) -> Callable[..., NativeForward]:
    """Return what makes native forward passes that share packed weights."""
    weights = pack(library, checkpoint, dtype=dtype, quantization=quantization)

    def make(*, num_blocks: int, block_size: int, num_tables: int = 1) -> NativeForward:
        options = NativeOptions(
            dtype=numpy_dtype(dtype),
            num_blocks=num_blocks,
            block_size=block_size,
            num_tables=num_tables,
            num_slots=NUM_SLOTS,
            most_drafts=MOST_DRAFTS,
            num_threads=num_threads,
            activation_quantization=activation_quantization,
            instruction_set=instruction_set,
            batch_invariant=batch_invariant,
        )
        return NativeForward(NativeModel(library, checkpoint.config, weights, options))

    return make


def on_cuda_engine(checkpoint: Checkpoint, *, dtype: torch.dtype) -> MakeForward:
    """Return what makes forward passes of the GPU engine, on the CPU."""
    weights = load_weights(checkpoint, dtype, torch.device("cpu"))
    sizes = {"max_num_seqs": 32, "max_model_len": 512, "max_num_batched_tokens": 256}
    piece_sizes = () if checkpoint.config.experts else (8, 64)
    return on_kernels(weights, ReferenceKernels, **sizes, piece_sizes=piece_sizes)


def on_kernels(
    weights: TorchWeights, make_kernels: Callable[[KernelSizes], GraphKernels], **sizes: Any
) -> Callable[..., CudaForward]:
    """Return what makes forward passes of the GPU engine with certain kernels, without graphs.

    Parameters
    ----------
    sizes : fields of `CudaOptions` beside those of the KV cache.
    """

    def make(*, num_blocks: int, block_size: int) -> CudaForward:
        options = CudaOptions(num_blocks=num_blocks, block_size=block_size, **sizes)
        return CudaForward(weights, make_kernels(kernel_sizes(weights, options)), EagerGraphs(), options)

    return make
