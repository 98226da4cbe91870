"""The operators in Triton and FlashInfer, for bfloat16 on a GPU with sm_90."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from onbeat.engine.cuda import triton_draw, triton_ops
from onbeat.engine.cuda.flashinfer_attention import (
    Chunks,
    FlashInfer,
    PlanBuffers,
    PlannedDecodes,
    allocate_workspace,
)
from onbeat.engine.cuda.graphs import GraphKey
from onbeat.engine.cuda.stream import stream_of
from onbeat.engine.torch.kernels import (
    ChunkBackend,
    ChunkRows,
    DecodeRows,
    Int32Array,
    KernelSizes,
    LayerSpec,
)
from onbeat.engine.torch.kv import LayerKVCache


class _PlannedBySize:
    """Plans for each number of rows that steps of decodes have, and for each window."""

    def __init__(self, library: FlashInfer, sizes: KernelSizes, workspace: Tensor) -> None:
        self._library = library
        self._sizes = sizes
        self._workspace = workspace
        self._buffers: dict[int | None, PlanBuffers] = {}
        self._plans: dict[GraphKey, dict[int | None, PlannedDecodes]] = {}

    def plan(self, lens_R: Int32Array, layers: Sequence[LayerSpec], width: int) -> None:
        key = GraphKey(len(lens_R), width=width)
        by_window = self._plans.setdefault(key, {})
        for layer in layers:
            if layer.window not in by_window:
                by_window[layer.window] = self._make(layer, key)
            by_window[layer.window].plan(lens_R)

    def list_rows(self, rows: DecodeRows) -> None:
        for planned in self._of(rows).values():
            planned.list_rows(rows)

    def attend(
        self, q_RNH: Tensor, kv: LayerKVCache, rows: DecodeRows, layer: LayerSpec, out_RNH: Tensor
    ) -> None:
        self._of(rows)[layer.window].attend(q_RNH, kv, out_RNH)

    def _of(self, rows: DecodeRows) -> dict[int | None, PlannedDecodes]:
        return self._plans[GraphKey(len(rows.lens_R), width=rows.width)]

    def _make(self, layer: LayerSpec, key: GraphKey) -> PlannedDecodes:
        device = self._sizes.device
        if layer.window not in self._buffers:
            self._buffers[layer.window] = PlanBuffers(stream_of(device), device)
        return PlannedDecodes(
            self._library,
            self._sizes,
            layer,
            key,
            workspace=self._workspace,
            buffers=self._buffers[layer.window],
        )


class FastKernels:
    """See `Kernels`; `backend.why_not` says which models they serve.

    Parameters
    ----------
    sizes : what they are made for.
    chunk_backend : FlashInfer's kernel for rows of several tokens; see `Chunks`.
    library : FlashInfer, if it is imported already.
    """

    add_norm = staticmethod(triton_ops.add_norm)
    rope_store = staticmethod(triton_ops.rope_store)
    act_mul = staticmethod(triton_ops.act_mul)
    in_fp8 = staticmethod(triton_ops.in_fp8)
    best = staticmethod(triton_draw.best)
    draw = staticmethod(triton_draw.draw)

    def __init__(
        self,
        sizes: KernelSizes,
        *,
        chunk_backend: ChunkBackend = "fa2",
        library: FlashInfer | None = None,
    ) -> None:
        library = library or FlashInfer.load()
        self.name = f"triton, flashinfer {library.version} ({chunk_backend})"
        workspace = allocate_workspace(sizes)
        self._decodes = _PlannedBySize(library, sizes, workspace)
        self._chunks = Chunks(library, sizes, chunk_backend, workspace)

    def plan_decodes(self, lens_R: Int32Array, layers: Sequence[LayerSpec], width: int = 1) -> None:
        """Plan on the host; see `Kernels.plan_decodes`."""
        self._decodes.plan(lens_R, layers, width)

    def start_decodes(self, rows: DecodeRows) -> None:
        """Show plans their rows; see `Kernels.start_decodes`."""
        self._decodes.list_rows(rows)

    def attend_decodes(
        self, q_RNH: Tensor, kv: LayerKVCache, rows: DecodeRows, layer: LayerSpec, out_RNH: Tensor
    ) -> None:
        """Attend with the new tokens of each row; see `Kernels.attend_decodes`."""
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
