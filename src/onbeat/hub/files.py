"""What finding a model yields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Where a model's files lie."""

    kind: Literal["hf", "gguf"]
    path: Path
    """hf: a directory with config.json; gguf: a file."""
    name: str
    """What the user called the model."""
