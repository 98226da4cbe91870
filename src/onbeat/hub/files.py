"""What finding a model yields, what it reports on the way, and what a directory may lack."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from onbeat.core.errors import ConfigError, ModelLoadError
from onbeat.files import read

WEIGHT_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("safetensors", "bin", "pt", "pth")
_PART = re.compile(r".+-\d+-of-0*(?!1\.)[1-9]\d*\.safetensors")
"""A file of weights that is one of several; a single one needs no index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Where a model's files lie."""

    kind: Literal["hf", "gguf"]
    path: Path
    """hf: a directory with config.json; gguf: a file."""
    name: str
    """What the user called the model."""


@dataclass(frozen=True, slots=True)
class FetchStatus:
    """What a fetch is doing now."""

    message: str
    bytes_done: int | None = None
    bytes_total: int | None = None


OnFetch: TypeAlias = Callable[[FetchStatus], None]
"""Called often while a model is fetched; the first call with a new message says what begins."""


def no_progress(status: FetchStatus) -> None:
    """Show nothing."""


def missing_from(directory: Path, *, weights: bool) -> list[str]:
    """Return what serving needs and a Hugging Face directory lacks, in words.

    Parameters
    ----------
    weights : whether weights are needed (random ones need none). Pickled weights count as present:
        opening them explains why they are refused.
    """
    missing = [name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()]
    return missing + _missing_weights(directory) if weights else missing


def _missing_weights(directory: Path) -> list[str]:
    index = directory / WEIGHT_INDEX
    if index.is_file():
        try:
            names = indexed_files(index)
        except ConfigError:
            return []  # opening it says what is wrong
        missing = [name for name in names if not (directory / name).is_file()]
        return [*missing[:3], f"{len(missing) - 3} more weight files"] if len(missing) > 4 else missing
    found = [path for suffix in _WEIGHTS for path in directory.glob(f"*.{suffix}")]
    if not found:
        return ["*.safetensors"]
    # the file of several parts is there before its index where a download was interrupted
    return [WEIGHT_INDEX] if any(_PART.fullmatch(path.name) for path in found) else []


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def indexed_files(index: Path) -> list[str]:
    """Return the files that an index of weights names.

    Raises
    ------
    ConfigError : it cannot be read, is damaged, or names a file outside of its directory.
    """
    names = sorted(set(read(_Index, index, hint="; fetch the file again").weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise ModelLoadError(f"{index} names the file {name!r}, which is outside of its directory")
    return names
