"""What a model is made of, whatever file it came from."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from onbeat.core.errors import ModelLoadError, NeedsVllm
from onbeat.core.kv_windows import KVGroups

Activation = Literal["silu", "gelu_pytorch_tanh", "clamped_swiglu"]
RopeKind = Literal["none", "default", "linear", "llama3", "yarn", "factors"]
NormPlaces = Literal["before", "after", "around", "parallel"]
"""Where a layer's norms are: before attention and feed-forward (Llama), after them (OLMo 2), both (Gemma), or
one before both, which then read the same (Command-R)."""
QKNorm = Literal["head", "all", "own"]
"""What a norm of queries and keys spans: each head by itself (Qwen 3), all heads together (OLMo 2), or each
head by itself with a scale of its own (Command-R+)."""
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "rotary positions of three parts": ("qwen2vl", "qwen25omni", "qwen3omni"),
    "experts of a layer turned round in one tensor": ("qwen3vlmoe",),
    "KV shared by layers and streams that are predicted": ("gemma3n",),
    "latent attention (MLA)": ("deepseekv2", "deepseekv3", "deepseek2"),
    "chunked attention": ("llama4",),
    "Mamba layers": ("jamba", "mamba", "bamba", "zamba", "falconh1", "falconmamba", "nemotronh"),
    "layers with a short convolution alone": ("lfm2",),
    "attention in both directions": ("bert", "modernbert", "roberta", "xlmroberta", "gemma3text", "gemmaemb"),
}
"""Needs of the most used models, and how the names of these begin: lower case, letters and digits alone."""


class KVHeads(NamedTuple):
    """Key/value heads of a layer; its query heads are as wide."""

    num: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer.

    The unscaled frequencies are `theta ** (-2i / rotary_dim)`; `kind` says how they are scaled. With the kind
    `none` nothing turns: all frequencies are 0.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    """linear, llama3, yarn: frequencies (but for linear: the low ones) are divided by this."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths over `original_max_position_embeddings / low_freq_factor` are scaled in full."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths under `original_max_position_embeddings / high_freq_factor` are not scaled."""
    original_max_position_embeddings: int = 8192
    """llama3, yarn: the context length of pre-training."""
    ramp: tuple[float, float] = (0.0, 0.0)
    """yarn: up to the first of these pairs frequencies stay, from the second on they are divided in full."""
    frequency_factors: tuple[float, ...] | None = None
    """factors: one divisor for each of the rotary_dim / 2 frequencies (LongRoPE; llama3 in GGUF files);
    infinite where a pair does not turn (Gemma 4)."""
    is_long: bool = False
    """factors: whether they are LongRoPE's for contexts longer than that of pre-training."""
    rotary_dim: int | None = None
    """Dimensions of a head that turn, its first ones; None: all."""
    interleaves: bool = False
    """Whether neighbours turn together, else numbers that are half of `rotary_dim` apart."""
    attention_factor: float = 1.0
    """Factor on what has turned, of queries and keys alike (LongRoPE, YaRN)."""


