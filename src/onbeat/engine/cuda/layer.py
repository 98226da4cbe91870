"""The one layer of all families, by operators that are handed in.

Legend: T tokens, R rows that decode, N query heads, D model width, V vocabulary, X = (N + 2 KV heads) * head
width.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onbeat.engine.cuda.kernels import DecodeRows, Kernels, LayerSpec, Multiply, Norm, StepTensors
from onbeat.engine.cuda.weights import CudaLayer, CudaWeights
from onbeat.engine.torch_kv import LayerKVCache


class LayerStep(NamedTuple):
    """What the layers must know of a step: it has rows that decode, or chunks."""

    tensors: StepTensors
    num_tokens: int
    """Those behind it are padding."""
    decodes: DecodeRows | None
    chunk_plans: Mapping[int | None, Any]
    """By window; of a step without `decodes`."""
    kv: Sequence[LayerKVCache]
    kernels: Kernels
    multiply: Multiply


class Hidden(NamedTuple):
    """The last layer's output and what it is still to be added to, [tokens, D] each."""

    x_TD: Tensor
    residual_TD: Tensor


def run_layers(weights: CudaWeights, ids_T: Tensor, step: LayerStep, wanted_N: Tensor | None) -> Hidden:
    """Run tokens through the layers; their keys and values are stored on the way.

    Parameters
    ----------
    wanted_N : tokens whose hidden states are returned; None: all. Nobody needs more of the others than their
        keys and values, so the last layer's products leave them out: most of one layer of a long prompt.
    """
    residual_TD = weights.embedding_VD.index_select(0, ids_T)
    scale_embedding(weights, residual_TD)
    x_TD: Tensor | None = None
    spec = weights.layers[0].spec
    q_TNH, mixed_TNH = (residual_TD.new_empty(len(ids_T), spec.num_heads, spec.head_dim) for _ in range(2))
    for layer, kv in zip(weights.layers, step.kv, strict=True):
        before_attention(layer, x_TD, residual_TD, step, kv, q_TNH)
        del x_TD  # its memory is wanted again
        left_N = wanted_N if layer is weights.layers[-1] else None
        if left_N is not None and not len(left_N):
            return Hidden(residual_TD[:0], residual_TD[:0])
        attend(layer.spec, q_TNH, step, kv, mixed_TNH)
        if left_N is not None:
            mixed_TNH, residual_TD = (part.index_select(0, left_N) for part in (mixed_TNH, residual_TD))
        x_TD = after_attention(weights, layer, mixed_TNH, residual_TD, step)
    assert x_TD is not None, "a model has layers"
    return Hidden(x_TD, residual_TD)


def scale_embedding(weights: CudaWeights, residual_TD: Tensor) -> None:
    """Do in place what a family does to the embedding."""
    if weights.embedding_scale != 1.0:
        residual_TD.mul_(weights.embedding_scale)


def before_attention(
    layer: CudaLayer,
    x_TD: Tensor | None,
    residual_TD: Tensor,
    step: LayerStep,
    kv: LayerKVCache,
    q_TNH: Tensor,
) -> None:
    """Run a layer up to attention: the queries are written, keys and values stored.

    Parameters
    ----------
    x_TD : what the layer before adds to the residual, overwritten; None in the first layer.
    """
    normed_TD = torch.empty_like(residual_TD) if x_TD is None else x_TD
    step.kernels.add_norm(x_TD, residual_TD, layer.attention_norm, normed_TD)
    qkv_TX = step.multiply(normed_TD, layer.qkv_XD, layer.qkv_bias_X)
    step.kernels.rope_store(qkv_TX, step.tensors, layer.spec, kv, q_TNH)


def attend(spec: LayerSpec, q_TNH: Tensor, step: LayerStep, kv: LayerKVCache, mixed_TNH: Tensor) -> None:
    """Attend with all tokens of a step."""
    q_TNH, mixed_TNH = q_TNH[: step.num_tokens], mixed_TNH[: step.num_tokens]
    if step.decodes is not None:
        step.kernels.attend_decodes(q_TNH, kv, step.decodes, spec, mixed_TNH)
    else:
        step.kernels.attend_chunks(q_TNH, kv, step.chunk_plans[spec.window], spec, mixed_TNH)


def after_attention(
    weights: CudaWeights, layer: CudaLayer, mixed_TNH: Tensor, residual_TD: Tensor, step: LayerStep
) -> Tensor:
    """Run the rest of a layer; return what it adds to the residual, [T, D]."""
    kernels, multiply = step.kernels, step.multiply
    x_TD = multiply(mixed_TNH.view(len(mixed_TNH), -1), layer.o_DX, layer.o_bias_D)
    _finish_branch(kernels, weights, x_TD, layer.after_attention_norm)
    kernels.add_norm(x_TD, residual_TD, layer.mlp_norm, x_TD)
    gate_up_TF2 = multiply(x_TD, layer.gate_up_FD, None)
    del x_TD  # a long prompt's largest tensors are wanted again as soon as nobody reads them
    activated_TF = gate_up_TF2.new_empty(len(gate_up_TF2), gate_up_TF2.shape[1] // 2)
    kernels.act_mul(gate_up_TF2, weights.config.hidden_activation, activated_TF)
    del gate_up_TF2
    x_TD = multiply(activated_TF, layer.down_DF, None)
    _finish_branch(kernels, weights, x_TD, layer.after_mlp_norm)
    return x_TD


def write_logits(weights: CudaWeights, kernels: Kernels, hidden: Hidden, logits_TV: Tensor) -> None:
    """Write the logits of as many tokens of `hidden` as there is room for, in float32 (or float64)."""
    x_TD, residual_TD = (part[: len(logits_TV)] for part in hidden)
    kernels.add_norm(x_TD, residual_TD, weights.final_norm, x_TD)
    head_DV = weights.lm_head_VD.t()
    if logits_TV.dtype == x_TD.dtype:
        torch.mm(x_TD, head_DV, out=logits_TV)
    elif x_TD.device.type == "cuda":
        torch.mm(x_TD, head_DV, out_dtype=logits_TV.dtype, out=logits_TV)
    else:
        logits_TV.copy_(x_TD @ head_DV)
    if weights.config.logits_divisor != 1.0:
        logits_TV.div_(weights.config.logits_divisor)


def first_of_windows(weights: CudaWeights) -> dict[int | None, LayerSpec]:
    """Return a layer of each window that the model has."""
    return {layer.spec.window: layer.spec for layer in reversed(weights.layers)}


def _finish_branch(kernels: Kernels, weights: CudaWeights, x_TD: Tensor, norm: Norm | None) -> None:
    """Do in place what a family does to what attention or feed-forward adds to the residual."""
    if norm is not None:
        kernels.add_norm(None, x_TD, norm, x_TD)
    if weights.config.residual_scale != 1.0:
        x_TD.mul_(weights.config.residual_scale)
