"""Read the metadata of a GGUF file; constants that the format leaves out are filled in as llama.cpp does."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from onbeat.core.errors import ModelLoadError
from onbeat.engine.model_config.architecture import ModelConfig, RopeConfig, unsupported_architecture
from onbeat.engine.model_config.families import FAMILIES, GGUF_FAMILIES, Family, GgufRules, read_model
from onbeat.engine.model_config.rope import RopeSizes, longrope, yarn, yarn_magnitude
from onbeat.engine.model_config.values import KEYS, Values

_PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
"""Sizes that may be given once or for each layer."""
_POOLING = {1: "mean", 2: "cls", 3: "last", 4: "rank"}
"""llama.cpp's numbers (`llama_pooling_type`); 0 is none."""


class RopeFactors(NamedTuple):
    """What a file's own tensors divide frequencies by; empty where there are none."""

    all_contexts: tuple[float, ...] = ()
    """`rope_freqs.weight`: Llama 3.1's scaling."""
    short: tuple[float, ...] = ()
    """`rope_factors_short.weight`: LongRoPE's, for contexts as long as in pre-training."""
    long: tuple[float, ...] = ()
    """`rope_factors_long.weight`: for longer ones."""


_NO_FACTORS = RopeFactors()


def model_config_from_gguf(
    metadata: Mapping[str, Any],
    *,
    tensor_names: Collection[str],
    rope_factors: RopeFactors = _NO_FACTORS,
    served_len: int | None = None,
) -> ModelConfig:
    """Read the metadata of a GGUF file.

    Parameters
    ----------
    metadata : key to plain value. `<architecture>.vocab_size` must be there (many files leave it to the
        embedding's rows: the caller puts it in).
    tensor_names : the file's own tensor names; they tell what metadata leaves out (tied head, biases).
    rope_factors : the values of the file's tensors for its rotary embedding.
    served_len : longest context that will be served, tokens; None: as long as the model allows. LongRoPE
        turns by other angles for long contexts.

    Raises
    ------
    ModelLoadError : an unsupported architecture or option, or a missing or wrong value.
    """
    name = metadata.get("general.architecture")
    if name == "clip":
        raise ModelLoadError(
            "the GGUF file holds the vision part of a multimodal model (an mmproj file); pass the file of "
            "its text part, which is served alone"
        )
    if not isinstance(name, str) or name not in GGUF_FAMILIES:
        raise unsupported_architecture(name, GGUF_FAMILIES, source="the GGUF file")
    family = GGUF_FAMILIES[name]
    rules = family.gguf
    assert rules is not None, "the table has no others"
    values = _values(metadata, f"{name}.", tensor_names)
    if rules.with_experts is not None and values.raw("num_local_experts"):
        family = FAMILIES[rules.with_experts]
    if rules.with_window is not None and values.raw("sliding_window"):
        family = FAMILIES[rules.with_window]
    if not rules.has_windows:
        _refuse_window(values, name)
    pooling = _POOLING.get(values.raw("pooling_type"))
    tokens = Values(metadata, source="the GGUF file", prefix="tokenizer.ggml.")
    config = read_model(
        family,
        values,
        lambda sizes: _ropes(values, family, rules, rope_factors, sizes),
        neutral=KEYS.gguf_neutral,
        served_len=served_len,
        tie_word_embeddings="output.weight" not in tensor_names,
        has_head=pooling is None or "output.weight" in tensor_names,
        pooling=pooling,
        attention_bias="blk.0.attn_q.bias" in tensor_names,
        attention_output_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_up.bias" in tensor_names,
        bos_token_id=next(iter(tokens.token_ids("bos_token_id")), None),
        eos_token_ids=tuple(
            dict.fromkeys(tokens.token_ids("eos_token_id") + tokens.token_ids("eot_token_id"))
        ),
    )
    return replace(config, linear=config.linear and replace(config.linear, **rules.linear))


