"""Read the metadata of a GGUF file; constants that the format leaves out are filled in as llama.cpp does."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from onbeat.core.errors import ModelLoadError
from onbeat.engine.model_config.config import ModelConfig, RopeConfig, unsupported_architecture
from onbeat.engine.model_config.values import Values

GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_MUST_BE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1.0,),
    "attention.scale": (),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "residual_scale": (1.0,),
    "embedding_scale": (1.0,),
    "use_parallel_residual": (False,),
}
_POOLING = {1: "mean", 2: "cls", 3: "last", 4: "rank"}
"""llama.cpp's numbers (`llama_pooling_type`); 0 is none."""

_GEMMA_27B_LAYERS = 62
"""The one Gemma 3 size whose query scalar is hidden_size / num_heads, not head_dim."""


def model_config_from_gguf(
    metadata: Mapping[str, Any],
    *,
    tensor_names: Collection[str],
    rope_frequency_factors: tuple[float, ...] | None = None,
) -> ModelConfig:
    """Read the metadata of a GGUF file.

    Parameters
    ----------
    metadata : key to plain value. `<architecture>.vocab_size` must be there (many files leave it to the
        embedding's rows: the caller puts it in).
    tensor_names : the file's own tensor names; they tell what metadata leaves out (tied head, biases).
    rope_frequency_factors : the values of `rope_freqs.weight`, where the file has it (Llama 3.1's scaling).

    Raises
    ------
    ModelLoadError : an unsupported architecture or option, or a missing or wrong value.
    """
    name = metadata.get("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        raise unsupported_architecture(name, GGUF_ARCHITECTURES, source="the GGUF file")
    architecture = GGUF_ARCHITECTURES[name]
    values = Values(metadata, source="the GGUF file", prefix=f"{name}.")
    for key, neutral in _MUST_BE_NEUTRAL.items():
        values.refuse_unless(key, *neutral)
    hidden_size, num_heads = values.size("embedding_length"), _per_layer(values, "attention.head_count")
    head_dim = values.size("attention.key_length", hidden_size // num_heads)
    values.refuse_unless("attention.value_length", head_dim)
    values.refuse_unless("rope.dimension_count", head_dim)
    is_gemma = name == "gemma3"
    sliding_window, sliding_layers = _sliding(values, name)
    pooling = _POOLING.get(values.raw("pooling_type"))
    tokens = Values(metadata, source="the GGUF file", prefix="tokenizer.ggml.")
    return ModelConfig(
        family=name,
        architecture=architecture,
        vocab_size=values.size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=values.num_layers("block_count"),
        num_heads=num_heads,
        num_kv_heads=_per_layer(values, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=_per_layer(values, "feed_forward_length"),
        max_position_embeddings=values.size("context_length"),
        rms_norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(values, 1_000_000.0 if is_gemma else 10_000.0, rope_frequency_factors),
        local_rope=RopeConfig(theta=values.number("rope.freq_base_swa", 10_000.0)) if is_gemma else None,
        hidden_activation="gelu_pytorch_tanh" if is_gemma else "silu",
        tie_word_embeddings="output.weight" not in tensor_names,
        has_head=pooling is None or "output.weight" in tensor_names,
        pooling=pooling,
        attention_bias="blk.0.attn_q.bias" in tensor_names,
        attention_output_bias="blk.0.attn_output.bias" in tensor_names,
        qk_norm=name in ("qwen3", "gemma3"),
        sliding_window=sliding_window,
        sliding_layers=sliding_layers,
        query_pre_attn_scalar=_gemma_query_scalar(values, head_dim, hidden_size / num_heads)
        if is_gemma
        else None,
        embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
        norm_weight_offset=1.0 if is_gemma else 0.0,
        bos_token_id=next(iter(tokens.token_ids("bos_token_id")), None),
        eos_token_ids=tuple(
            dict.fromkeys(tokens.token_ids("eos_token_id") + tokens.token_ids("eot_token_id")),
        ),
    )


def _per_layer(values: Values, key: str, default: int | None = None) -> int:
    """Return a size that GGUF may give once or for each layer."""
    value = values.raw(key)
    if not isinstance(value, list):
        return values.size(key, default)
    if len(set(value)) != 1:
        raise values.wrong(key, value, "the same for every layer")
    return Values({key: value[0]}, source="the GGUF file").size(key)


def _rope(values: Values, default_theta: float, frequency_factors: tuple[float, ...] | None) -> RopeConfig:
    theta = values.number("rope.freq_base", default_theta)
    kind = values.raw("rope.scaling.type")
    # Files older than `rope.scaling.*` have `rope.scale_linear`.
    factor_key = "rope.scaling.factor" if "rope.scaling.factor" in values else "rope.scale_linear"
    factor = values.raw(factor_key)
    if kind not in (None, "none", "linear"):
        raise ModelLoadError(
            f"the GGUF file asks for RoPE scaling of kind {kind!r}, which is not supported; "
            "supported: none, linear, and llama3 as a rope_freqs.weight tensor"
        )
    is_linear = kind != "none" and factor not in (None, 0.0, 1.0)
    if frequency_factors is not None:
        if is_linear:
            raise ModelLoadError(
                "the GGUF file has both linear RoPE scaling and rope_freqs.weight; only one can hold"
            )
        return RopeConfig(theta=theta, kind="factors", frequency_factors=frequency_factors)
    if is_linear:
        return RopeConfig(theta=theta, kind="linear", factor=values.number(factor_key))
    return RopeConfig(theta=theta)


def _sliding(values: Values, name: str) -> tuple[int | None, tuple[bool, ...]]:
    if name != "gemma3":
        # llama.cpp computes these architectures without a window, whatever the file says; a window that is
        # shorter than the context would make our output differ from one or the other.
        window = values.raw("attention.sliding_window")
        if window is not None and 0 < window < values.size("context_length"):
            raise ModelLoadError(
                f"the GGUF file sets {name}.attention.sliding_window to {window}, which is supported for "
                "gemma3 only; serve the Hugging Face checkpoint of this model instead"
            )
        return None, ()
    num_layers = values.num_layers("block_count")
    pattern = values.raw("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        return values.size("attention.sliding_window"), tuple(bool(slides) for slides in pattern)
    period = values.size("attention.sliding_window_pattern", 6)
    return values.size("attention.sliding_window"), tuple(
        (index + 1) % period != 0 for index in range(num_layers)
    )


def _gemma_query_scalar(values: Values, head_dim: int, head_share: float) -> float:
    return head_share if values.num_layers("block_count") == _GEMMA_27B_LAYERS else float(head_dim)
