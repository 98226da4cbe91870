"""The list of a model's parameters: Hugging Face names and shapes. The one place that knows it.

A file may keep several in one tensor: projections below one another, all experts of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ModelLoadError
from onbeat.engine.model_config.architecture import ModelConfig, NormPlaces

PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class StoredRows(NamedTuple):
    """Where a parameter is: rows of a tensor, counted through all its dimensions but the last."""

    tensor: str
    first: int
    end: int


def find_rows(
    found: Mapping[str, Shape], expected: Mapping[str, Shape], config: ModelConfig
) -> dict[str, StoredRows]:
    """Return where each parameter of a file is; tensors that the model does not have stand for themselves.

    Parameters
    ----------
    found : the file's tensors, under names like the parameters'.
    expected : the model's parameters.

    Raises
    ------
    ModelLoadError : a tensor is not as long as its parts are together.
    """
    rows = {}
    for tensor, shape in found.items():
        num_rows, first = _num_rows(shape), 0
        parts = [tensor] if tensor in expected else list(_parts(tensor, config))
        if any(part not in expected for part in parts):
            parts = []
        for part in parts:
            end = first + _num_rows(expected[part])
            rows[part] = StoredRows(tensor, first, end if len(parts) > 1 else num_rows)
            first = end
        if len(parts) > 1 and (first != num_rows or shape[-1] != expected[parts[0]][-1]):
            raise ModelLoadError(
                f"tensor {tensor} has shape {list(shape)}; the configuration asks for "
                f"{[first, expected[parts[0]][-1]]}"
            )
        if not parts:
            rows[tensor] = StoredRows(tensor, 0, num_rows)
    return rows


def shapes_of(rows: Mapping[str, StoredRows], found: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of what `find_rows` found."""
    shapes = {}
    for name, (tensor, first, end) in rows.items():
        is_whole = end - first == _num_rows(found[tensor])
        shapes[name] = found[tensor] if is_whole else (end - first, found[tensor][-1])
        if name.endswith(".bias"):  # an expert's is a row of all experts'
            shapes[name] = shapes[name][-1:]
    return shapes


def _parts(tensor: str, config: ModelConfig) -> Iterator[str]:
    """Yield the parameters that a tensor of several would hold, in their order."""
    kind = "bias" if tensor.endswith(".bias") else "weight"
    stem = tensor.removesuffix(f".{kind}")
    prefix, _, module = stem.rpartition(".")
    parts = PARTS.get(module, (module,))
    has_all_experts = prefix.endswith(".experts")
    prefixes = [prefix]
    if has_all_experts:
        num_experts = 0 if config.experts is None else config.experts.num_experts
        prefixes = [f"{prefix}.{index}" for index in range(num_experts)]
    for each in prefixes:
        for part in parts:
            yield f"{each}.{part}.{kind}"


def _num_rows(shape: Shape) -> int:
    return math.prod(shape[:-1])


NormT = TypeVar("NormT")


class LayerNorms(NamedTuple, Generic[NormT]):
    """A layer's norms, or their names; None where there is none."""

    attention: NormT | None = None
    after_attention: NormT | None = None
    mlp: NormT | None = None
    after_mlp: NormT | None = None


