"""The one layer of all families, by operators that are handed in.

Legend: T tokens, R rows that decode, N query heads, D model width, V vocabulary, X = (N + 2 KV heads) * head
width.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from onbeat.engine.torch.kernels import Kernels, LayerSpec, Multiply, Norm, StepTensors
from onbeat.engine.torch.kv import LayerKVCache
from onbeat.engine.torch.linear_attention import LayerState, StateRows
from onbeat.engine.torch.types import Matrix
from onbeat.engine.torch.weights import Layer, Means, TorchWeights


class LayerStep(NamedTuple):
    """What the layers must know of a step, but for its rows."""

    tensors: StepTensors
    kv: Sequence[LayerKVCache | LayerState]
    kernels: Kernels
    multiply: Multiply
    rows: StateRows | None = None
    """None where no layer keeps a state."""


Attend = Callable[[Tensor, LayerKVCache, LayerSpec, Tensor], None]
"""Attends with a step's queries [T, N, H] to a layer's cache, and writes what comes of it [T, N, H]."""


def multiply_by(kernels: Kernels, x_TD: Tensor, matrix: Matrix, bias_F: Tensor | None) -> Tensor:
    """Multiply with plain numbers, or with those in 8 bits, which a GPU has from sm_89 on; see `Multiply`."""
    if isinstance(matrix, Tensor):
        return functional.linear(x_TD, matrix, bias_F)
    (x8_TD, scales_T1), (rows_FD, scales_F1) = kernels.in_fp8(x_TD), matrix
    both = x8_TD, rows_FD.t(), scales_T1, scales_F1.t()
    product: Tensor = torch._scaled_mm(*both, bias=bias_F, out_dtype=x_TD.dtype)
    return product


class Hidden(NamedTuple):
    """The last layer's output and what it is still to be added to, [tokens, D] each."""

    x_TD: Tensor
    residual_TD: Tensor


def run_layers(
    weights: TorchWeights, ids_T: Tensor, step: LayerStep, attend: Attend, wanted_N: Tensor | None
) -> Hidden:
    """Run tokens through the layers; their keys and values are stored on the way.

    Parameters
    ----------
    wanted_N : tokens whose hidden states are returned; None: all. Nobody needs more of the others than their
        keys and values, so the last layer's products leave them out: most of one layer of a long prompt.
    """
    residual_TD = weights.embedding_VD.index_select(0, ids_T)
    scale_embedding(weights, residual_TD)
    x_TD: Tensor | None = None
    both_TX = [residual_TD.new_empty(len(ids_T) * widest_heads(weights)) for _ in range(2)]
    inputs, own_TP = weights.inputs, None
    own_TLP = None if inputs is None else inputs.of(ids_T, residual_TD, step.kernels, step.multiply)
    for index, (layer, kv) in enumerate(zip(weights.layers, step.kv, strict=True)):
        q_TNH, mixed_TNH = (heads_in(part, len(ids_T), layer.spec) for part in both_TX)
        left_N = wanted_N if layer is weights.layers[-1] else None
        is_left_out = left_N is not None and not len(left_N)
        if isinstance(kv, LayerState):
            mixed = mix_by_state(layer, x_TD, residual_TD, step, kv)
        else:
            gate_TX = before_attention(layer, x_TD, residual_TD, step, kv, q_TNH)
        del x_TD  # its memory is wanted again
        if is_left_out:
            return Hidden(residual_TD[:0], residual_TD[:0])
        if not isinstance(kv, LayerState):
            attend(q_TNH, kv, layer.spec, mixed_TNH)
            mixed = mixed_TNH if gate_TX is None else mixed_TNH.flatten(1) * gate_TX.sigmoid()
        if own_TLP is not None:
            own_TP = own_TLP[:, index]
        if left_N is not None:
            mixed, residual_TD = (part.index_select(0, left_N) for part in (mixed, residual_TD))
            own_TP = None if own_TP is None else own_TP.index_select(0, left_N)
        x_TD = after_attention(weights, layer, mixed, residual_TD, step, own_TP)
    assert x_TD is not None, "a model has layers"
    return Hidden(x_TD, residual_TD)


def widest_heads(weights: TorchWeights) -> int:
    """Return the numbers of all of a token's query heads, in the layer that has most."""
    return max(layer.spec.num_heads * layer.spec.head_dim for layer in weights.layers)


def heads_in(room: Tensor, num_tokens: int, spec: LayerSpec) -> Tensor:
    """Return the part of some memory that tokens' heads in a layer take, [T, N, H]."""
    shape = num_tokens, spec.num_heads, spec.head_dim
    return room[: math.prod(shape)].view(shape)


def scale_embedding(weights: TorchWeights, residual_TD: Tensor) -> None:
    """Do in place what a family does to the embedding."""
    if weights.embedding_scale != 1.0:
        residual_TD.mul_(weights.embedding_scale)


