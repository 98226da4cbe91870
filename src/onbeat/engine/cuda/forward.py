"""The forward pass on a GPU: decode steps by captured graphs, all others operator by operator."""

from __future__ import annotations

from dataclasses import dataclass

from onbeat.engine.cuda.kernels import Kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaOptions:
    """How a `CudaForward(weights, kernels, graphs, options)` runs a model.

    `weights` is what `weights.load_weights(checkpoint, dtype, device)` returns, `kernels` a
    `ReferenceKernels(sizes)` or `FastKernels(sizes)`, `graphs` a `CudaGraphs(device)` or `EagerGraphs()`.
    """

    num_blocks: int
    """KV blocks, ids 0 to `num_blocks` - 1; there is one more, for padding."""
    block_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int


__all__ = ["CudaOptions", "Kernels"]