LAYER_NORMS: Mapping[NormPlaces, LayerNorms[str]] = {
    "before": LayerNorms(attention="input_layernorm", mlp="post_attention_layernorm"),
    "after": LayerNorms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"),
    "around": LayerNorms(
        attention="input_layernorm",
        after_attention="post_attention_layernorm",
        mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    "parallel": LayerNorms(attention="input_layernorm", mlp="input_layernorm"),
}


BESIDE_NORMS = tuple(
    f"{name}_feedforward_layernorm_{n}" for name, n in (("post", 1), ("pre", 2), ("post", 2))
)
"""Behind the feed-forward, and before and behind the experts that a layer has beside it."""
Shape = tuple[int, ...]


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return every parameter of a model in the order of the forward pass.

    A tied output head is no parameter of its own: it is `model.embed_tokens.weight`.
    """
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    if size := config.layer_input_size:
        numbers = size * config.num_layers
        shapes["model.embed_tokens_per_layer.weight"] = (config.vocab_size, numbers)
        shapes["model.per_layer_model_projection.weight"] = (numbers, config.hidden_size)
        shapes["model.per_layer_projection_norm.weight"] = (size,)
    for index in range(config.num_layers):
        for name, shape in _layer_shapes(config, index).items():
            shapes[f"model.layers.{index}.{name}"] = shape
    shapes |= _norm_shapes("model.norm", config)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    if config.head_bias:
        shapes["lm_head.bias"] = (config.vocab_size,)
    return shapes


def _norm_shapes(name: str, config: ModelConfig) -> dict[str, Shape]:
    kinds = ("weight", "bias") if config.norm_bias else ("weight",)
    return {f"{name}.{kind}": (config.hidden_size,) for kind in kinds}


def _layer_shapes(config: ModelConfig, index: int) -> dict[str, Shape]:
    shapes = _linear_shapes(config) if config.is_linear(index) else _attention_shapes(config, index)
    for name in LAYER_NORMS[config.norms]:
        shapes |= {} if name is None else _norm_shapes(name, config)
    if size := config.layer_input_size:
        shapes["per_layer_input_gate.weight"] = (size, config.hidden_size)
        shapes["per_layer_projection.weight"] = (config.hidden_size, size)
        shapes |= _norm_shapes("post_per_layer_input_norm", config)
    if config.scales_layers:
        shapes["layer_scalar"] = (1,)
    experts = config.experts
    dense = _mlp_shapes("mlp", config.hidden_size, config.mlp_size(index), config)
    if experts is None or not config.has_experts(index):
        return shapes | dense
    if experts.is_beside:
        shapes |= dense
        shapes |= {f"{name}.weight": (config.hidden_size,) for name in BESIDE_NORMS}
        shapes["router.scale"] = (config.hidden_size,)
        shapes["router.per_expert_scale"] = (experts.num_experts,)
    shapes["mlp.gate.weight"] = (experts.num_experts, config.hidden_size)
    if experts.has_bias:
        shapes["mlp.gate.bias"] = (experts.num_experts,)
    if experts.shared_size:
        shapes["mlp.shared_expert_gate.weight"] = (1, config.hidden_size)
        shapes |= _mlp_shapes("mlp.shared_expert", config.hidden_size, experts.shared_size)
    for expert in range(experts.num_experts):
        own = _mlp_shapes(f"mlp.experts.{expert}", config.hidden_size, experts.intermediate_size)
        shapes |= own
        if experts.has_bias:
            shapes |= {f"{name.removesuffix('weight')}bias": shape[:1] for name, shape in own.items()}
    return shapes


def input_projections(config: ModelConfig) -> tuple[str, ...]:
    """Return what projects to the queries, keys, values, gates, betas and decays of linear attention."""
    assert config.linear is not None, "the model has linear attention"
    return tuple(f"in_proj_{part}" for part in config.linear.inputs)


def projections(config: ModelConfig, index: int) -> tuple[list[str], str]:
    """Return what projects a layer's tokens before it mixes them, and what does so after."""
    prefix = f"model.layers.{index}"
    if config.is_linear(index):
        names = [f"{prefix}.linear_attn.{name}" for name in input_projections(config)]
        return names, f"{prefix}.linear_attn.out_proj"
    parts = "qkk" if config.full_values_are_keys and not config.is_sliding(index) else "qkv"
    if config.kv_layer(index) != index:
        parts = "q"
    return [f"{prefix}.self_attn.{part}_proj" for part in parts], f"{prefix}.self_attn.o_proj"


def row_order(config: ModelConfig, name: str) -> NDArray[np.int64] | None:
    """Return which row of a parameter comes first, second, and so on, where its file has another order.

    Gates of attention come before all queries, and what linear attention projects is in the order of
    `input_projections`, where a file has the parts of each head together.
    """
    module, linear = name.rpartition(".")[0].rpartition(".")[2], config.linear
    widths: tuple[int, ...]
    wanted: tuple[int, ...]
    if module == "q_proj" and config.gates_attention:
        num_heads, widths, wanted = config.num_heads, (config.head_dim,) * 2, (1, 0)
    elif module in ("in_proj_qkvz", "in_proj_ba") and linear is not None:
        num_heads, shared = linear.num_key_heads, linear.num_value_heads // linear.num_key_heads
        values = (shared * linear.value_dim,) * 2
        widths = (linear.key_dim, linear.key_dim, *values) if module == "in_proj_qkvz" else (shared,) * 2
        wanted = tuple(range(len(widths)))
    else:
        return None
    rows = np.arange(num_heads * sum(widths), dtype=np.int64).reshape(num_heads, -1)
    parts = np.split(rows, np.cumsum(widths)[:-1], axis=1)
    return np.concatenate([parts[index].reshape(-1) for index in wanted])


def _linear_shapes(config: ModelConfig) -> dict[str, Shape]:
    linear = config.linear
    assert linear is not None, "the layer has linear attention"
    gates, heads = linear.value_size, linear.num_value_heads
    sizes = {"qkvz": linear.conv_size + gates, "qkv": linear.conv_size, "z": gates, "ba": 2 * heads}
    shapes: dict[str, Shape] = {
        f"linear_attn.{name}.weight": (sizes.get(name.removeprefix("in_proj_"), heads), config.hidden_size)
        for name in input_projections(config)
    }
    return shapes | {
        "linear_attn.conv1d.weight": (linear.conv_size, 1, linear.conv_width),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.A_log": (heads,),
        "linear_attn.norm.weight": (linear.value_dim,),
        "linear_attn.out_proj.weight": (config.hidden_size, linear.value_size),
    }


def inner_parts(config: ModelConfig) -> tuple[str, ...]:
    """Return the projections to the inside of a feed-forward."""
    return ("gate", "up") if config.is_gated else ("up",)


def _mlp_shapes(
    prefix: str, hidden: int, intermediate: int, dense: ModelConfig | None = None
) -> dict[str, Shape]:
    """Return the shapes of a feed-forward; `dense`: the model, where it is that of a layer and no expert."""
    inner = ("gate", "up") if dense is None else inner_parts(dense)
    shapes: dict[str, Shape] = {f"{prefix}.{part}_proj.weight": (intermediate, hidden) for part in inner}
    shapes[f"{prefix}.down_proj.weight"] = (hidden, intermediate)
    if dense is not None and dense.mlp_bias:
        shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()}
    return shapes


