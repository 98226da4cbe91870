"""The list of a model's parameters: Hugging Face names and shapes. The one place that knows it."""

from __future__ import annotations

from onbeat.engine.model_config import ModelConfig
from onbeat.engine.weights.layer_norms import LAYER_NORMS

Shape = tuple[int, ...]


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return every parameter of a model in the order of the forward pass.

    A tied output head is no parameter of its own: it is `model.embed_tokens.weight`.
    """
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for index in range(config.num_layers):
        for name, shape in _layer_shapes(config, index).items():
            shapes[f"model.layers.{index}.{name}"] = shape
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig, index: int) -> dict[str, Shape]:
    norms = {name: (config.hidden_size,) for name in LAYER_NORMS[config.norms] if name is not None}
    shapes: dict[str, Shape] = _attention_shapes(config)
    shapes |= {f"{name}.weight": shape for name, shape in norms.items()}
    experts = config.experts
    if experts is None or not config.has_experts(index):
        return shapes | _mlp_shapes("mlp", config.hidden_size, config.intermediate_size)
    shapes["mlp.gate.weight"] = (experts.num_experts, config.hidden_size)
    for expert in range(experts.num_experts):
        shapes |= _mlp_shapes(f"mlp.experts.{expert}", config.hidden_size, experts.intermediate_size)
    return shapes


def _mlp_shapes(prefix: str, hidden: int, intermediate: int) -> dict[str, Shape]:
    return {
        f"{prefix}.gate_proj.weight": (intermediate, hidden),
        f"{prefix}.up_proj.weight": (intermediate, hidden),
        f"{prefix}.down_proj.weight": (hidden, intermediate),
    }


def _attention_shapes(config: ModelConfig) -> dict[str, Shape]:
    query_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {}
    for name, size in (("q_proj", query_size), ("k_proj", kv_size), ("v_proj", kv_size)):
        shapes[f"self_attn.{name}.weight"] = (size, config.hidden_size)
        if config.attention_bias:
            shapes[f"self_attn.{name}.bias"] = (size,)
    shapes["self_attn.o_proj.weight"] = (config.hidden_size, query_size)
    if config.attention_output_bias:
        shapes["self_attn.o_proj.bias"] = (config.hidden_size,)
    if config.qk_norm:
        spans_all = config.qk_norm == "all"
        shapes["self_attn.q_norm.weight"] = (query_size if spans_all else config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (kv_size if spans_all else config.head_dim,)
    return shapes
