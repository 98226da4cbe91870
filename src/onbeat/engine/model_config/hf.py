"""Read a Hugging Face config.json: spellings of transformers 4 and 5, defaults as transformers has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onbeat.engine.model_config.architecture import ModelConfig, unsupported_architecture
from onbeat.engine.model_config.families import FAMILIES, Family, read_model
from onbeat.engine.model_config.rope import read_rope
from onbeat.engine.model_config.values import KEYS, Values

_BY_MODEL_TYPE = {family.model_type: name for name, family in FAMILIES.items()}
"""For a configuration that was saved without a model, and so names no architecture."""
_SHARED = ("eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings")
"""Keys of a multimodal model that are its text's, too."""


def model_config_from_hf(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    *,
    served_len: int | None = None,
) -> ModelConfig:
    """Read a Hugging Face config.json.

    Parameters
    ----------
    config : the parsed config.json.
    generation_config : the parsed generation_config.json, whose end-of-sequence tokens win where it has any.
    served_len : longest context that will be served, tokens; None: as long as the model allows. LongRoPE
        turns by other angles for long contexts.

    Raises
    ------
    ModelLoadError : an unsupported architecture or option, or a missing or wrong value.
    """
    values = Values(_text_part(config), source="the model")
    family, has_head = _family(values)
    values = values.over({family.eps_key: 1e-6, "rope_theta": 10_000.0, **family.defaults})
    values.refuse_unless(family.activation_key, family.activation)
    generation = Values(generation_config or {}, source="generation_config.json")
    biases = {
        field: True
        for field, key in family.bias_keys._asdict().items()
        if key is not None and values.flag(key, default=False)
    }
    return read_model(
        family,
        values,
        lambda sizes: read_rope(values, family.rope, sizes),
        neutral=KEYS.neutral,
        served_len=served_len,
        tie_word_embeddings=not has_head or values.flag("tie_word_embeddings", default=False),
        has_head=has_head,
        dtype=_dtype(values),
        bos_token_id=next(iter(values.token_ids("bos_token_id")), None),
        eos_token_ids=generation.token_ids("eos_token_id") or values.token_ids("eos_token_id"),
        **biases,
    )


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of a multimodal model's text; that of any other model as it is."""
    names = config.get("architectures")
    families = [
        each for each in FAMILIES.values() if isinstance(names, list) and {*names} & {*each.multimodal}
    ]
    if not families:
        return config
    # Where there are no parts, as in Qwen 2.5's older files, the text's values stand beside the others.
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise Values(config, source="the model").wrong("text_config", text, "a table")
    family = next((each for each in families if each.model_type == text.get("model_type")), families[0])
    shared = {key: config[key] for key in _SHARED if key in config}
    return {**text, **shared, "architectures": [family.architecture]}


def _family(values: Values) -> tuple[Family, bool]:
    """Return the family, and whether the model has its head (`Qwen3Model` has not)."""
    names = values.raw("architectures") or [
        _BY_MODEL_TYPE.get(values.raw("model_type"), values.raw("model_type"))
    ]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise values.wrong("architectures", values.raw("architectures"), "a list of one class name")
    has_head = not names[0].endswith("Model")
    name = names[0] if has_head else names[0].removesuffix("Model") + "ForCausalLM"
    if name not in FAMILIES:
        raise unsupported_architecture(names[0], FAMILIES, source="config.json")
    return FAMILIES[name], has_head


def _dtype(values: Values) -> str | None:
    name = values.raw("dtype") or values.raw("torch_dtype")
    return name.removeprefix("torch.") if isinstance(name, str) else None
