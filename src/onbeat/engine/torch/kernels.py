"""The operators of a layer as the engine on torch calls them, and their arguments.

All tensors are on the device of `KernelSizes` and, unless it is said otherwise, contiguous. "The model's
type" is `KernelSizes.dtype`. Methods queue work on the current stream and return. All of `GraphKernels` but
`plan_chunks` and `attend_chunks` are called while a graph is captured: they may not wait for the device, and
neither shapes nor launches may depend on the contents of a tensor. Rows that only fill a graph (padding) have
length 1, the last KV block and any numbers: they must not disturb others.

Legend: T tokens of a step, R rows, D model width, N query heads, K KV heads, H head width, F feed-forward
width, V vocabulary, W columns of a block table, X = (N + 2 K) H.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onbeat.engine.input_batch import AttentionBatch, IntArray
from onbeat.engine.model_config.architecture import Activation, ModelConfig
from onbeat.engine.torch.kv import LayerKVCache
from onbeat.engine.torch.types import Fp8Matrix, Matrix

Int32Array = NDArray[np.int32]
ChunkBackend = Literal["fa2", "fa3"]
"""FlashInfer's kernels for rows of several tokens; fa3 is for long ones."""

Multiply = Callable[[Tensor, Matrix, Tensor | None], Tensor]
"""A product as `torch.nn.functional.linear` takes it: `x [T, D] @ matrix [F, D].T + bias [F]`, [T, F]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSizes:
    """What operators are made for: `FastKernels(sizes)`."""

    config: ModelConfig
    dtype: torch.dtype
    """Of weights and activations."""
    kv_dtype: torch.dtype
    """Of keys and values: the same, or e4m3 with a scale of 1."""
    device: torch.device
    block_size: int
    max_rows: int
    """Most rows of a step."""
    max_tokens: int
    """Most tokens of a step."""
    max_row_blocks: int
    """Most KV blocks of a row: the columns W of `DecodeRows.table_RW`."""
    verify_rows: tuple[tuple[int, int], ...] = ()
    """Most rows of a step for each `DecodeRows.width` above 1, and that width."""


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalise by the root mean square in float32, and scale; `centers`: take the mean off before.

    With `scales_rounded` (Llama): x is normalised, rounded to the model's type, then multiplied by the scale
    in that type. Else (Gemma): normalised and multiplied in float32, then rounded once.
    """

    scale_D: Tensor
    """[D] or [H]; in the model's type, or float32 where an offset has been added."""
    eps: float
    """Added to the mean square."""
    scales_rounded: bool
    centers: bool = False
    bias_D: Tensor | None = None
    """Is added; all of it is then computed in the model's type or a wider one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What attention must know of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on the scores q.k."""
    window: int | None
    """A token sees itself and the `window` - 1 tokens before it; None: all."""
    frequencies_H: Tensor
    """Angle per position of each pair of dimensions (i, i + H/2), float32 [H/2]."""
    factors_H: Tensor
    """Factor on cosine and sine of each pair, float32 [H/2]: 1 but for LongRoPE."""
    sinks_N: Tensor | None
    """[N], the model's type: of each head, a score that takes its share of attention, and adds nothing."""
    query_norm: Norm | None
    key_norm: Norm | None
    """Of each head, before the rotation."""
    table: int = 0  # which block table is its own, where a request has several
    softcap: float | None = None
    query_growth: tuple[float, int] | None = None
    """See `ModelConfig.attention_softcap` and `ModelConfig.query_growth`."""
    value_norm: Norm | None = None
    """Of each head."""
    shares_kv: bool = False
    """Whether keys and values are another layer's: none are projected."""


class StepTensors(NamedTuple):
    """Where the tokens of a step are."""

    positions_T: Tensor
    """int32 [T]."""
    kv_slots_T: Tensor
    """int32 [T]: block id * block size + offset. Padding tokens share slots of the last block."""


class DecodeRows(NamedTuple):
    """Rows of one new token each, or of some drafts more, as many in each."""

    table_RW: Tensor
    """int32 [R, W]: block ids; those beyond the row's length are any valid ids."""
    lens_R: Tensor
    """int32 [R], >= width: tokens that the row's last one sees, the new ones (stored already) included."""
    width: int = 1
    """New tokens of each row."""