def _values(metadata: Mapping[str, Any], prefix: str, tensor_names: Collection[str]) -> Values:
    """Return what a file says of its model, with what is said for each layer said once."""
    values = Values(metadata, source="the GGUF file", prefix=prefix, keys=KEYS.gguf_names)
    table = {
        f"{prefix}expert_weights_norm": True,
        f"{prefix}feed_forward_length": values.raw("moe_intermediate_size"),
        **metadata,
        **_linear_values(values, prefix),
        **_two_sizes(values, prefix, tensor_names),
    }
    for key in _PER_LAYER:
        value = table.get(prefix + key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise values.wrong(key, value, "the same for every layer")
            table[prefix + key] = value[0]
    if not values.raw("sliding_window"):
        table.pop(f"{prefix}attention.sliding_window", None)  # llama.cpp writes 0 for none
    return Values(table, source="the GGUF file", prefix=prefix, keys=KEYS.gguf_names)


def _two_sizes(values: Values, prefix: str, tensor_names: Collection[str]) -> dict[str, Any]:
    """Return what files say in another way of models whose layers with a window have heads of their own."""
    if "attention.key_length_swa" not in values:
        return {}
    pattern, counts = values.raw("sliding_window_pattern"), values.raw("num_key_value_heads")
    if not isinstance(pattern, list) or {*pattern} != {False, True}:
        raise values.wrong("sliding_window_pattern", pattern, "one value for each layer, of two kinds")
    values.refuse_unless("attention.value_length", values.raw("head_dim"))
    first_full, num_shared = pattern.index(False), values.count("num_kv_shared_layers", 0)
    found = {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in pattern],
        "global_head_dim": values.raw("head_dim"),
        "attention_k_eq_v": f"blk.{first_full}.attn_v.weight" not in tensor_names,
        "enable_moe_block": bool(values.count("num_experts", 0)),
        "attention.key_length": values.size("attention.key_length_swa"),
        "attention.value_length": values.raw("attention.value_length_swa"),
        "rope.dimension_count": values.raw("rope.dimension_count_swa"),
    }
    if isinstance(counts, list):
        by_kind = [counts[first_full], counts[pattern.index(True)]]
        if counts != [by_kind[each] for each in pattern]:
            raise values.wrong("num_key_value_heads", counts, "the same for all layers with a window")
        found["num_global_key_value_heads"], found["attention.head_count_kv"] = by_kind
    sizes = values.raw("intermediate_size")
    if isinstance(sizes, list) and num_shared and sizes[-1] != sizes[0]:
        halves = [size // 2 for size in sizes[-num_shared:]]
        found |= {"use_double_wide_mlp": True, "feed_forward_length": sizes[:-num_shared] + halves}
    return {f"{prefix}{key}": value for key, value in found.items()}


def _linear_values(values: Values, prefix: str) -> dict[str, Any]:
    """Return what files say in another way of models that have linear attention."""
    if "linear_num_value_heads" not in values:
        return {}
    num_layers = values.num_layers("num_hidden_layers") - values.count("nextn_predict_layers", 0)
    kinds = "full_attention", "linear_attention"
    is_linear = values.raw("attention.recurrent_layers")
    return {
        f"{prefix}block_count": num_layers,  # without those that guess further tokens
        f"{prefix}layer_types": is_linear and [kinds[bool(each)] for each in is_linear[:num_layers]],
        f"{prefix}linear_value_head_dim": values.size("ssm.inner_size")
        // values.size("linear_num_value_heads"),
    }


def _ropes(
    values: Values, family: Family, rules: GgufRules, factors: RopeFactors, sizes: RopeSizes
) -> tuple[RopeConfig, RopeConfig | None]:
    values.refuse_unless("attention.value_length", sizes.head_dim)
    if not family.rope.is_partial:
        values.refuse_unless("rope.dimension_count", sizes.head_dim)
    rope = replace(_rope(values, rules, factors, sizes), interleaves=family.rope.interleaves)
    local = RopeConfig(theta=values.number("rope.freq_base_swa", family.rope.local_theta or rope.theta))
    return rope, local if family.rope.per_layer_type else None


def _rope(values: Values, rules: GgufRules, factors: RopeFactors, sizes: RopeSizes) -> RopeConfig:
    rotary_dim = values.size("rope.dimension_count", sizes.head_dim)
    rope = RopeConfig(
        theta=values.number("rope.freq_base", rules.theta),
        rotary_dim=None if rotary_dim == sizes.head_dim else rotary_dim,
    )
    kind = values.raw("rope.scaling.type")
    # Files older than `rope.scaling.*` have `rope.scale_linear`.
    factor_key = "rope.scaling.factor" if "rope.scaling.factor" in values else "rope.scale_linear"
    factor = values.raw(factor_key)
    original = values.size("rope.scaling.original_context_length", None if factors.short else sizes.context)
    if factors.short and factors.long:
        is_long = sizes.served > original
        return longrope(
            replace(rope, is_long=is_long, original_max_position_embeddings=original),
            factors.long if is_long else factors.short,
            attention_factor=values.number("rope.scaling.attn_factor", 1.0),
            num_frequencies=rotary_dim // 2,
        )
    if kind == "yarn":
        scale, all_dims = values.number(factor_key), "rope.scaling.yarn_log_multiplier"
        magnitude = yarn_magnitude(scale)
        if values.raw(all_dims):
            magnitude /= yarn_magnitude(scale, values.number(all_dims))
        return yarn(
            replace(rope, factor=scale, original_max_position_embeddings=original),
            values.number("rope.scaling.yarn_beta_fast", 32.0),
            values.number("rope.scaling.yarn_beta_slow", 1.0),
            width=rotary_dim,
            truncates=rules.truncates_yarn,
            attention_factor=values.number("rope.scaling.attn_factor", 1.0) * magnitude,
        )
    if kind not in (None, "none", "linear"):
        raise ModelLoadError(
            f"the GGUF file asks for RoPE scaling of kind {kind!r}, which is not supported; "
            "supported: none, linear, yarn, and llama3 as a rope_freqs.weight tensor"
        )
    is_linear = kind != "none" and factor not in (None, 0.0, 1.0)
    if factors.all_contexts:
        if is_linear:
            raise ModelLoadError(
                "the GGUF file has both linear RoPE scaling and rope_freqs.weight; only one can hold"
            )
        return replace(rope, kind="factors", frequency_factors=factors.all_contexts)
    if is_linear:
        return replace(rope, kind="linear", factor=values.number(factor_key))
    return rope


def _refuse_window(values: Values, name: str) -> None:
    """Refuse a window in a family for which llama.cpp has none.

    A window that is shorter than the context would make our output differ from llama.cpp's or the model's.
    """
    window = values.raw("attention.sliding_window")
    if window is not None and 0 < window < values.size("context_length"):
        raise ModelLoadError(
            f"the GGUF file sets {name}.attention.sliding_window to {window}, which is not supported for "
            "this architecture; serve the Hugging Face checkpoint of this model instead"
        )