NO_ROPE = RopeConfig(theta=1.0, kind="none")
"""Of layers that know no positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A feed-forward of which each token passes a few parts.

    A router's softmax over all experts gives their weights; the largest `num_per_token` count.

    Raises
    ------
    ModelLoadError : more experts a token than there are.
    """

    num_experts: int
    num_per_token: int
    intermediate_size: int
    """Of one expert."""
    normalizes: bool = True
    """Whether the weights that count are divided by their sum."""
    chooses_first: bool = False
    """Whether the softmax is of the chosen ones alone, in the model's type: `normalizes`, rounded in
    another order."""
    has_bias: bool = False
    """Whether the router and all projections have biases (gpt-oss)."""
    mixer_jitter: float | None = None
    """With sparsemixer (Phi-3.5-MoE) each weight is instead a softmax over the experts whose score is at most
    this part, twice, below it, without those chosen before."""
    layers: tuple[bool, ...] = ()
    """For each layer whether it has experts; empty means that all have."""
    shared_size: int = 0
    """Width of an expert that every token passes, times a sigmoid of its own (Qwen 3.5); 0: none."""
    is_beside: bool = False
    """Whether a layer has its feed-forward as well, and both have norms of their own; the router's norm is a
    third one, and each expert's weight has a factor (Gemma 4)."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_per_token <= self.num_experts:
            raise ModelLoadError(f"each token takes {self.num_per_token} experts of {self.num_experts}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Layers that keep one state of each request, however long it is, in place of keys and values.

    A short causal convolution over queries, keys and values, then the gated delta rule (Yang et al., "Gated
    Delta Networks", 2024).

    Raises
    ------
    ModelLoadError : value heads that key heads do not divide.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    """Tokens that the convolution sees, the last one included."""
    layers: tuple[bool, ...]
    """For each layer whether it is one of these."""
    inputs: tuple[str, ...] = ("qkv", "z", "b", "a")
    """What a file's projections to its inputs are called. `qkvz` and `ba` have all of a key head together."""
    alternates: bool = False
    """Whether the first value head of each key head comes first, then the second of each, and so on."""

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ModelLoadError(
                f"{self.num_value_heads} value heads of linear attention cannot share {self.num_key_heads} "
                "key heads evenly"
            )

    @property
    def key_size(self) -> int:
        """Numbers of a token's keys, or of its queries."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Numbers of a token's values, of their gates, or of what comes out."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Numbers of a token that pass the convolution: queries, keys, values."""
        return 2 * self.key_size + self.value_size

    @property
    def state_numbers(self) -> int:
        """Numbers of one layer's state of one request: a matrix of each value head, the last inputs."""
        return self.num_value_heads * self.key_dim * self.value_dim + self.conv_size * (self.conv_width - 1)

    @property
    def draft_numbers(self) -> int:
        """Numbers beside it of a draft: what it puts in, with two gates of each value head."""
        return self.conv_size + 2 * self.num_value_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """An architecture-neutral description of a decoder-only model.

    Raises
    ------
    ModelLoadError : sizes that do not fit together.
    """

    family: str
    architecture: str
    """The Hugging Face class name, such as `LlamaForCausalLM`."""
    vocab_size: int
    """Rows of the embedding; may be more than the tokenizer's."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    """The longest context the model was made for, tokens."""
    rms_norm_eps: float
    rope: RopeConfig
    """For every layer, or for the full-attention layers where `local_rope` is set."""
    local_rope: RopeConfig | None = None
    """For sliding layers, where they differ (Gemma 3)."""
    hidden_activation: Activation = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Whether q, k and v projections have a bias."""
    attention_output_bias: bool = False
    """Whether the output projection of attention has a bias."""
    mlp_bias: bool = False
    """Whether the projections of a feed-forward (of no expert) have one."""
    head_bias: bool = False
    """Whether the output head has one."""
    is_gated: bool = True
    """Whether a feed-forward is `down(activation(gate) * up)`, else `down(activation(up))`."""
    norms: NormPlaces = "before"
    qk_norm: QKNorm | None = None
    """Whether queries and keys pass an RMSNorm before the rotary embedding, and what it spans."""
    has_sinks: bool = False
    """Whether each head has a score that takes its share of attention, and adds nothing (gpt-oss)."""
    nope_layers: tuple[bool, ...] = ()
    """For each layer whether it has no rotary embedding; empty means that all have one."""
    experts: Experts | None = None
    """None: a token passes the whole feed-forward."""
    linear: LinearAttention | None = None
    """None: all layers attend to keys and values."""
    gates_attention: bool = False
    """Whether what attention mixes is multiplied by a sigmoid, projected beside the queries (Qwen 3.5)."""
    full_heads: KVHeads | None = None
    """Of layers without a window, where they differ from the others' (Gemma 4)."""
    full_values_are_keys: bool = False
    """Whether the values of these layers are their keys, before norm and rotary embedding."""
    norms_values: bool = False
    """Whether each head's values pass an RMSNorm without a scale."""
    num_kv_sharers: int = 0
    """The last layers, which read the keys and values of the last layer of their kind before them."""
    widens_sharers: bool = False
    """Whether their feed-forward is twice as wide (Gemma 4 E2B)."""
    layer_input_size: int = 0
    """Numbers that a token has for each layer beside the residual, which come of it alone and gate what is
    added behind the feed-forward (per-layer embeddings); 0: none."""
    scales_layers: bool = False
    """Whether the residual is multiplied by a number behind each layer."""
    sliding_window: int | None = None
    """A sliding layer's token sees itself and the `sliding_window - 1` tokens before it."""
    sliding_layers: tuple[bool, ...] = ()
    """For each layer whether it slides; empty means that none does."""
    query_pre_attn_scalar: float | None = None
    """Attention scores are scaled by its inverse square root; None stands for `head_dim`."""
    attention_multiplier: float | None = None
    """Attention scores are scaled by this, where it is set."""
    attention_softcap: float | None = None
    """A score x becomes `softcap * tanh(x / softcap)` where it is set."""
    logits_softcap: float | None = None
    """Likewise a logit."""
    query_growth: tuple[float, int] | None = None
    """(b, context): queries are multiplied by `1 + b ln(1 + position // context)` (Ministral 3)."""
    residual_scale: float = 1.0
    """Factor on what attention and feed-forward add to the residual stream."""
    logits_divisor: float = 1.0
    """Logits are divided by this."""
    embedding_scale: float = 1.0
    """Factor on embeddings at the input (not on a tied output head)."""
    norm_weight_offset: float = 0.0
    """RMSNorm multiplies by `weight + norm_weight_offset` (Gemma: 1)."""
    norms_center: bool = False
    """Whether norms, those of heads too, take the mean off first (LayerNorm)."""
    norm_bias: bool = False
    """Whether norms of the residual add a bias."""
    norm_rounds_once: bool = False
    """Whether RMSNorm multiplies before it rounds to the model's type (Gemma, OLMo 2), else after (Llama)."""
    dtype: str | None = None
    """The checkpoint's own type, such as `bfloat16`; None where it does not say or has several."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    has_head: bool = True
    """Whether the checkpoint is of a model that generates; if not, the embedding stands in for the head."""
    pooling: str | None = None
    """How the checkpoint says that embeddings are pooled (`last`, `mean`, or what is not supported); None
    where it says nothing."""

    def __post_init__(self) -> None:
        for count, width in (self.heads, self.full_heads or self.heads):
            if self.num_heads % count:
                raise ModelLoadError(
                    f"the model has {self.num_heads} attention heads, which is no multiple of its "
                    f"{count} key/value heads"
                )
            if width % 2:
                raise ModelLoadError(f"head_dim is {width}; rotary embedding needs an even one")
        expert_layers = () if self.experts is None else self.experts.layers
        linear_layers = () if self.linear is None else self.linear.layers
        for pattern in (self.sliding_layers, self.nope_layers, expert_layers, linear_layers):
            if pattern and len(pattern) != self.num_layers:
                raise ModelLoadError(
                    f"the layer pattern names {len(pattern)} layers, the model has {self.num_layers}"
                )
        if self.num_kv_layers < 1:
            raise ModelLoadError(
                f"none of the model's {self.num_layers} layers attends to keys and values; onbeat needs one"
            )
        if any(self.sliding_layers) and self.sliding_window is None:
            raise ModelLoadError("the layer pattern has sliding layers, but sliding_window is not set")
        for index in range(self.num_layers):
            if self.kv_layer(index) < 0:
                raise ModelLoadError(f"layer {index} shares the KV of one of its kind, but none is before it")

    @property
    def attention_scale(self) -> float:
        """Factor on the scores q.k."""
        return self.attention_multiplier or 1.0 / math.sqrt(self.query_pre_attn_scalar or self.head_dim)

    @property
    def unusual(self) -> tuple[str, ...]:
        """What its layers have that not every engine's kernels know, in words."""
        found = {
            "a norm that takes the mean off": self.norms_center,
            "soft-capped scores": self.attention_softcap is not None,
            "a feed-forward without gates": not self.is_gated,
            "attention sinks": self.has_sinks,
            "linear attention": self.linear is not None,
            "queries that grow with their position": self.query_growth is not None,
            "values that pass a norm": self.norms_values,
            "layers with two head sizes": self.full_heads is not None,
        }
        return tuple(need for need, is_there in found.items() if is_there)

    def has_experts(self, layer_index: int) -> bool:
        """Whether a layer's feed-forward is made of experts."""
        experts = self.experts
        return experts is not None and (not experts.layers or experts.layers[layer_index])

    @property
    def num_expert_layers(self) -> int:
        """Layers with experts."""
        return sum(map(self.has_experts, range(self.num_layers)))

    def is_linear(self, layer_index: int) -> bool:
        """Whether a layer keeps a state of each request in place of keys and values."""
        return self.linear is not None and self.linear.layers[layer_index]

    @property
    def heads(self) -> KVHeads:
        """Of layers with a window, and of the others unless `full_heads` says more."""
        return KVHeads(self.num_kv_heads, self.head_dim)

    def kv_heads(self, layer_index: int) -> KVHeads:
        """Return the key/value heads of a layer that attends."""
        return self.heads if self.full_heads is None or self.is_sliding(layer_index) else self.full_heads

    def kv_layer(self, layer_index: int) -> int:
        """Return the layer whose keys and values a layer reads; -1 where none before it is of its kind."""
        num_own = self.num_layers - self.num_kv_sharers
        if layer_index < num_own:
            return layer_index
        alike = [each for each in range(num_own) if self.is_sliding(each) == self.is_sliding(layer_index)]
        return max(alike, default=-1)

    @property
    def sharing_layers(self) -> range:
        """Layers that read others' keys and values; files may have some of their own all the same."""
        return range(self.num_layers - self.num_kv_sharers, self.num_layers)

    def mlp_size(self, layer_index: int) -> int:
        """Return the width of a layer's feed-forward, experts apart."""
        return self.intermediate_size * (1 + (self.widens_sharers and layer_index in self.sharing_layers))

    @property
    def kept_heads(self) -> list[KVHeads]:
        """Of each layer that keeps keys and values, in their order."""
        own = range(self.sharing_layers.start)
        return [self.kv_heads(index) for index in own if not self.is_linear(index)]

    @property
    def gate_width(self) -> int:
        """Numbers of a token that gate what attention mixes, before its queries; 0 where nothing does."""
        return self.num_heads * self.head_dim if self.gates_attention else 0

    @property
    def num_linear_layers(self) -> int:
        """Layers that keep a state."""
        return 0 if self.linear is None else sum(self.linear.layers)

    @property
    def num_kv_layers(self) -> int:
        """Layers that keep keys and values."""
        return self.num_layers - self.num_linear_layers - self.num_kv_sharers

    @property
    def state_numbers(self) -> int:
        """Numbers that all layers' states of one request have, float32; 0 without linear attention."""
        return 0 if self.linear is None else self.num_linear_layers * self.linear.state_numbers

    @property
    def draft_numbers(self) -> int:
        """Numbers that they have beside these for each draft of a step."""
        return 0 if self.linear is None else self.num_linear_layers * self.linear.draft_numbers

    @property
    def kv_groups(self) -> KVGroups:
        """How its layers share KV blocks where windows give KV back; one group of all where none can."""
        sizes = [2 * num * width for num, width in self.kept_heads]
        if self.linear is not None:
            return KVGroups(sum(sizes), 0, 0)
        sliding = sum(itertools.compress(sizes, self.sliding_layers))
        return KVGroups.of(sum(sizes) - sliding, sliding, 2 * math.prod(self.heads))

    def layers_of_block(self, num_tables: int) -> list[int]:
        """Return which of the layers that keep KV a block of the fullest of so many block tables holds."""
        kept = [index for index in range(self.sharing_layers.start) if not self.is_linear(index)]
        tables = [list[int]() for _ in range(num_tables)]
        for number, index in enumerate(kept):
            tables[self.place(index, num_tables)[0]].append(number)
        return max(tables, key=lambda table: sum(math.prod(self.kept_heads[number]) for number in table))

    def place(self, layer_index: int, num_tables: int = 1) -> tuple[int, int]:
        """Return which of so many block tables is a layer's, and its number among the layers of a block.

        Of a layer that reads another's keys and values it is that one's; with a state, among such.
        """
        kind, own = self.is_sliding if num_tables > 1 else self.is_linear, self.kv_layer(layer_index)
        number = sum(kind(index) == kind(own) for index in range(own))
        if num_tables == 1 or not kind(own):
            return 0, number
        # Where all have windows, the first of them are those of the first table.
        group, number = divmod(number, self.kv_groups.num_layers)
        return group + (not all(self.sliding_layers)), number

    def some_layers(self, first: int, end: int) -> ModelConfig:
        """Return a model of some of the layers alone, none of which reads one that is left out.

        They have no inputs of their own.
        """
        experts, linear, some = self.experts, self.linear, slice(first, end)
        return replace(
            self,
            num_layers=end - first,
            num_kv_sharers=max(0, end - (self.num_layers - self.num_kv_sharers)),
            layer_input_size=0,
            sliding_layers=self.sliding_layers[some],
            nope_layers=self.nope_layers[some],
            experts=None if experts is None else replace(experts, layers=experts.layers[some]),
            linear=None if linear is None else replace(linear, layers=linear.layers[some]),
        )

    def is_sliding(self, layer_index: int) -> bool:
        """Whether a layer attends to the sliding window only."""
        return bool(self.sliding_layers) and self.sliding_layers[layer_index]

    def layer_window(self, layer_index: int) -> int | None:
        """Return a layer's sliding window in tokens, or None where it attends to everything."""
        return self.sliding_window if self.is_sliding(layer_index) else None

    def layer_rope(self, layer_index: int) -> RopeConfig:
        """Return the rotary embedding of a layer."""
        if self.nope_layers and self.nope_layers[layer_index]:
            return NO_ROPE
        return self.local_rope if self.local_rope is not None and self.is_sliding(layer_index) else self.rope

    def layer_turn(self, layer_index: int) -> tuple[RopeConfig, int]:
        """Return the rotary embedding of a layer, and how wide the heads are that it turns."""
        return self.layer_rope(layer_index), self.kv_heads(layer_index).width


def unsupported_architecture(name: object, supported: Iterable[str], *, source: str) -> NeedsVllm:
    """Return the error for an architecture that onbeat does not run.

    Parameters
    ----------
    name, supported : as the source spells architectures.
    source : what names it.
    """
    plain = re.sub(r"[^a-z0-9]", "", str(name).lower())
    needs = [f": it needs {need}" for need, starts in _NEEDS.items() if plain.startswith(starts)]
    return NeedsVllm(
        f"{source}'s architecture {name!r} is not supported{''.join(needs)}; "
        f"supported: {', '.join(sorted(supported))} (github.com/onbeat/onbeat: docs/models.md#families)"
    )
