"""Read a Hugging Face config.json: spellings of transformers 4 and 5, defaults as transformers has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onbeat.core.errors import ModelLoadError
from onbeat.engine.model_config.config import ARCHITECTURES, ModelConfig, unsupported_architecture
from onbeat.engine.model_config.hf_rope import read_rope
from onbeat.engine.model_config.values import Values

_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
"""For a configuration that was saved without a model, and so names no architecture."""

_MUST_BE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "quantization_config": (),
    "compression_config": (),
    "clip_qkv": (),
    "logit_scale": (1.0,),
    "attention_multiplier": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "mlp_bias": (False,),
    "use_bidirectional_attention": (False,),
    "rope_interleaved": (False,),
    "is_causal": (True,),
    "num_experts": (0,),
    "num_local_experts": (0, 1),
}
"""Keys that change a model's output, with the values that leave it as onbeat computes it."""

_CONTEXT_DEFAULT = {
    "LlamaForCausalLM": 2048,
    "MistralForCausalLM": 131_072,
    "Qwen2ForCausalLM": 32_768,
    "Qwen3ForCausalLM": 32_768,
    "Gemma3ForCausalLM": 131_072,
}


def model_config_from_hf(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Read a Hugging Face config.json.

    Parameters
    ----------
    config : the parsed config.json.
    generation_config : the parsed generation_config.json, whose end-of-sequence tokens win where it has any.

    Raises
    ------
    ModelLoadError : an unsupported architecture or option, or a missing or wrong value.
    """
    values = Values(config, source="the model")
    architecture, has_head = _architecture(values)
    for key, neutral in _MUST_BE_NEUTRAL.items():
        values.refuse_unless(key, *neutral)
    is_gemma = architecture == "Gemma3ForCausalLM"
    hidden_size, num_heads = values.size("hidden_size"), values.size("num_attention_heads")
    default_head_dim = (
        256 if is_gemma else 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads
    )
    max_position_embeddings = values.size("max_position_embeddings", _CONTEXT_DEFAULT[architecture])
    rope, local_rope = read_rope(values, max_position_embeddings, per_layer_type=is_gemma)
    sliding_window, sliding_layers = _sliding(values, architecture)
    generation = Values(generation_config or {}, source="generation_config.json")
    return ModelConfig(
        family=ARCHITECTURES[architecture],
        architecture=architecture,
        vocab_size=values.size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=values.num_layers("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=values.size("num_key_value_heads", num_heads),
        head_dim=values.size("head_dim", default_head_dim),
        intermediate_size=values.size("intermediate_size"),
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=values.number("rms_norm_eps", 1e-6),
        rope=rope,
        local_rope=local_rope,
        hidden_activation=_activation(values, is_gemma),
        tie_word_embeddings=not has_head or values.flag("tie_word_embeddings", default=is_gemma),
        has_head=has_head,
        attention_bias=_has_qkv_bias(values, architecture),
        attention_output_bias=_has_output_bias(values, architecture),
        qk_norm=is_gemma or architecture == "Qwen3ForCausalLM",
        sliding_window=sliding_window,
        sliding_layers=sliding_layers,
        query_pre_attn_scalar=values.number("query_pre_attn_scalar", 256.0) if is_gemma else None,
        embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
        norm_weight_offset=1.0 if is_gemma else 0.0,
        dtype=_dtype(values),
        bos_token_id=next(iter(values.token_ids("bos_token_id")), None),
        eos_token_ids=generation.token_ids("eos_token_id") or values.token_ids("eos_token_id"),
    )


def _architecture(values: Values) -> tuple[str, bool]:
    """Return the class of the model with its head, and whether it has that (`Qwen3Model` has not)."""
    names = values.raw("architectures") or [
        _MODEL_TYPES.get(values.raw("model_type"), values.raw("model_type"))
    ]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise values.wrong("architectures", values.raw("architectures"), "a list of one class name")
    has_head = not names[0].endswith("Model")
    name = names[0] if has_head else names[0].removesuffix("Model") + "ForCausalLM"
    if name not in ARCHITECTURES:
        raise unsupported_architecture(names[0], ARCHITECTURES, source="config.json")
    return name, has_head


def _activation(values: Values, is_gemma: bool) -> Any:  # noqa: FBT001 -- private, and the name says it
    key, wanted = ("hidden_activation", "gelu_pytorch_tanh") if is_gemma else ("hidden_act", "silu")
    values.refuse_unless(key, wanted)
    return wanted


def _has_qkv_bias(values: Values, architecture: str) -> bool:
    if architecture == "Qwen2ForCausalLM":
        return True
    return architecture != "MistralForCausalLM" and values.flag("attention_bias", default=False)


def _has_output_bias(values: Values, architecture: str) -> bool:
    return architecture != "Qwen2ForCausalLM" and _has_qkv_bias(values, architecture)


def _sliding(values: Values, architecture: str) -> tuple[int | None, tuple[bool, ...]]:
    """Return the window and which layers slide."""
    num_layers = values.num_layers("num_hidden_layers")
    if architecture == "LlamaForCausalLM":
        # The class has no window; a configuration that asks for one was meant for another class.
        values.refuse_unless("sliding_window")
        return None, ()
    if architecture == "MistralForCausalLM":
        # Absent and null differ here: the class's own default is a window of 4096.
        window = values.raw("sliding_window") if values.names("sliding_window") else 4096
        return (None, ()) if window is None else (values.size("sliding_window", 4096), (True,) * num_layers)
    if architecture != "Gemma3ForCausalLM" and not values.flag("use_sliding_window", default=False):
        return None, ()
    if values.names("sliding_window") and values.raw("sliding_window") is None:
        return None, ()
    layers = _layer_types(values, num_layers) or _default_layers(values, architecture, num_layers)
    window = values.size("sliding_window", 4096)
    return (window, layers) if any(layers) else (None, ())


def _layer_types(values: Values, num_layers: int) -> tuple[bool, ...]:
    types = values.raw("layer_types")
    if types is None:
        return ()
    if not isinstance(types, list) or len(types) != num_layers:
        raise values.wrong("layer_types", types, f"a list of {num_layers} layer types")
    for layer_type in types:
        if layer_type not in ("sliding_attention", "full_attention"):
            raise ModelLoadError(
                f"config.json: layer type {layer_type!r} is not supported; "
                "supported: full_attention, sliding_attention"
            )
    return tuple(layer_type == "sliding_attention" for layer_type in types)


def _default_layers(values: Values, architecture: str, num_layers: int) -> tuple[bool, ...]:
    if architecture == "Gemma3ForCausalLM":
        pattern = values.size("sliding_window_pattern", 6)
        return tuple((index + 1) % pattern != 0 for index in range(num_layers))
    max_window_layers = values.raw("max_window_layers")
    first = 28 if max_window_layers is None else max_window_layers
    return tuple(index >= first for index in range(num_layers))


def _dtype(values: Values) -> str | None:
    name = values.raw("dtype") or values.raw("torch_dtype")
    return name.removeprefix("torch.") if isinstance(name, str) else None
