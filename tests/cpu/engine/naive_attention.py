"""Attention computed for one request at a time, and the same input handed to paged attention."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from onbeat.engine.input_batch import AttentionBatch
from onbeat.engine.memory import KVCacheSpec
from onbeat.engine.model_config.architecture import ModelConfig, RopeConfig
from onbeat.engine.torch.forward import TorchKernels
from onbeat.engine.torch.kernels import ChunkRows, LayerSpec
from onbeat.engine.torch.kv import allocate_kv
from onbeat.engine.torch.types import numpy_dtype
from onbeat.engine.torch.weights import Rotation


@dataclass(frozen=True)
class Row:
    num_computed_tokens: int
    num_new_tokens: int

    @property
    def context(self) -> int:
        return self.num_computed_tokens + self.num_new_tokens


@dataclass(frozen=True)
class Case:
    rows: list[Row]
    heads: tuple[int, int]
    """Query heads, KV heads."""
    head_dim: int
    block_size: int
    window: int | None
    seed: int

    def without_window(self) -> Case:
        return dataclasses.replace(self, window=None)

    def tensors(self, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return each row's queries [new, heads, width], and keys and values [context, KV heads, width]."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(num_tokens: int, num_heads: int) -> torch.Tensor:
            shape = (num_tokens, num_heads, self.head_dim)
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        num_heads, num_kv_heads = self.heads
        return [
            (
                draw(row.num_new_tokens, num_heads),
                draw(row.context, num_kv_heads),
                draw(row.context, num_kv_heads),
            )
            for row in self.rows
        ]

    def config(self) -> ModelConfig:
        """Return a model of two layers: the first attends to all, the second to the window."""
        return ModelConfig(
            family="llama",
            architecture="LlamaForCausalLM",
            vocab_size=10,
            hidden_size=8,
            num_layers=2,
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=self.head_dim,
            intermediate_size=8,
            max_position_embeddings=512,
            rms_norm_eps=1e-6,
            rope=RopeConfig(theta=10000.0),
            sliding_window=self.window,
            sliding_layers=(False, self.window is not None),
            query_pre_attn_scalar=self.head_dim * 1.5,
        )


def naive_attention(case: Case, dtype: torch.dtype) -> torch.Tensor:
    """Return the outputs of all new tokens, packed, computed in float64 from inputs of the type."""
    outputs = []
    for row, (q, k, v) in zip(case.rows, case.tensors(dtype), strict=True):
        repeats = case.heads[0] // case.heads[1]
        keys, values = (part.double().repeat_interleave(repeats, dim=1) for part in (k, v))
        scores = torch.einsum("qnh,knh->nqk", q.double(), keys) * (case.head_dim * 1.5) ** -0.5
        positions = torch.arange(row.num_computed_tokens, row.context)[:, None]
        distance = positions - torch.arange(row.context)
        hidden = distance < 0
        if case.window is not None:
            hidden |= distance >= case.window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        outputs.append(torch.einsum("nqk,knh->qnh", weights, values))
    return torch.cat(outputs)


def run_paged(
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    *,
    layer_index: int = 1,
    unused_slots: float = 0.0,
) -> torch.Tensor:
    """Return what paged attention computes, with the computed tokens stored in shuffled blocks."""
    spec = KVCacheSpec.of_model(case.config(), dtype=numpy_dtype(dtype), block_size=case.block_size)
    blocks_needed = [-(-row.context // case.block_size) for row in case.rows]
    num_blocks = sum(blocks_needed) + 3
    layers = allocate_kv(spec, num_blocks, device)
    for part in layers[layer_index]:
        part.fill_(unused_slots)
    shuffled = np.random.default_rng(case.seed).permutation(num_blocks)
    tables = np.zeros((len(case.rows) + 2, max(blocks_needed)), np.int32)
    slots_R = np.arange(len(case.rows))[::-1].copy()
    slot_mappings = []
    tensors = case.tensors(dtype)
    ends = accumulate(blocks_needed)
    for row, slot, needed, end, (_, k, v) in zip(
        case.rows, slots_R, blocks_needed, ends, tensors, strict=True
    ):
        tables[slot, :needed] = shuffled[end - needed : end]
        positions = np.arange(row.context)
        slot_mapping = (
            tables[slot, positions // case.block_size].astype(np.int64) * case.block_size
            + positions % case.block_size
        )
        for part, new in zip(layers[layer_index], (k, v), strict=True):
            old = torch.from_numpy(slot_mapping[: row.num_computed_tokens]).to(device)
            part.transpose(1, 2)[old // case.block_size, old % case.block_size] = new[
                : row.num_computed_tokens
            ].to(device)
        slot_mappings.append(slot_mapping[row.num_computed_tokens :])
    batch = AttentionBatch(
        query_lens_R=np.array([row.num_new_tokens for row in case.rows]),
        context_lens_R=np.array([row.context for row in case.rows]),
        slots_R=slots_R,
        block_tables_SB=tables,
        slot_mapping_T=np.concatenate(slot_mappings),
    )
    new_k, new_v = (
        torch.cat([part[row.num_computed_tokens :] for row, part in zip(case.rows, parts, strict=True)])
        for parts in ([k for _, k, _ in tensors], [v for _, _, v in tensors])
    )
    where = batch.slot_mapping_T // case.block_size, batch.slot_mapping_T % case.block_size
    for part, new in zip(layers[layer_index], (new_k, new_v), strict=True):
        part.transpose(1, 2)[where] = new.to(device)
    q = torch.cat([q for q, _, _ in tensors]).to(device)
    out = torch.empty_like(q)
    layer = layer_spec(case.config(), layer_index)
    kernels = TorchKernels(dtype, device, case.block_size)
    with torch.inference_mode():
        plan = kernels.plan_chunks(ChunkRows.of(batch, case.block_size), layer)
        kernels.attend_chunks(q, layers[layer_index], plan, layer, out)
    return out.cpu()


def layer_spec(config: ModelConfig, layer_index: int = 0) -> LayerSpec:
    """Return what attention must know of a layer that turns all of each head."""
    rotation = Rotation.of(config.layer_rope(layer_index), config.head_dim, torch.device("cpu"))
    return LayerSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale,
        window=config.layer_window(layer_index),
        frequencies_H=rotation.frequencies_H,
        factors_H=rotation.factors_H,
        sinks_N=None,
        query_norm=None,
        key_norm=None,
    )
