"""The list of a model's parameters: Hugging Face names and shapes. The one place that knows it."""

from __future__ import annotations

from onbeat.engine.model_config import ModelConfig

Shape = tuple[int, ...]


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return every parameter of a model in the order of the forward pass.

    A tied output head is no parameter of its own: it is `model.embed_tokens.weight`.
    """
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for index in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{index}.{name}"] = shape
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}
    shapes |= _attention_shapes(config)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    if config.family == "gemma3":
        # Gemma 3 has a norm before and after each half; the "post attention" one is then really after it.
        shapes["pre_feedforward_layernorm.weight"] = (hidden,)
        shapes["post_feedforward_layernorm.weight"] = (hidden,)
    shapes["mlp.gate_proj.weight"] = (intermediate, hidden)
    shapes["mlp.up_proj.weight"] = (intermediate, hidden)
    shapes["mlp.down_proj.weight"] = (hidden, intermediate)
    return shapes


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
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes
