"""A checkpoint's weights as the generic layer wants them, on the device.

A feed-forward is that of most layers, or a mixture of experts, of which each token passes a few (Shazeer et
al., 2017; as in Mixtral and Qwen 3).

Legend: T tokens, D model width, F feed-forward width, V vocabulary, E experts, K experts of a token, R rows
of one expert, X = (query heads + 2 KV heads) * head width.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from onbeat.engine.device import wait_for
from onbeat.engine.model_config.architecture import Activation, Experts, ModelConfig, RopeConfig
from onbeat.engine.model_config.rope import head_order, inverse_frequencies
from onbeat.engine.torch.kernels import Kernels, LayerSpec, Multiply, Norm
from onbeat.engine.torch.linear_attention import DeltaRule
from onbeat.engine.torch.types import Fp8Matrix, Matrix, device_of, numpy_dtype, to_tensor
from onbeat.engine.weights.checkpoint import Checkpoint
from onbeat.engine.weights.dummy import DummyCheckpoint
from onbeat.engine.weights.parameters import (
    BESIDE_NORMS,
    LAYER_NORMS,
    LayerNorms,
    inner_parts,
    parameter_shapes,
    projections,
    row_order,
)


class Means(NamedTuple):
    """What computes a feed-forward."""

    activation: Activation
    kernels: Kernels
    multiply: Multiply


class FeedForward(NamedTuple):
    """`down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))`."""

    gate_up_FD: Matrix
    """All of the gate, then all of up: [2 F, D]; or [F, D]."""
    down_DF: Matrix
    gate_up_bias_F: Tensor | None = None
    down_bias_D: Tensor | None = None
    is_gated: bool = True

    def run(self, x_TD: Tensor, means: Means) -> Tensor:
        """Return the result, [T, D]."""
        gate_up_TF2 = means.multiply(x_TD, self.gate_up_FD, self.gate_up_bias_F)
        del x_TD  # a long prompt's largest tensors are wanted again as soon as nobody reads them
        activated_TF = gate_up_TF2.new_empty(len(gate_up_TF2), gate_up_TF2.shape[1] // (1 + self.is_gated))
        means.kernels.act_mul(gate_up_TF2, means.activation, activated_TF)
        del gate_up_TF2
        return means.multiply(activated_TF, self.down_DF, self.down_bias_D)


class SparseFeedForward(NamedTuple):
    """The sum of a token's experts, weighted by a router. The host waits to learn which they are."""

    router_ED: Tensor
    experts: Sequence[FeedForward]
    sizes: Experts
    router_bias_E: Tensor | None = None
    shared: tuple[FeedForward, Tensor] | None = None
    """The expert that every token passes, and what projects a token to its gate, [1, D]."""
    factors_E: Tensor | None = None
    """On the weights of each expert."""

    def run(self, x_TD: Tensor, means: Means, routed_TD: Tensor | None = None) -> Tensor:
        """Return the result, [T, D]; the router may read something else than the experts."""
        routed_TD = x_TD if routed_TD is None else routed_TD
        weights_TK, experts_TK = self.route(means.multiply(routed_TD, self.router_ED, self.router_bias_E))
        if self.factors_E is not None:
            weights_TK = weights_TK * self.factors_E[experts_TK]
        # Rows of an expert come together, so that its weights are read once.
        order = experts_TK.flatten().argsort(stable=True)
        counts = experts_TK.flatten().bincount(minlength=len(self.experts)).tolist()
        weights = weights_TK.flatten()
        out_TD = torch.zeros_like(x_TD)
        for expert, chosen in zip(self.experts, torch.split(order, counts), strict=True):
            if len(chosen):
                tokens_R = chosen // self.sizes.num_per_token
                out_RD = expert.run(x_TD[tokens_R], means)
                out_TD.index_add_(0, tokens_R, out_RD * weights[chosen, None])
        if self.shared is not None:
            expert, gate_1D = self.shared
            gates_T1 = torch.sigmoid(means.multiply(x_TD, gate_1D, None))
            out_TD.addcmul_(gates_T1, expert.run(x_TD, means))
        return out_TD

    def route(self, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of each token's experts in the model's type, and which they are: [T, K] each."""
        if self.sizes.chooses_first:
            scores_TK, experts_TK = scores_TE.topk(self.sizes.num_per_token, dim=-1)
            return scores_TK.softmax(-1), experts_TK
        if self.sizes.mixer_jitter is not None:
            return self._mix_sparsely(scores_TE, 2 * self.sizes.mixer_jitter)
        probabilities_TE = torch.softmax(scores_TE, dim=-1, dtype=torch.float32)
        weights_TK, experts_TK = probabilities_TE.topk(self.sizes.num_per_token, dim=-1)
        if self.sizes.normalizes:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return weights_TK.to(scores_TE.dtype), experts_TK

    def _mix_sparsely(self, scores_TE: Tensor, most_below: float) -> tuple[Tensor, Tensor]:
        experts_TK = scores_TE.topk(self.sizes.num_per_token, dim=-1).indices
        left_TE, weights = scores_TE.clone(), []
        for chosen_T1 in experts_TK.split(1, dim=-1):
            peak_T1 = scores_TE.gather(-1, chosen_T1)
            is_far_TE = (peak_T1 - scores_TE) / scores_TE.abs().clamp(min=peak_T1) > most_below
            shares_TE = left_TE.masked_fill(is_far_TE, -torch.inf).softmax(-1)
            weights.append(shares_TE.gather(-1, chosen_T1))
            left_TE.scatter_(-1, chosen_T1, -torch.inf)
        return torch.cat(weights, dim=-1), experts_TK


class Beside(NamedTuple):
    """Experts beside a layer's feed-forward; both read the residual, each past a norm of its own."""

    sparse: SparseFeedForward
    router_norm: Norm
    after_dense_norm: Norm
    norm: Norm
    after_norm: Norm

    def add(self, dense_TD: Tensor, x_TD: Tensor, means: Means) -> Tensor:
        """Return what feed-forward and experts add up to, [T, D]; the former's is overwritten."""
        routed_TD, normed_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
        means.kernels.add_norm(None, x_TD, self.router_norm, routed_TD)
        means.kernels.add_norm(None, x_TD, self.norm, normed_TD)
        found_TD = self.sparse.run(normed_TD, means, routed_TD)
        for part_TD, norm in ((dense_TD, self.after_dense_norm), (found_TD, self.after_norm)):
            means.kernels.add_norm(None, part_TD, norm, part_TD)
        return found_TD.add_(dense_TD)


class GatedInput(NamedTuple):
    """What a layer makes of the tokens' own inputs (per-layer embeddings)."""

    gate_PD: Matrix
    projection_DP: Matrix
    norm: Norm

    def run(self, x_TD: Tensor, own_TP: Tensor, means: Means) -> Tensor:
        """Return what is added to the residual, [T, D]."""
        both_TP2 = torch.cat((means.multiply(x_TD, self.gate_PD, None), own_TP), dim=-1)
        gated_TP = torch.empty_like(own_TP)
        means.kernels.act_mul(both_TP2, means.activation, gated_TP)
        added_TD = means.multiply(gated_TP, self.projection_DP, None)
        means.kernels.add_norm(None, added_TD, self.norm, added_TD)
        return added_TD


class LayerInputs(NamedTuple):
    """Where tokens' own inputs of all L layers come from: a table, and a product of the embedding."""

    table_VX: Tensor
    projection_XD: Matrix
    norm: Norm

    def of(self, ids_T: Tensor, x_TD: Tensor, kernels: Kernels, multiply: Multiply) -> Tensor:
        """Return them, [T, L, P]."""
        size, scale = len(self.norm.scale_D), 1 / math.sqrt(x_TD.shape[1])
        projected_RP = (multiply(x_TD, self.projection_XD, None) * scale).view(-1, size)
        kernels.add_norm(None, projected_RP, self.norm, projected_RP)
        found_RP = self.table_VX.index_select(0, ids_T).view(-1, size) * projected_RP.new_tensor(size**0.5)
        return ((projected_RP + found_RP) * math.sqrt(0.5)).view(len(ids_T), -1, size)


def parameter_on(checkpoint: Checkpoint, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a parameter on a device; on the CPU it may share memory with a file, so don't write to it.

    Raises
    ------
    ModelLoadError : the parameter is not there or cannot be read.
    """
    if isinstance(checkpoint, DummyCheckpoint):
        return checkpoint.get_on(name, dtype, device)
    return to_tensor(checkpoint.get(name, numpy_dtype(dtype))).to(device)


class Layer(NamedTuple):
    """One layer; None where the family has no such thing. Products are `x @ weight.T + bias`."""

    qkv_XD: Matrix
    qkv_bias_X: Tensor | None
    o_DX: Matrix
    o_bias_D: Tensor | None
    feed_forward: FeedForward | SparseFeedForward
    norms: LayerNorms[Norm]
    qk_norms: tuple[Norm, Norm] | None
    """Of all query heads of a token together, and of all its key heads."""
    spec: LayerSpec
    gate_width: int = 0
    """First numbers of what is projected, whose sigmoid multiplies what attention mixes."""
    delta: DeltaRule | None = None
    """In place of attention; what is projected is then its input."""
    beside: Beside | None = None
    gated_input: GatedInput | None = None
    scale_1: Tensor | None = None
    """On the residual behind the layer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchWeights:
    """All of a model."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    embedding_VD: Tensor
    embedding_scale: float
    """Rounded to the model's type."""
    layers: list[Layer]
    final_norm: Norm
    lm_head_VD: Tensor
    """The embedding itself where the two are tied."""
    head_bias_V: Tensor | None = None
    inputs: LayerInputs | None = None

    @property
    def wide_dtype(self) -> torch.dtype:
        """Type of logits."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def in_layers(name: str) -> bool:
    """Return whether a parameter is a matrix of a layer: what `load_weights` turns into 8 bits."""
    return name.endswith("_proj.weight")


def load_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, *, in_fp8: bool = False
) -> TorchWeights:
    """Read a checkpoint, one parameter at a time.

    Parameters
    ----------
    in_fp8 : matrices of the layers get 8 bits a number; embedding, LM head and routers stay as they are.

    Raises
    ------
    ModelLoadError : a weight is missing or cannot be read.
    """
    with torch.inference_mode():
        return _Loader(checkpoint, dtype, device, Fp8Matrix.of if in_fp8 else torch.as_tensor).load()


_Form = Callable[[Tensor], Matrix]


class _Loader:
    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, stored: _Form
    ) -> None:
        self._checkpoint = checkpoint
        self._stored = stored
        self._config = checkpoint.config
        self._shapes = parameter_shapes(checkpoint.config)
        self._dtype = dtype
        self._device = device
        ropes = dict.fromkeys(map(self._config.layer_turn, range(self._config.num_layers)))
        self._rotations = {turn: Rotation.of(*turn, device) for turn in ropes}

    def load(self) -> TorchWeights:
        config = self._config
        embedding_VD = self._joined("model.embed_tokens.weight")
        scale = torch.tensor(config.embedding_scale, dtype=self._dtype)
        return TorchWeights(
            config=config,
            dtype=self._dtype,
            device=self._device,
            embedding_VD=embedding_VD,
            embedding_scale=float(scale),
            layers=[self._layer(index) for index in range(config.num_layers)],
            final_norm=self._norm("model.norm"),
            lm_head_VD=embedding_VD if config.tie_word_embeddings else self._joined("lm_head.weight"),
            head_bias_V=self._joined("lm_head.bias") if config.head_bias else None,
            inputs=self._inputs() if config.layer_input_size else None,
        )

    def _inputs(self) -> LayerInputs:
        names = ("embed_tokens_per_layer", "per_layer_model_projection")
        table, projection = (self._joined(f"model.{name}.weight") for name in names)
        return LayerInputs(table, projection, self._norm("model.per_layer_projection_norm"))

    def _layer(self, index: int) -> Layer:
        config, prefix = self._config, f"model.layers.{index}"
        attention, is_linear = f"{prefix}.self_attn", config.is_linear(index)
        norm_names = LAYER_NORMS[config.norms]
        rotation = self._rotations[config.layer_turn(index)]
        qk_norms = None
        count, width = config.kv_heads(index)
        shares_kv = config.kv_layer(index) != index
        if config.qk_norm and not is_linear:
            norms = [self._norm(f"{attention}.{part}_norm") for part in ("q" if shares_kv else "qk")]
            qk_norms = rotation.ordered_norm(norms[0]), rotation.ordered_norm(norms[-1])
        is_alike, has_bias = config.qk_norm == "head" and not config.norms_center, config.attention_bias
        of_each_head = qk_norms if qk_norms is not None and is_alike else (None, None)
        layer = Layer(
            qkv_XD=self._stored(self._projected(index, "weight", rotation)),
            qkv_bias_X=self._projected(index, "bias", rotation) if has_bias else None,
            o_DX=self._stored(self._joined(f"{projections(config, index)[1]}.weight")),
            o_bias_D=self._joined(f"{attention}.o_proj.bias") if config.attention_output_bias else None,
            feed_forward=self._feed_forward(index, f"{prefix}.mlp"),
            norms=LayerNorms(
                *(None if name is None else self._norm(f"{prefix}.{name}") for name in norm_names)
            ),
            qk_norms=None if is_alike else qk_norms,
            spec=LayerSpec(
                num_heads=config.num_heads,
                num_kv_heads=count,
                head_dim=width,
                scale=config.attention_scale,
                window=config.layer_window(index),
                table=config.place(index, 1 + config.kv_groups.num_windowed)[0],
                frequencies_H=rotation.frequencies_H,
                factors_H=rotation.factors_H,
                sinks_N=self._joined(f"{attention}.sinks") if config.has_sinks else None,
                query_norm=of_each_head[0],
                key_norm=of_each_head[1],
                softcap=config.attention_softcap,
                query_growth=config.query_growth,
                value_norm=self._plain_norm(width) if config.norms_values else None,
                shares_kv=shares_kv,
            ),
            **self._behind(prefix),
        )
        if is_linear:
            return layer._replace(delta=self._delta(f"{prefix}.linear_attn"))
        return layer._replace(gate_width=config.gate_width)

    def _behind(self, prefix: str) -> dict[str, Any]:
        """Return what a layer has beside and behind its feed-forward."""
        config, experts, found = self._config, self._config.experts, dict[str, Any]()
        if experts is not None and experts.is_beside:
            norm = self._plain_norm(config.hidden_size)
            scale_D = self._joined(f"{prefix}.router.scale").to(norm.scale_D) * config.hidden_size**-0.5
            factors_E = self._joined(f"{prefix}.router.per_expert_scale")
            sparse = self._sparse(f"{prefix}.mlp", experts)._replace(factors_E=factors_E)
            norms = (self._norm(f"{prefix}.{name}") for name in BESIDE_NORMS)
            found["beside"] = Beside(sparse, replace(norm, scale_D=scale_D), *norms)
        if config.layer_input_size:
            names = (f"{prefix}.per_layer_{name}.weight" for name in ("input_gate", "projection"))
            gate, projection = (self._stored(self._joined(name)) for name in names)
            norm = self._norm(f"{prefix}.post_per_layer_input_norm")
            found["gated_input"] = GatedInput(gate, projection, norm)
        if config.scales_layers:
            found["scale_1"] = self._joined(f"{prefix}.layer_scalar")
        return found

    def _plain_norm(self, width: int) -> Norm:
        """Return one that has no scale."""
        wide = torch.promote_types(self._dtype, torch.float32)
        ones = torch.ones(width, dtype=wide, device=self._device)
        return Norm(ones, self._config.rms_norm_eps, scales_rounded=False)

    def _delta(self, prefix: str) -> DeltaRule:
        assert self._config.linear is not None, "the layer has linear attention"
        names = ("conv1d.weight", "A_log", "dt_bias", "norm.weight")
        conv, a_log_U, dt_bias_U, scale_V = (self._joined(f"{prefix}.{name}") for name in names)
        norm = Norm(scale_V, self._config.rms_norm_eps, scales_rounded=True)
        return DeltaRule(self._config.linear, conv.flatten(1), a_log_U, dt_bias_U, norm)

    def _projected(self, index: int, kind: str, rotation: Rotation) -> Tensor:
        """Return a layer's projections below one another, or their biases."""
        joined = self._joined(*(f"{name}.{kind}" for name in projections(self._config, index)[0]))
        count, width = self._config.kv_heads(index)
        num_turned = (self._config.num_heads + count) * width
        if rotation.order_H is not None and not self._config.is_linear(index):
            turned = joined[self._config.gate_width :][:num_turned]
            turned.copy_(rotation.ordered(turned))
        return joined

    def _feed_forward(self, index: int, prefix: str) -> FeedForward | SparseFeedForward:
        experts = self._config.experts
        if experts is None or not self._config.has_experts(index) or experts.is_beside:
            return self._dense(prefix)
        return self._sparse(prefix, experts)

    def _sparse(self, prefix: str, experts: Experts) -> SparseFeedForward:
        has_bias = experts.has_bias
        parts = [self._dense(f"{prefix}.experts.{number}") for number in range(experts.num_experts)]
        router_bias_E = self._joined(f"{prefix}.gate.bias") if has_bias else None
        shared = None
        if experts.shared_size:
            shared = (
                self._dense(f"{prefix}.shared_expert"),
                self._joined(f"{prefix}.shared_expert_gate.weight"),
            )
        return SparseFeedForward(self._joined(f"{prefix}.gate.weight"), parts, experts, router_bias_E, shared)

    def _dense(self, prefix: str) -> FeedForward:
        inner, down = [f"{prefix}.{part}_proj" for part in inner_parts(self._config)], f"{prefix}.down_proj"
        has_bias = f"{down}.bias" in self._shapes
        return FeedForward(
            self._stored(self._joined(*(f"{part}.weight" for part in inner))),
            self._stored(self._joined(f"{down}.weight")),
            self._joined(*(f"{part}.bias" for part in inner)) if has_bias else None,
            self._joined(f"{down}.bias") if has_bias else None,
            self._config.is_gated,
        )

    def _norm(self, name: str) -> Norm:
        config, scale_D = self._config, self._joined(f"{name}.weight")
        bias_D = self._joined(f"{name}.bias") if f"{name}.bias" in self._shapes else None
        if config.norm_weight_offset:
            scale_D = scale_D.float() + config.norm_weight_offset
        rounds_once = config.norm_rounds_once or config.norms_center
        return Norm(
            scale_D,
            config.rms_norm_eps,
            scales_rounded=not rounds_once,
            centers=config.norms_center,
            bias_D=bias_D,
        )

    def _joined(self, *names: str) -> Tensor:
        """Return parameters one below the other, of which no second copy is made on the device.

        A single one may be a file's memory: don't write to it.
        """
        if len(names) == 1:
            return self._parameter(names[0])
        num_rows = [self._shapes[name][0] for name in names]
        shape = (sum(num_rows), *self._shapes[names[0]][1:])
        joined = torch.empty(shape, dtype=self._dtype, device=self._device)
        for part, name in zip(torch.split(joined, num_rows), names, strict=True):
            part.copy_(self._parameter(name))
        return joined

    def _parameter(self, name: str) -> Tensor:
        found = parameter_on(self._checkpoint, name, self._dtype, self._device)
        order = row_order(self._config, name)
        return found if order is None else found[torch.from_numpy(order).to(self._device)]


class Rotation(NamedTuple):
    """How the pairs of a head turn.

    Operators turn pairs that are half a head apart, and a family that turns a part of each head has its pairs
    nearer together. Scores do not change when queries and keys have their numbers in another order, so they
    get one in which this holds: pairs that do not turn lie behind those that do, with a frequency of 0.
    """

    frequencies_H: Tensor
    factors_H: Tensor
    order_H: Tensor | None
    """From the family's order of a head's numbers to this; None where it is the same."""

    @classmethod
    def of(cls, rope: RopeConfig, head_dim: int, device: torch.device) -> Rotation:
        frequencies_P = torch.from_numpy(inverse_frequencies(rope, head_dim))
        turned, still = len(frequencies_P), head_dim // 2 - len(frequencies_P)
        own_H = head_order(rope, head_dim)
        places_H = torch.arange(head_dim) if own_H is None else torch.from_numpy(own_H)
        first, second, rest = places_H.split((turned, turned, 2 * still))
        order_H = torch.cat((first, rest[:still], second, rest[still:]))
        frequencies_H = functional.pad(frequencies_P, (0, still)).to(device)
        factors_P = torch.full_like(frequencies_P, rope.attention_factor)
        factors_H = functional.pad(factors_P, (0, still), value=1.0).to(device)
        moves = still or own_H is not None
        return cls(frequencies_H, factors_H, order_H.to(device) if moves else None)

    def ordered(self, heads: Tensor) -> Tensor:
        """Return heads, one below the other, in this order."""
        if self.order_H is None:
            return heads
        return heads.view(-1, len(self.order_H), *heads.shape[1:])[:, self.order_H].view_as(heads)

    def ordered_norm(self, norm: Norm) -> Norm:
        """Return a norm of queries or keys for this order."""
        return replace(norm, scale_D=self.ordered(norm.scale_D.flatten()).view_as(norm.scale_D))


def layer_products(weights: TorchWeights) -> MatrixProducts:
    """Return all four matrices of the first layer, to be timed."""
    layer = weights.layers[0]
    feed_forward = layer.feed_forward
    if isinstance(feed_forward, SparseFeedForward):
        feed_forward = feed_forward.experts[0]
    matrices = layer.qkv_XD, layer.o_DX, feed_forward.gate_up_FD, feed_forward.down_DF
    return MatrixProducts([matrix for matrix in matrices if isinstance(matrix, Tensor)])


class MatrixProducts:
    """Some matrices, times rows; see `RowProducts`."""

    def __init__(self, matrices: Sequence[torch.Tensor]) -> None:
        self._matrices = matrices
        self._device = device_of(matrices[0].device)
        self.flops_per_row = 2.0 * sum(matrix.numel() for matrix in self._matrices)
        self.num_bytes = sum(matrix.nbytes for matrix in self._matrices)

    @torch.inference_mode()
    def run(self, num_rows: int) -> float:
        """Multiply, and return the seconds that it took."""
        inputs = [matrix.new_empty(num_rows, matrix.shape[1]).normal_() for matrix in self._matrices]
        wait_for(self._device)
        start = perf_counter()
        for x, matrix in zip(inputs, self._matrices, strict=True):
            functional.linear(x, matrix)
        wait_for(self._device)
        return perf_counter() - start

    def close(self) -> None:
        """Let go of nothing: the weights are the model's."""
