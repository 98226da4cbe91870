"""transformers' own reading of a GGUF file, in less time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray


class PlainReader(gguf.GGUFReader):
    """Takes a file as a plain array: each of a million slices of a mapped one costs five times as much."""

    @property
    def data(self) -> NDArray[np.uint8]:
        return self._data

    @data.setter
    def data(self, mapped: NDArray[np.uint8]) -> None:
        self._data = mapped.view(np.ndarray)


@contextmanager
def read_once() -> Iterator[pytest.MonkeyPatch]:
    """Have transformers read each file once, and make the table of names once; it would once a tensor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", cache(PlainReader))
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        yield patch