def _attention_shapes(config: ModelConfig, index: int) -> dict[str, Shape]:
    count, width = config.kv_heads(index)
    query_size, kv_size = config.num_heads * width, count * width
    shapes: dict[str, Shape] = {}
    sizes = {"q_proj": query_size + config.gate_width, "k_proj": kv_size, "v_proj": kv_size}
    for name in projections(config, index)[0]:
        part = name.rpartition(".")[2]
        shapes[f"self_attn.{part}.weight"] = (sizes[part], config.hidden_size)
        if config.attention_bias:
            shapes[f"self_attn.{part}.bias"] = (sizes[part],)
    shapes["self_attn.o_proj.weight"] = (config.hidden_size, query_size)
    if config.attention_output_bias:
        shapes["self_attn.o_proj.bias"] = (config.hidden_size,)
    if config.has_sinks:
        shapes["self_attn.sinks"] = (config.num_heads,)
    if config.qk_norm:
        for part, heads in (("q", config.num_heads), ("k", count)):
            shapes[f"self_attn.{part}_norm.weight"] = {
                "head": (width,),
                "all": (heads * width,),
                "own": (heads, width),
            }[config.qk_norm]
    if config.kv_layer(index) != index:
        shapes.pop("self_attn.k_norm.weight", None)
    return shapes
