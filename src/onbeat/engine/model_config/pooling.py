"""How a directory of sentence-transformers says that hidden states become an embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from onbeat.core.errors import ConfigError, ModelLoadError
from onbeat.files import read

_NAMES = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls"}
_HARMLESS = ("Transformer", "Pooling", "Normalize")
"""Modules that change nothing about the direction of a vector, pooling aside."""


class _Module(msgspec.Struct):
    type: str = ""


def hf_pooling(directory: Path) -> str | None:
    """Return how `1_Pooling/config.json` pools: `last`, `mean`, or what is not supported; None without one.

    Raises
    ------
    ModelLoadError : `modules.json` puts more behind the model than pooling and a norm.
    """
    modules = directory / "modules.json"
    try:
        found = read(list[_Module], modules) if modules.is_file() else []
    except ConfigError as error:
        raise ModelLoadError(f"{error}; fetch the model again") from error
    for module in found:
        kind = module.type.rpartition(".")[2]
        if kind not in _HARMLESS:
            raise ModelLoadError(
                f"{modules} puts a module {kind!r} behind the model, which is not supported; supported: "
                f"{', '.join(_HARMLESS)}"
            )
    path = directory / "1_Pooling" / "config.json"
    if not path.is_file():
        return None
    config = read(dict[str, Any], path)
    modes = [config["pooling_mode"]] if "pooling_mode" in config else _modes(config)
    name = "+".join(_NAMES.get(mode, mode) for mode in modes) or "none"
    return name if config.get("include_prompt", True) else f"{name} without prompts"


def _modes(config: dict[str, Any]) -> list[str]:
    prefix = "pooling_mode_"
    return [
        key.removeprefix(prefix) for key, value in config.items() if key.startswith(prefix) and value is True
    ]
