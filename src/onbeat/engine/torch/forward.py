"""The forward pass on torch, operator by operator: the reference, for any device and float type.

Legend: T tokens of the step, N tokens that are sampled or scored, P tokens whose hidden states are wanted. In
the operators: R rows, D model width, N query heads, K KV heads, G query heads per KV head, H head width, F
feed-forward width, V vocabulary, B blocks of a row, C keys of a row, X = (N + 2 K) H.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from onbeat.engine.forward import ForwardPass, StepLogits
from onbeat.engine.input_batch import AttentionBatch, IntArray, StepInputs
from onbeat.engine.kv_access import KVRegion
from onbeat.engine.memory import KVCacheSpec
from onbeat.engine.model_config.architecture import Activation
from onbeat.engine.profiling.products import RowProducts
from onbeat.engine.sampled import BestTokens
from onbeat.engine.torch import layer as torch_layer
from onbeat.engine.torch.kernels import BestBuffers, ChunkRows, Int32Array, LayerSpec, Norm, StepTensors
from onbeat.engine.torch.kv import LayerKVCache, allocate_kv, allocate_pool, layer_of_pool, region_of, scrub
from onbeat.engine.torch.linear_attention import LayerState, StateRows, allocate_state
from onbeat.engine.torch.types import Fp8Matrix, device_of, numpy_dtype, stored
from onbeat.engine.torch.weights import TorchWeights, layer_products


class TorchForward(ForwardPass):
    """Runs steps by plain torch, with a KV cache of its own; the host chooses the tokens.

    Parameters
    ----------
    weights : the model.
    num_blocks : KV blocks, ids 0 to `num_blocks` - 1.
    block_size : tokens of a block, a multiple of 16.
    num_slots : requests whose states are kept, where layers keep any.
    most_drafts : of a request in a step, where layers keep states.
    num_tables : block tables of a request: more than one where groups of layers have blocks of their own.
    """

    def __init__(
        self,
        weights: TorchWeights,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int = 0,
        most_drafts: int = 0,
        num_tables: int = 1,
    ) -> None:
        self.weights, self.config, self.device = weights, weights.config, device_of(weights.device)
        self.settings = {"backend": "torch"}
        self._block_size = block_size
        self._kernels = TorchKernels(weights.dtype, weights.device, block_size)
        self._most_table = num_tables - 1
        self._kinds = {self._kind(layer.spec): layer.spec for layer in reversed(weights.layers)}
        dtype = numpy_dtype(weights.dtype)
        spec = KVCacheSpec.of_model(weights.config, dtype=dtype, block_size=block_size)
        self._parts_of_block = np.ones(num_tables, np.int64)
        with torch.inference_mode():
            if num_tables > 1:
                self.kv = self._in_a_pool(spec, num_blocks, num_tables)
            else:
                self.kv = allocate_kv(spec, num_blocks, weights.device)
                self._memory: Sequence[Sequence[Tensor]] = self.kv
            self._kept: list[LayerKVCache | LayerState] = [
                allocate_state(self.config, num_slots, most_drafts, weights.wide_dtype, weights.device)
                if self.config.is_linear(index)
                else self.kv[index if num_tables > 1 else self.config.place(index)[1]]
                for index in range(self.config.num_layers)
            ]

    def _in_a_pool(self, spec: KVCacheSpec, num_blocks: int, num_tables: int) -> list[LayerKVCache]:
        """Return keys and values of each layer in blocks that those of other block tables have in turns."""
        config = self.config
        fullest = replace(spec, heads=tuple(spec.heads[each] for each in config.layers_of_block(num_tables)))
        pool = allocate_pool(fullest, num_blocks, self.weights.device, spec.heads)
        self._memory, layers = [[pool]], list[LayerKVCache]()
        for index in range(config.num_layers):
            (table, number), heads = config.place(index, num_tables), config.kv_heads(index)
            layers.append(layer_of_pool(pool, heads, number, spec.block_size))
            self._parts_of_block[table] = pool.shape[1] // (math.prod(heads) * spec.block_size)
        return layers

    @torch.inference_mode()
    def run(self, inputs: StepInputs, *, wants_logits: bool) -> StepLogits:
        """Run one step; see `ForwardPass.run`."""
        batch, num_samples = inputs.attention, len(inputs.sampling_tokens)
        plans = {
            kind: self._kernels.plan_chunks(self._chunks(batch, kind[1]), spec)
            for kind, spec in self._kinds.items()
        }
        slots_T = batch.slot_mapping_T
        if self._most_table:
            blocks_T, offsets_T = np.divmod(slots_T, self._block_size)
            slots_T = blocks_T * self._parts_of_block[:, None] * self._block_size + offsets_T

        def attend(q_TNH: Tensor, kv: LayerKVCache, layer: LayerSpec, out_TNH: Tensor) -> None:
            self._kernels.attend_chunks(q_TNH, kv, plans[self._kind(layer)], layer, out_TNH)

        ids_T, positions_T, kv_slots_T, sampled_N, pooled_P = (
            torch.from_numpy(part).to(self.weights.device)
            for part in (
                inputs.token_ids_T,
                inputs.positions_T,
                slots_T,
                inputs.sampling_tokens,
                inputs.pooled_tokens,
            )
        )
        tensors = StepTensors(positions_T, kv_slots_T)
        state_rows = StateRows.of(batch, self.weights.device) if self.config.linear is not None else None
        multiply = partial(torch_layer.multiply_by, self._kernels)
        step = torch_layer.LayerStep(tensors, self._kept, self._kernels, multiply, state_rows)
        hidden = torch_layer.run_layers(self.weights, ids_T, step, attend, torch.cat((sampled_N, pooled_P)))
        hidden_PD = None
        if len(pooled_P):
            pooled = torch_layer.Hidden(*(part[num_samples:] for part in hidden))
            hidden_PD = torch_layer.final_states(self.weights, self._kernels, pooled).cpu().numpy()
        if not num_samples:
            return StepLogits(None, hidden_PD=hidden_PD)
        shape = num_samples, self.config.vocab_size
        logits_NV = torch.empty(shape, dtype=self.weights.wide_dtype, device=self.weights.device)
        torch_layer.write_logits(self.weights, self._kernels, hidden, logits_NV)
        peaks_N = torch.empty(num_samples, device=self.weights.device)
        best = BestBuffers(torch.empty_like(sampled_N), peaks_N)
        self._kernels.best(logits_NV, best)
        return StepLogits(
            logits_NV.cpu().numpy() if wants_logits else None,
            BestTokens(best.ids_R.cpu().numpy(), best.peaks_R.cpu().numpy()),
            hidden_PD=hidden_PD,
        )

    def _chunks(self, batch: AttentionBatch, table: int) -> ChunkRows:
        rows = ChunkRows.of(batch, self._block_size, table=table)
        return rows._replace(block_ids=rows.block_ids * int(self._parts_of_block[table]))

    def _kind(self, layer: LayerSpec) -> tuple[int | None, int]:
        """Return the window and the block table of a layer: one plan is for all that have both in common."""
        return layer.window, min(layer.table, self._most_table)

    @torch.inference_mode()
    def scrub(self, block_ids: IntArray) -> None:
        """Make stored values of KV blocks finite."""
        scrub(self._memory, torch.from_numpy(block_ids).to(self.weights.device))

    def kv_regions(self) -> list[KVRegion]:
        """Return keys and values of each layer; see `GivesKV`."""
        return [region_of(part) for parts in self._memory for part in parts]

    def state_regions(self) -> list[KVRegion]:
        """Return the parts of each layer that keeps states; see `Computes.state_regions`."""
        states = (kept for kept in self._kept if isinstance(kept, LayerState))
        return [region_of(part) for state in states for part in state if part.numel()]

    def products(self) -> RowProducts:
        """Return those of the model's first layer; see `GivesProducts`."""
        return layer_products(self.weights)


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)


