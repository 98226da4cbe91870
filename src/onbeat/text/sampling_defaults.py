"""What a model's files say of how its tokens are best chosen: for requests that state nothing.

It is read as vLLM reads `generation_config.json`, and as llama.cpp reads the keys `general.sampling.*` of a
GGUF file. Of the latter XTC, Mirostat and the order of samplers have no counterpart here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onbeat.core.errors import ConfigError, InvalidRequest
from onbeat.core.request import SamplingParams
from onbeat.files import read
from onbeat.text.gguf_header import read_gguf_header

_FILE = "generation_config.json"
_NAMES = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
"""Its keys, and the fields of `SamplingParams`."""
_GGUF = {"temp": "temperature", "penalty_repeat": "repetition_penalty"} | {
    name: name for name in ("top_k", "top_p", "min_p")
}


def sampling_defaults(
    model: Path, source: str, override: Mapping[str, Any] | None = None
) -> dict[str, int | float]:
    """Return what requests get that state nothing, by the fields of `SamplingParams`.

    Parameters
    ----------
    model : a Hugging Face directory, or a GGUF file.
    source : `auto` for the model's, `vllm` for none, or a folder with a generation_config.json.
    override : values that win, by the keys of that file.

    Raises
    ------
    ConfigError : there is no such file, or a value is none that requests may have.
    """
    if unknown := sorted((override or {}).keys() - _NAMES.keys()):
        raise ConfigError(
            f"override_generation_config has {', '.join(unknown)}; sampling defaults are {', '.join(_NAMES)}"
        )
    said = {**_said(model, source), **(override or {})}
    try:
        found = {name: _number(name, said[key]) for key, name in _NAMES.items() if said.get(key) is not None}
        SamplingParams(**found)
    except (InvalidRequest, TypeError, ValueError) as error:
        raise ConfigError(
            f"a sampling default is wrong: {error}; mend {_FILE}, or give --generation-config vllm"
        ) from error
    return found


def _said(model: Path, source: str) -> Mapping[str, Any]:
    if source == "vllm":
        return {}
    folder = model if source == "auto" else Path(source)
    if source == "auto" and model.is_file():
        prefix, metadata = "general.sampling.", read_gguf_header(model).metadata
        return {name: metadata.get(prefix + key) for key, name in _GGUF.items()}
    path = folder / _FILE
    return (
        {} if source == "auto" and not path.exists() else read(dict[str, Any], path, "the sampling defaults")
    )


def _number(name: str, value: Any) -> Any:
    """Return a value as requests have it; GGUF's have 32 bits, and -1 of top-k keeps all tokens."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}, which is no number")
    return max(int(value), 0) if name in ("top_k", "max_tokens") else round(float(value), 6)
