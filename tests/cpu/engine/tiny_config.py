"""The configuration of an engine with a tiny model, whose weights are random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onbeat.core.options import make
from onbeat.engine.engine_config import EngineConfig
from onbeat.hub.resolve import resolve_model


def tiny_config(directory: Path, **options: Any) -> EngineConfig:
    """Return what runs the model of a directory."""
    files = resolve_model(str(directory), needs_weights=False)
    small: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 2**20, "threads": 1}
    return make(EngineConfig, model=files, load_format="dummy", **small | options)
