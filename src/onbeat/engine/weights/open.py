"""Open what the hub found: the one entry to the kinds of checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from onbeat.core.errors import ModelLoadError
from onbeat.engine.model_config import ModelConfig, model_config_from_hf
from onbeat.engine.weights.checkpoint import Checkpoint
from onbeat.engine.weights.gguf_file import GgufCheckpoint
from onbeat.engine.weights.safetensors_dir import SafetensorsCheckpoint
from onbeat.files import read
from onbeat.hub.files import ModelFiles

_HINT = "; fetch the file again"
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
    for module in read(list[_Module], modules, hint=_HINT) if modules.is_file() else ():
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


def open_checkpoint(files: ModelFiles, *, served_len: int | None = None) -> Checkpoint:
    """Open a model's weights and check that all are there in their right shapes; read none of them yet.

    Parameters
    ----------
    served_len : longest context that will be served, tokens; None: as long as the model allows.

    Raises
    ------
    ModelLoadError : naming the file and the tensor at fault.
    """
    if files.kind == "gguf":
        return GgufCheckpoint(files.path, served_len)
    return SafetensorsCheckpoint(files.path, read_model_config(files, served_len=served_len))


def read_model_config(files: ModelFiles, *, served_len: int | None = None) -> ModelConfig:
    """Read a model's configuration alone; its weights need not be there.

    Parameters
    ----------
    served_len : longest context that will be served, tokens; None: as long as the model allows.

    Raises
    ------
    ModelLoadError : the configuration is missing, damaged or not supported.
    """
    if files.kind == "gguf":
        return GgufCheckpoint(files.path, served_len).config
    generation = files.path / "generation_config.json"
    config = model_config_from_hf(
        read(dict[str, Any], files.path / "config.json", hint=_HINT),
        read(dict[str, Any], generation, hint=_HINT) if generation.exists() else None,
        served_len=served_len,
    )
    return replace(config, pooling=hf_pooling(files.path))
