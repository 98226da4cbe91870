"""How a directory of sentence-transformers says that hidden states become an embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onbeat.core.errors import ModelLoadError
from onbeat.files import read

_NAMES = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls"}
_HARMLESS = ("Transformer", "Pooling", "Normalize")
"""Modules that change nothing about the direction of a vector, pooling aside."""


def hf_pooling(directory: Path) -> str | None:
    """Return how `1_Pooling/config.json` pools: `last`, `mean`, or what is not supported; None without one.

    Raises
    ------
    ModelLoadError : `modules.json` puts more behind the model than pooling and a norm.
    """
    modules = directory / "modules.json"
    found: Any = read(Any, modules) if modules.is_file() else []  # JSON is YAML, and this is a list
    if not isinstance(found, list) or not all(isinstance(module, dict) for module in found):
        raise ModelLoadError(f"{modules} is no list of modules; fetch the model again")
    for module in found:
        kind = str(module.get("type", "")).rpartition(".")[2]
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
