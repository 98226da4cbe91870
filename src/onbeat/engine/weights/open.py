"""Open what the hub found: the one entry to the kinds of checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from onbeat.core.errors import ConfigError, ModelLoadError
from onbeat.engine.model_config import ModelConfig, model_config_from_hf
from onbeat.engine.model_config.pooling import hf_pooling
from onbeat.engine.weights.checkpoint import Checkpoint
from onbeat.engine.weights.gguf_file import GgufCheckpoint
from onbeat.engine.weights.safetensors_dir import SafetensorsCheckpoint
from onbeat.files import read
from onbeat.hub.files import ModelFiles


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
        _read_json(files.path / "config.json"),
        _read_json(generation) if generation.exists() else None,
        served_len=served_len,
    )
    return replace(config, pooling=hf_pooling(files.path))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read(dict[str, Any], path)
    except ConfigError as error:
        raise ModelLoadError(f"{error}; fetch the file again") from error