_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


class _Rows(NamedTuple):
    """Rows that attend together: one of any number of new tokens, or some of one each."""

    tokens: Tensor
    """int64: their tokens of the step, row after row."""
    pieces: Tensor
    """int64 [R * K * B]: block id * K + head, of blocks of which each row has as many."""
    num_rows: int
    mask: Tensor | None
    """What is seen, bool: [T, C], or [R, 1, 1, C] of rows of one token; None where causality says it."""


class TorchKernels:
    """Plain torch, in float32 (float64 in a float64 model) wherever more than a product is computed.

    Parameters
    ----------
    dtype : of the model.
    device : where all tensors are.
    block_size : tokens of a KV block.
    """

    name = "torch"

    def __init__(self, dtype: torch.dtype, device: torch.device, block_size: int) -> None:
        self._device = device
        self._block_size = block_size
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32

    def add_norm(self, x_TD: Tensor | None, residual_TD: Tensor, norm: Norm, out_TD: Tensor) -> None:
        """Add and normalise; see `Kernels.add_norm`."""
        if x_TD is not None:
            residual_TD.add_(x_TD)
        out_TD.copy_(_normalised(residual_TD, norm))

    def rope_store(
        self, qkv_TX: Tensor, step: StepTensors, layer: LayerSpec, kv: LayerKVCache, q_TNH: Tensor
    ) -> None:
        """Rotate and store; see `Kernels.rope_store`."""
        heads_TXH = qkv_TX.view(len(qkv_TX), -1, layer.head_dim)
        q_TXH, kv_TXH = heads_TXH.tensor_split((layer.num_heads,), 1)
        angles_T1H = step.positions_T[:, None, None].float() * layer.frequencies_H
        cos_T1H, sin_T1H = (
            (part * layer.factors_H).to(self._wide) for part in (angles_T1H.cos(), angles_T1H.sin())
        )
        q_TNH.copy_(self._turned(q_TXH, layer.query_norm, cos_T1H, sin_T1H))
        if layer.query_growth is not None:
            factor, context = layer.query_growth
            growth_T = 1 + factor * torch.log(1 + torch.floor(step.positions_T / context))
            q_TNH.mul_(growth_T[:, None, None].to(q_TNH.dtype))
        if layer.shares_kv:
            return
        k_TKH, v_TKH = kv_TXH.chunk(2, 1)
        if layer.value_norm is not None:
            v_TKH = _normalised(v_TKH, layer.value_norm)
        k_TKH = self._turned(k_TKH, layer.key_norm, cos_T1H, sin_T1H).to(k_TKH.dtype)
        slots_T = (step.kv_slots_T[layer.table] if step.kv_slots_T.dim() > 1 else step.kv_slots_T).long()
        where = (slots_T // self._block_size, slots_T % self._block_size)
        for part, x_TKH in ((kv.k_BKSH, k_TKH), (kv.v_BKSH, v_TKH)):
            part.transpose(1, 2).index_put_(where, stored(x_TKH, part.dtype))

    def act_mul(self, gate_up_TF2: Tensor, activation: Activation, out_TF: Tensor) -> None:
        """Activate the gate and multiply; see `Kernels.act_mul`."""
        if gate_up_TF2.shape == out_TF.shape:
            out_TF.copy_(_ACTIVATIONS[activation](gate_up_TF2.to(self._wide)))
            return
        gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
        if activation == "clamped_swiglu":
            out_TF.copy_(_clamped_swiglu(gate_TF.to(self._wide), up_TF.to(self._wide)))
            return
        out_TF.copy_(_ACTIVATIONS[activation](gate_TF.to(self._wide)).mul_(up_TF))

    def in_fp8(self, x_TD: Tensor) -> Fp8Matrix:
        """Turn tokens into 8 bits a number; see `Kernels.in_fp8`."""
        return Fp8Matrix.of(x_TD)

    def plan_chunks(self, rows: ChunkRows, layer: LayerSpec) -> list[_Rows]:
        """Put rows of one new token and about equal length together; see `Kernels.plan_chunks`."""
        starts_R = np.cumsum(rows.query_lens_R) - rows.query_lens_R
        blocks = np.split(rows.block_ids, np.cumsum(rows.num_blocks_R)[:-1])
        together: dict[tuple[int, int], list[int]] = {}
        for row, (query_len, num_blocks) in enumerate(
            zip(rows.query_lens_R.tolist(), rows.num_blocks_R.tolist(), strict=True)
        ):
            alike = (0, num_blocks.bit_length()) if query_len == 1 else (1, row)
            together.setdefault(alike, []).append(row)
        return [
            self._plan(
                starts_R[group],
                int(rows.query_lens_R[group[0]]),
                rows.context_lens_R[group],
                [blocks[row] for row in group],
                layer,
            )
            for group in together.values()
        ]

    def attend_chunks(
        self, q_TNH: Tensor, kv: LayerKVCache, plan: list[_Rows], layer: LayerSpec, out_TNH: Tensor
    ) -> None:
        """Attend, the rows that go together at once; see `Kernels.attend_chunks`."""
        num_kv_heads, head_dim = layer.num_kv_heads, layer.head_dim
        sinks_KG1 = None if layer.sinks_N is None else layer.sinks_N.view(num_kv_heads, -1, 1)
        for rows in plan:
            k_RKCH, v_RKCH = (
                part.flatten(0, 1)
                .index_select(0, rows.pieces)
                .to(q_TNH.dtype)
                .view(rows.num_rows, num_kv_heads, -1, head_dim)
                for part in kv
            )
            q = q_TNH.index_select(0, rows.tokens).view(len(rows.tokens), num_kv_heads, -1, head_dim)
            if rows.mask is not None and rows.mask.dim() == 4:
                mixed = _mixed(q, k_RKCH, v_RKCH, rows.mask, layer, sinks_KG1)
            else:
                # The query heads of a KV head are the batch, so that keys and values repeat with stride 0.
                num_keys = len(rows.tokens) if rows.mask is None else rows.mask.shape[1]
                k_GKCH, v_GKCH = (
                    part[:, :, :num_keys].expand(q.shape[2], -1, -1, -1) for part in (k_RKCH, v_RKCH)
                )
                sinks_GK11 = None if sinks_KG1 is None else sinks_KG1.transpose(0, 1)[..., None]
                mixed = _mixed(q.permute(2, 1, 0, 3), k_GKCH, v_GKCH, rows.mask, layer, sinks_GK11).permute(
                    2, 1, 0, 3
                )
            out_TNH.index_copy_(0, rows.tokens, mixed.reshape(len(rows.tokens), -1, head_dim))

    def best(self, logits_RV: Tensor, out: BestBuffers) -> None:
        """Find the most likely tokens; see `Kernels.best`."""
        peaks_R, ids_R = logits_RV.max(-1)
        out.ids_R.copy_(ids_R)
        out.peaks_R.copy_(peaks_R)

    def _plan(
        self,
        starts_R: Int32Array,
        query_len: int,
        context_lens_R: Int32Array,
        blocks_R: Sequence[Int32Array],
        layer: LayerSpec,
    ) -> _Rows:
        num_blocks = max(map(len, blocks_R))
        # A shorter row repeats its own last block: what is masked may be NaN in another's.
        table_RB = np.array([np.pad(blocks, (0, num_blocks - len(blocks)), "edge") for blocks in blocks_R])
        heads_K = np.arange(layer.num_kv_heads)[:, None]
        pieces_RKB = table_RB.astype(np.int64)[:, None] * layer.num_kv_heads + heads_K
        keys_C = np.arange(num_blocks * self._block_size if query_len == 1 else context_lens_R[0])
        positions_RT1 = context_lens_R[:, None, None] - query_len + np.arange(query_len)[:, None]
        seen_RTC = keys_C <= positions_RT1
        if layer.window is not None:
            seen_RTC &= keys_C > positions_RT1 - layer.window
        mask = None
        if query_len == 1:
            mask = self._to_device(seen_RTC[:, None])
        elif query_len < len(keys_C) or not seen_RTC[0, -1, 0]:
            mask = self._to_device(seen_RTC[0])
        return _Rows(
            self._to_device((starts_R[:, None] + np.arange(query_len)).reshape(-1).astype(np.int64)),
            self._to_device(pieces_RKB.reshape(-1)),
            len(starts_R),
            mask,
        )

    def _turned(self, x_TNH: Tensor, norm: Norm | None, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
        wide_TNH = (x_TNH if norm is None else _normalised(x_TNH, norm)).to(self._wide)
        first, second = wide_TNH.chunk(2, dim=-1)
        return torch.cat((first * cos_T1H - second * sin_T1H, second * cos_T1H + first * sin_T1H), dim=-1)

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _mixed(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, layer: LayerSpec, sinks: Tensor | None
) -> Tensor:
    """Attend, all that has no mask causally; sinks are scores that take their shares and add nothing."""
    if sinks is None and layer.softcap is None:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=layer.scale
        )
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * layer.scale
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~mask, -torch.inf)
    totals = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        totals = torch.logaddexp(totals, sinks.to(scores.dtype))
    return (scores - totals).exp().to(v.dtype) @ v


def _normalised(x: Tensor, norm: Norm) -> Tensor:
    # In float64, too, for the reference implementations do so.
    if norm.bias_D is not None:
        return functional.layer_norm(x, norm.scale_D.shape, norm.scale_D, norm.bias_D, norm.eps)
    wide = x.float()
    if norm.centers:
        wide = x if x.dtype == torch.float64 else wide
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    return norm.scale_D * wide.to(x.dtype) if norm.scales_rounded else (wide * norm.scale_D).to(x.dtype)
