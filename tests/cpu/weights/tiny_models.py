"""Tiny random Hugging Face models of each family, and how llama.cpp's converter would write them as GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

COMMON: dict[str, Any] = dict(  # noqa: C408 -- as at the call
    vocab_size=96,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
FAMILIES: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**COMMON, tie_word_embeddings=False),
    "llama-bias": lambda: transformers.LlamaConfig(**COMMON, attention_bias=True, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=32),
    "gemma3": lambda: transformers.Gemma3TextConfig(**COMMON, head_dim=32, sliding_window=16),
}
GGUF_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}

_RENAMED = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_model(family: str) -> Any:
    """Return a model with every parameter random (transformers makes biases zero and norms one)."""
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(FAMILIES[family]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return model


def parameters(model: Any) -> dict[str, torch.Tensor]:
    """Return a model's parameters by name, a tied head left out."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def write_gguf(path: Path, model: Any, types: dict[str, gguf.GGMLQuantizationType] | None = None) -> None:
    """Write a model as GGUF; `types` maps GGUF tensor names to types other than F32."""
    config = model.config
    architecture = GGUF_ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    write_metadata(writer, config)
    for name, tensor in parameters(model).items():
        short, values = to_gguf(name, tensor.numpy(), config)
        kind = (types or {}).get(short, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(short, gguf.quants.quantize(values, kind), raw_dtype=kind)
    finish(writer)


def write_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write what the reader asks for, and a vocabulary for it to step over."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_token_list([f"token {i} é" for i in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_array("general.languages", ["en"])
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)


def head_dim(config: Any) -> int:
    """Return the width of a head; Qwen2's configuration does not name it."""
    return int(getattr(config, "head_dim", config.hidden_size // config.num_attention_heads))


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def to_gguf(name: str, values: np.ndarray, config: Any) -> tuple[str, np.ndarray]:
    """Return a parameter's GGUF name, and its values as llama.cpp's converter writes them."""
    is_gemma = config.model_type == "gemma3_text"
    short = name
    if is_gemma:
        short = short.replace("post_attention_layernorm", "post_attention_norm")
        short = short.replace("pre_feedforward_layernorm", "ffn_norm")
        short = short.replace("post_feedforward_layernorm", "post_ffw_norm")
    short = short.replace("post_attention_layernorm", "ffn_norm")
    for long_name, short_name in _RENAMED.items():
        short = short.replace(long_name, short_name)
    if is_gemma and "norm" in name:
        values = values + np.float32(1)
    if GGUF_ARCHITECTURES[config.model_type] == "llama":
        for part, num_heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", config.num_key_value_heads),
        ):
            if part in name:
                values = interleave(values, num_heads)
    return short, values


def interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Put row i of a head's second half after row i of its first half."""
    rows: list[np.ndarray] = []
    for head in np.split(values, num_heads):
        first, second = np.split(head, 2)
        for pair in zip(first, second, strict=True):
            rows += pair
    return np.stack(rows)