class ChunkRows(NamedTuple):
    """Rows of any number of new tokens, in host memory, packed row after row."""

    query_lens_R: Int32Array
    """New tokens, >= 1."""
    context_lens_R: Int32Array
    """Tokens that the row's last new token sees, itself included."""
    num_blocks_R: Int32Array
    """KV blocks of each row: just those that hold its context."""
    block_ids: Int32Array
    """[sum of num_blocks_R]: row after row."""

    @classmethod
    def of(
        cls, batch: AttentionBatch, block_size: int, rows: IntArray | slice = slice(None), table: int = 0
    ) -> ChunkRows:
        """Return some rows of a step, with one of their block tables."""
        num_tables = batch.slot_mapping_T.size // batch.slot_mapping_T.shape[-1]
        first_line = table * len(batch.block_tables_SB) // num_tables
        context_lens_R = batch.context_lens_R[rows].astype(np.int32)
        num_blocks_R = -(-context_lens_R // block_size)
        blocks = [
            batch.block_tables_SB[first_line + slot, :num_blocks]
            for slot, num_blocks in zip(batch.slots_R[rows].tolist(), num_blocks_R.tolist(), strict=True)
        ]
        query_lens_R = batch.query_lens_R[rows].astype(np.int32)
        return cls(query_lens_R, context_lens_R, num_blocks_R, np.concatenate(blocks))


class BestBuffers(NamedTuple):
    """Each row's most likely token."""

    ids_R: Tensor
    """int32 [R]: the lowest id of equals; that of a NaN where there is one."""
    peaks_R: Tensor
    """float32 [R]: its logit, NaN where any logit of the row is NaN."""


class DrawParams(NamedTuple):
    """How each row's token is drawn; see `onbeat.engine.draw`."""

    temperatures_R: Tensor
    """float64 [R]; 0 where the row takes its most likely token."""
    top_ks_R: Tensor
    """int32 [R]; 0: no bound."""
    top_ps_R: Tensor
    """float64 [R]; 1: no bound."""
    min_ps_R: Tensor
    """float64 [R]; 0: no bound."""
    numbers_R: Tensor
    """float64 [R]: uniform in [0, 1)."""


class Kernels(Protocol):
    """What every step needs; see the top of the module for what holds of all."""

    @property
    def name(self) -> str:
        """For readers of measurements: `triton, flashinfer 0.6.14 (fa2)`."""

    def add_norm(self, x_TD: Tensor | None, residual_TD: Tensor, norm: Norm, out_TD: Tensor) -> None:
        """Add `x_TD` to `residual_TD` in place, and write the norm of the sum.

        Parameters
        ----------
        x_TD, residual_TD, out_TD : [T, D], the model's type. Without `x_TD` the residual stays as it is.
            `out_TD` may be `x_TD`; it may be `residual_TD` only where there is no `x_TD`. The sum is rounded
            to the model's type before it is normalised.
        """

    def rope_store(
        self, qkv_TX: Tensor, step: StepTensors, layer: LayerSpec, kv: LayerKVCache, q_TNH: Tensor
    ) -> None:
        """Normalise (where the layer does) and rotate queries and keys; store keys and values.

        Parameters
        ----------
        qkv_TX : [T, X], the model's type: N query heads, K key heads, K value heads of each token.
        kv : [blocks, K, block size, H] each, of `KernelSizes.kv_dtype`.
        q_TNH : [T, N, H], the model's type: where the queries are written.

        Notes
        -----
        Angles are position * frequency in float32, and so are cosine and sine, each times its factor; the
        product is taken in float32 (float64 in a float64 model) and rounded once. Pairs are (i, i + H/2):
        out[i] = x[i] cos - x[i + H/2] sin, out[i + H/2] = x[i + H/2] cos + x[i] sin.
        """

    def act_mul(self, gate_up_TF2: Tensor, activation: Activation, out_TF: Tensor) -> None:
        """Write `activation(gate) * up`, or `activation(up)` where there is nothing else.

        Parameters
        ----------
        gate_up_TF2 : [T, 2 F], the model's type: all of the gate, then all of up; or [T, F].
        out_TF : [T, F], the model's type.
        """

    def in_fp8(self, x_TD: Tensor) -> Fp8Matrix:
        """Return tokens as `Fp8Matrix.of` does: they meet such matrices."""

    def plan_chunks(self, rows: ChunkRows, layer: LayerSpec) -> Any:
        """Do a step's host work for `attend_chunks`, for all layers that have this layer's window.

        Called before the step's layers, once for each window; where a step's rows of one token attend apart
        from its chunks, once for either. The step before may still run on the device. Heads, scale and window
        are equal in the layers that the plan is used for.

        Returns
        -------
        What `attend_chunks` of the same kernels needs; valid for this step.
        """

    def attend_chunks(
        self, q_TNH: Tensor, kv: LayerKVCache, plan: Any, layer: LayerSpec, out_TNH: Tensor
    ) -> None:
        """Attend causally with all new tokens of the planned rows.

        Parameters
        ----------
        q_TNH, out_TNH : [T, N, H], the model's type: tokens of the planned rows alone.
        """

    def best(self, logits_RV: Tensor, out: BestBuffers) -> None:
        """Find each row's most likely token.

        Parameters
        ----------
        logits_RV : [R, V], float32 (float64 in a float64 model).
        """


class GraphKernels(Kernels, Protocol):
    """With what steps need that are queued ahead, and replayed from graphs."""

    def plan_decodes(self, lens_R: Int32Array, layers: Sequence[LayerSpec], width: int = 1) -> None:
        """Do a step's host work for `attend_decodes`, before its operators are queued; not part of a graph.

        The step before may still run on the device.

        Parameters
        ----------
        lens_R, width : what those of `DecodeRows` will be.
        layers : one of each window.
        """

    def start_decodes(self, rows: DecodeRows) -> None:
        """Do what all layers need, once a step, before the first `attend_decodes`; part of a graph."""

    def attend_decodes(
        self, q_RNH: Tensor, kv: LayerKVCache, rows: DecodeRows, layer: LayerSpec, out_RNH: Tensor
    ) -> None:
        """Attend with the new tokens of each row, causally.

        Parameters
        ----------
        q_RNH, out_RNH : [R * width, N, H], the model's type: row after row.
        """

    def draw(self, logits_RV: Tensor, params: DrawParams, best: BestBuffers, ids_R: Tensor) -> None:
        """Choose each row's token: by its number where its temperature is not 0, else the most likely one.

        Parameters
        ----------
        logits_RV : [R, V], float32 (float64 in a float64 model); not changed.
        best : what `best` found in them. A row whose peak is not finite gets any id in [0, V).
        ids_R : int32 [R], written.

        Notes
        -----
        The same number of the same logits and parameters gives the same token, whatever other rows there are.
        Candidates are ordered by falling logit (-0.0 equals 0.0), equal ones by rising id; min-p, then top-k,
        then top-p (of what the first two keep, or of the whole row) each keep a prefix of it, and the number
        inverts the cumulative weights exp((logit - peak) / temperature). A row that none of the three cuts is
        drawn in the order of ids instead.
        """