def before_attention(
    layer: Layer, x_TD: Tensor | None, residual_TD: Tensor, step: LayerStep, kv: LayerKVCache, q_TNH: Tensor
) -> Tensor | None:
    """Run a layer up to attention: the queries are written, keys and values stored.

    Returns
    -------
    What gates what attention will have mixed, [T, N H], before its sigmoid; None where nothing does.

    Parameters
    ----------
    x_TD : what the layer before adds to the residual, overwritten; None in the first layer.
    """
    normed_TD = _normed(step.kernels, x_TD, residual_TD, layer.norms.attention)
    qkv_TX = step.multiply(normed_TD, layer.qkv_XD, layer.qkv_bias_X)
    gate_TX = None
    if layer.gate_width:
        gate_TX, qkv_TX = qkv_TX[:, : layer.gate_width], qkv_TX[:, layer.gate_width :].contiguous()
    if layer.qk_norms is not None:
        widths = [norm.scale_D.numel() for norm in layer.qk_norms]
        for part_TX, norm in zip(qkv_TX.split((*widths, widths[1]), -1), layer.qk_norms, strict=False):
            heads = part_TX.contiguous().view(-1, *norm.scale_D.shape)
            part_TX.copy_(_normed(step.kernels, None, heads, norm).view_as(part_TX))
    step.kernels.rope_store(qkv_TX, step.tensors, layer.spec, kv, q_TNH)
    return gate_TX


def mix_by_state(
    layer: Layer, x_TD: Tensor | None, residual_TD: Tensor, step: LayerStep, state: LayerState
) -> Tensor:
    """Run a layer of linear attention up to its output projection, whose input is returned."""
    assert layer.delta is not None, "the layer keeps a state"
    assert step.rows is not None, "whoever has such layers says whose states they are"
    normed_TD = _normed(step.kernels, x_TD, residual_TD, layer.norms.attention)
    projected_TX = step.multiply(normed_TD, layer.qkv_XD, layer.qkv_bias_X)
    return layer.delta.mix(projected_TX, step.rows, state, step.kernels)


def after_attention(
    weights: TorchWeights,
    layer: Layer,
    mixed_TNH: Tensor,
    residual_TD: Tensor,
    step: LayerStep,
    own_TP: Tensor | None = None,
) -> Tensor:
    """Run the rest of a layer; return what it adds to the residual, [T, D].

    Parameters
    ----------
    own_TP : the tokens' own inputs of this layer, where it has any.
    """
    mixed_TD = None
    if weights.config.norms == "parallel":
        mixed_TD = step.multiply(mixed_TNH.view(len(mixed_TNH), -1), layer.o_DX, layer.o_bias_D)
    means = Means(weights.config.hidden_activation, step.kernels, step.multiply)
    # Nobody but the feed-forward holds its input, which is one of a long prompt's largest tensors.
    x_TD = layer.feed_forward.run(
        _mlp_input(weights, layer, mixed_TNH, residual_TD, step)
        if mixed_TD is None
        else _normed(step.kernels, None, residual_TD, layer.norms.mlp),
        means,
    )
    if mixed_TD is not None:
        x_TD.add_(mixed_TD)
    if layer.beside is not None:
        x_TD = layer.beside.add(x_TD, residual_TD, means)
    _finish_branch(step.kernels, weights, x_TD, layer.norms.after_mlp)
    if layer.gated_input is not None and own_TP is not None:
        x_TD = layer.gated_input.run(residual_TD.add_(x_TD), own_TP, means)
    if layer.scale_1 is not None:
        residual_TD.mul_(layer.scale_1)
        x_TD.mul_(layer.scale_1)
    return x_TD


def _mlp_input(
    weights: TorchWeights, layer: Layer, mixed_TNH: Tensor, residual_TD: Tensor, step: LayerStep
) -> Tensor:
    """Add what attention has found to the residual; return what the feed-forward reads, [T, D]."""
    x_TD = step.multiply(mixed_TNH.view(len(mixed_TNH), -1), layer.o_DX, layer.o_bias_D)
    _finish_branch(step.kernels, weights, x_TD, layer.norms.after_attention)
    return _normed(step.kernels, x_TD, residual_TD, layer.norms.mlp)


def _normed(kernels: Kernels, x_TD: Tensor | None, residual_TD: Tensor, norm: Norm | None) -> Tensor:
    """Add to the residual in place; return its norm in the memory of `x_TD`, or itself without a norm."""
    if norm is None:
        return residual_TD if x_TD is None else residual_TD.add_(x_TD)
    normed_TD = torch.empty_like(residual_TD) if x_TD is None else x_TD
    kernels.add_norm(x_TD, residual_TD, norm, normed_TD)
    return normed_TD


def write_logits(weights: TorchWeights, kernels: Kernels, hidden: Hidden, logits_TV: Tensor) -> None:
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
    if weights.head_bias_V is not None:
        logits_TV.add_(weights.head_bias_V)
    if weights.config.logits_divisor != 1.0:
        logits_TV.div_(weights.config.logits_divisor)
    if (cap := weights.config.logits_softcap) is not None:
        logits_TV.div_(cap).tanh_().mul_(cap)


def final_states(weights: TorchWeights, kernels: Kernels, hidden: Hidden) -> Tensor:
    """Return `hidden` behind the final norm, which overwrites it, in float32 (or float64)."""
    x_TD, residual_TD = hidden
    kernels.add_norm(x_TD, residual_TD, weights.final_norm, x_TD)
    return x_TD.to(weights.wide_dtype)


def _finish_branch(kernels: Kernels, weights: TorchWeights, x_TD: Tensor, norm: Norm | None) -> None:
    """Do in place what a family does to what attention or feed-forward adds to the residual."""
    if norm is not None:
        kernels.add_norm(None, x_TD, norm, x_TD)
    if weights.config.residual_scale != 1.0:
        x_TD.mul_(weights.config.residual_scale)
