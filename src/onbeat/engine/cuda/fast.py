"""The operators in Triton and FlashInfer, for bfloat16 on a GPU with sm_90."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from onbeat.engine.cuda import triton_draw, triton_ops
from onbeat.engine.cuda.flashinfer_attention import (
    ChunkBackend,
    Chunks,
    FlashInfer,
    XqaDecodes,
    allocate_workspace,
)
from onbeat.engine.cuda.kernels import (
    BestBuffers,
    ChunkRows,
    DecodeRows,
    DrawParams,
    KernelSizes,
    LayerSpec,
    Norm,
    StepTensors,
)
from onbeat.engine.kv_cache import LayerKVCache
from onbeat.engine.model_config import Activation


class FastKernels:
    """See `Kernels`; `backend.why_not` says which models they serve.

    Parameters
    ----------
    sizes : what they are made for.
    chunk_backend : FlashInfer's kernel for rows of several tokens.
    library : FlashInfer, if it is imported already.
    """

    def __init__(
        self, sizes: KernelSizes, *, chunk_backend: ChunkBackend = "fa2", library: FlashInfer | None = None
    ) -> None:
        library = library or FlashInfer.load()
        self.name = f"triton, flashinfer {library.version} (xqa, {chunk_backend})"
        workspace = allocate_workspace(sizes)
        self._decodes = XqaDecodes(library, sizes, workspace)
        self._chunks = Chunks(library, sizes, chunk_backend, workspace)

    def add_norm(self, x_TD: Tensor | None, residual_TD: Tensor, norm: Norm, out_TD: Tensor) -> None:
        """Add and normalise; see `Kernels.add_norm`."""
        triton_ops.add_norm(x_TD, residual_TD, norm, out_TD)

    def rope_store(
        self, qkv_TX: Tensor, step: StepTensors, layer: LayerSpec, kv: LayerKVCache, q_TNH: Tensor
    ) -> None:
        """Rotate and store; see `Kernels.rope_store`."""
        triton_ops.rope_store(qkv_TX, step, layer, kv, q_TNH)

    def act_mul(self, gate_up_TF2: Tensor, activation: Activation, out_TF: Tensor) -> None:
        """Activate the gate and multiply; see `Kernels.act_mul`."""
        triton_ops.act_mul(gate_up_TF2, activation, out_TF)

    def attend_decodes(
        self, q_RNH: Tensor, kv: LayerKVCache, rows: DecodeRows, layer: LayerSpec, out_RNH: Tensor
    ) -> None:
        """Attend with one query a row; see `Kernels.attend_decodes`."""
        self._decodes.attend(q_RNH, kv, rows, layer, out_RNH)

    def plan_chunks(self, rows: ChunkRows, layer: LayerSpec) -> Any:
        """Plan on the host; see `Kernels.plan_chunks`."""
        return self._chunks.plan(rows, layer)

    def attend_chunks(
        self,
        q_TNH: Tensor,
        kv: LayerKVCache,
        plan: Any,
        layer: LayerSpec,  # noqa: ARG002 -- the plan knows it
        out_TNH: Tensor,
    ) -> None:
        """Attend with all new tokens; see `Kernels.attend_chunks`."""
        self._chunks.attend(q_TNH, kv, plan, out_TNH)

    def best(self, logits_RV: Tensor, out: BestBuffers) -> None:
        """Find the most likely tokens; see `Kernels.best`."""
        triton_draw.best(logits_RV, out)

    def draw(self, logits_RV: Tensor, params: DrawParams, best: BestBuffers, ids_R: Tensor) -> None:
        """Choose tokens; see `Kernels.draw`."""
        triton_draw.draw(logits_RV, params, best, ids_R)
