"""What finding a model yields, what it reports on the way, and what a directory may lack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias


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


Progress: TypeAlias = Callable[[FetchStatus], None]
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
    has_weights = any(
        next(directory.glob(f"*.{suffix}"), None) for suffix in ("safetensors", "bin", "pt", "pth")
    )
    if weights and not has_weights:
        missing.append("*.safetensors")
    return missing
