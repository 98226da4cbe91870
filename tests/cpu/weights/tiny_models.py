"""Tiny random Hugging Face models of each family, and how llama.cpp's converter would write them as GGUF."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from onbeat.engine.model_config.families import FAMILIES as ARCHITECTURES
from onbeat.engine.model_config.hf import model_config_from_hf
from onbeat.engine.native.library import NativeLibrary
from onbeat.engine.torch.weights import load_weights
from onbeat.engine.weights.checkpoint import Checkpoint
from onbeat.engine.weights.parameters import find_rows, parameter_shapes
from tests.cpu.engine.engines import NativeEngine, RoundedTorchEngine
from tests.cpu.engine.forwards import MakeForward, on_native, on_torch
from tests.cpu.engine.step_driver import StepDriver
from tests.cpu.engine.test_golden_tiny import assert_equals_reference
from tests.cpu.engine.tiny_models import random_prompt

COMMON: dict[str, Any] = dict(  # noqa: C408 -- as at the call
    vocab_size=96,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**COMMON, tie_word_embeddings=False),
    "llama-bias": lambda: transformers.LlamaConfig(**COMMON, attention_bias=True, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=None),
    "ministral3": lambda: transformers.Ministral3Config(
        **COMMON,
        head_dim=32,
        rope_parameters={
            **YARN | {"rope_theta": 10000.0, "truncate": True, "llama_4_scaling_beta": 0.25},
            **dict.fromkeys(("mscale", "mscale_all_dim"), 1.0),
        },
    ),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=32),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **COMMON, head_dim=32, sliding_window=16, query_pre_attn_scalar=32
    ),
    "phi3": lambda: transformers.Phi3Config(
        **COMMON,
        **NO_TOKENS,
        sliding_window=100,
        original_max_position_embeddings=256,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0 + index for index in range(6)],
            "long_factor": [2.0 + index for index in range(6)],
        },
    ),
    "olmo2": lambda: transformers.Olmo2Config(**COMMON, **NO_TOKENS),
    "smollm3": lambda: transformers.SmolLM3Config(
        **COMMON | {"num_hidden_layers": 4}, **NO_TOKENS, no_rope_layer_interval=4
    ),
    "granite": lambda: transformers.GraniteConfig(
        **COMMON,
        embedding_multiplier=3.0,
        attention_multiplier=0.25,
        residual_multiplier=0.5,
        logits_scaling=5.0,
    ),
    "mixtral": lambda: transformers.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **COMMON | {"head_dim": 32},
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        rope_parameters={"rope_theta": 10000.0, **YARN},
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **COMMON | {"head_dim": 32},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        norm_topk_prob=True,
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **COMMON, head_dim=32, sliding_window=16, query_pre_attn_scalar=32, attn_logit_softcapping=20.0
    ),
    "command-r": lambda: transformers.CohereConfig(**COMMON, **NO_TOKENS, logit_scale=0.5),
    "cohere2": lambda: transformers.Cohere2Config(**COMMON, **NO_TOKENS, sliding_window=16),
    "starcoder2": lambda: transformers.Starcoder2Config(**COMMON, **NO_TOKENS),
    "ernie4_5": lambda: transformers.Ernie4_5Config(**COMMON, head_dim=32),
    "olmo3": lambda: transformers.Olmo3Config(**COMMON, **NO_TOKENS, sliding_window=16),
    "glm4": lambda: transformers.Glm4Config(**COMMON | NO_TOKENS, head_dim=32),
    "seed-oss": lambda: transformers.SeedOssConfig(**COMMON, head_dim=32),
}
GGUF_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "ministral3": "mistral3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
    "granite": "granite",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "gemma2": "gemma2",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "starcoder2": "starcoder2",
    "ernie4_5": "ernie4_5",
    "seed_oss": "seed_oss",
    "olmo3": "olmo2",
    "glm4": "glm4",
}
PERMUTED = ("llama", "mistral3", "smollm3", "granite")
"""Architectures whose queries and keys the converter puts in another order."""

_RENAMED = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate.": "ffn_gate_inp.",
    "mlp.router.": "ffn_gate_inp.",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_GEMMAS = ("gemma2", "gemma3_text")
_AROUND = (*_GEMMAS, "olmo2", "olmo3", "seed_oss")
"""Models that have norms after attention and feed-forward."""


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
    """Return a model's parameters by onbeat's names, a tied head left out."""
    config = model_config_from_hf(model.config.to_dict())
    family = ARCHITECTURES[config.architecture]
    found = {
        name: part
        for whole, parameter in model.named_parameters()
        for name, part in family.own_tensors(whole, parameter.detach())
    }
    rows = find_rows(
        {name: tuple(tensor.shape) for name, tensor in found.items()}, parameter_shapes(config), config
    )
    return {
        name: found[tensor] if tensor == name else found[tensor].flatten(0, -2)[first:end]
        for name, (tensor, first, end) in rows.items()
    }


def write_gguf(path: Path, model: Any, types: dict[str, gguf.GGMLQuantizationType] | None = None) -> None:
    """Write a model as GGUF; `types` maps GGUF tensor names to types other than F32."""
    config = model.config
    architecture = GGUF_ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    write_metadata(writer, config)
    for short, values in gguf_tensors(model):
        kind = (types or {}).get(short, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(short, gguf.quants.quantize(values, kind), raw_dtype=kind)
    finish(writer)


def gguf_tensors(model: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a model's tensors as llama.cpp's converter writes them: all experts of a layer in one."""
    config = model.config
    for name, tensor in model.named_parameters():
        values = tensor.detach().numpy()
        prefix = name.split(".mlp.")[0].replace("model.layers.", "blk.")
        if config.model_type == "gpt_oss" and ".experts." in name:
            module, is_bias = name.rpartition(".experts.")[2].partition("_proj")[0], "bias" in name
            values = values if is_bias else values.swapaxes(1, 2)
            kind = "bias" if is_bias else "weight"
            parts = {"down": values} if module == "down" else {"gate": values[:, ::2], "up": values[:, 1::2]}
            for part, rows in parts.items():
                yield f"{prefix}.ffn_{part}_exps.{kind}", np.ascontiguousarray(rows)
        elif name.endswith("experts.gate_up_proj"):
            gate, up = np.split(values, 2, axis=1)
            yield f"{prefix}.ffn_gate_exps.weight", gate
            yield f"{prefix}.ffn_up_exps.weight", up
        elif name.endswith("experts.down_proj"):
            yield f"{prefix}.ffn_down_exps.weight", values
        else:
            yield to_gguf(name, values, config)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            yield f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], dtype=np.float32)


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
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", None) or config.norm_epsilon)
    writer.add_token_list([f"token {i} é" for i in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_array("general.languages", ["en"])
    write_positions(writer, config)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type in ("cohere", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type in ("mixtral", "qwen3_moe", "gpt_oss"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def write_positions(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write windows and rotary embeddings."""
    if config.model_type in (*_GEMMAS, "phi3", "cohere2", "olmo3", "gpt_oss"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "phi3":
        rope = config.rope_parameters
        writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * head_dim(config)))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(rope.get("attention_factor") or 1.0)
    if config.model_type != "gemma3_text":
        rope = config.rope_parameters
        writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if config.model_type == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
        writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])
    if config.model_type in ("gpt_oss", "ministral3"):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(YARN["factor"])
        writer.add_rope_scaling_orig_ctx_len(YARN["original_max_position_embeddings"])
    if config.model_type == "glm4":
        writer.add_rope_dimension_count(head_dim(config) // 2)


def head_dim(config: Any) -> int:
    """Return the width of a head; Qwen2's configuration does not name it."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def to_gguf(name: str, values: np.ndarray, config: Any) -> tuple[str, np.ndarray]:
    """Return a parameter's GGUF name, and its values as llama.cpp's converter writes them."""
    is_gemma = config.model_type in _GEMMAS
    short = name
    if config.model_type in _AROUND:
        short = short.replace("post_attention_layernorm", "post_attention_norm")
        short = short.replace("pre_feedforward_layernorm", "ffn_norm")
        short = short.replace("post_feedforward_layernorm", "post_ffw_norm")
    if config.model_type == "gpt_oss":
        short = short.replace("post_attention_layernorm", "post_attention_norm")
    short = short.replace("post_attention_layernorm", "ffn_norm")
    short = short.replace("post_self_attn_layernorm", "post_attention_norm")
    short = short.replace("post_mlp_layernorm", "post_ffw_norm")
    for long_name, short_name in _RENAMED.items():
        short = short.replace(long_name, short_name)
    if is_gemma and "norm" in name:
        values = values + np.float32(1)
    if GGUF_ARCHITECTURES[config.model_type] in PERMUTED:
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


def check_tokens(checkpoint: Checkpoint, name: str, library: NativeLibrary | None) -> None:
    """Check a file's tokens and logits, on torch or with the library of the native engine."""
    engine: Any = RoundedTorchEngine()
    make: MakeForward
    if library is not None:
        engine, make = NativeEngine(library), on_native(library, checkpoint)
    else:
        make = on_torch(load_weights(checkpoint, dtype=torch.float64, device=torch.device("cpu")))
    driver = StepDriver(make, block_size=16)
    for length in (1, 17, 100):
        driver.add(random_prompt(length), 10)
    driver.run(40)
    assert_equals_reference(driver, engine, name)
