"""transformers' own reading of a GGUF file, in less time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import gguf
import numpy as np
import pytest


class PlainReader(gguf.GGUFReader):
    """Takes a file as a plain array: each of a million slices of a mapped one costs five times as much."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)


@contextmanager
def read_once() -> Iterator[pytest.MonkeyPatch]:
    """Have transformers read each file once, and make the table of names once; it would once a tensor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", cache(PlainReader))
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        yield patch
