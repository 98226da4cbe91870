"""Where fetched model files are kept."""

from __future__ import annotations

import os
from pathlib import Path

from onbeat.hub.known import KnownModel


def models_dir() -> Path:
    """Return the directory of fetched models: `$XDG_CACHE_HOME/onbeat/models`, or under `~/.cache`."""
    # The XDG specification: a relative path is invalid and must be ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "onbeat" / "models"


def cached_file(model: KnownModel) -> Path | None:
    """Return a known model's file where it is in the cache and whole."""
    path = models_dir() / model.file_name
    # Files come here only by rename after their hash was checked; the size catches what was copied by hand.
    return path if path.is_file() and path.stat().st_size == model.file_bytes else None
