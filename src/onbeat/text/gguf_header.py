"""What stands in a GGUF file before the tensors' numbers: keys and values, and where each tensor is.

The one description of the format. The `gguf` package makes several NumPy objects of every element of an
array: two seconds for a vocabulary of 49,152 tokens, and no end for a length that is damaged.

References
----------
"GGUF", the file format specification of the ggml project, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from onbeat.core.errors import ModelLoadError

MetadataValue: TypeAlias = "int | float | bool | str | list[str] | list[int] | list[float] | list[bool]"
Metadata: TypeAlias = Mapping[str, MetadataValue]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_ITEMS = 1 << 27
"""More array elements than any vocabulary has; a larger count is a broken file."""
_MAX_DIMENSIONS = 4
_ALIGNMENT = "general.alignment"
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class GgufTensor(NamedTuple):
    """Where a tensor is."""

    name: str
    shape: tuple[int, ...]
    """Rows first."""
    kind: int
    """The format's number of its type."""
    start: int
    """Its first byte in the file."""


class GgufHeader(NamedTuple):
    """All but the tensors' numbers."""

    metadata: Metadata
    tensors: tuple[GgufTensor, ...]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read what stands before the tensors' numbers; whether these are there is not looked at.

    Parameters
    ----------
    path : a little-endian GGUF file of version 2 or 3.

    Raises
    ------
    ModelLoadError : the file is missing, not GGUF, of another version, damaged or cut short.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path).header()
    except OSError as error:
        raise ModelLoadError(f"cannot read the model file {path}: {error.strerror or error}") from error
    except ValueError as error:  # mmap refuses an empty file
        raise ModelLoadError(f"{path} is empty or damaged ({error}); fetch the file again") from error


class _Reader:
    """A cursor over the file; every read checks that the bytes are there."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.offset = len(_MAGIC)

    def header(self) -> GgufHeader:
        if self.data[: self.offset] != _MAGIC:
            raise ModelLoadError(
                f"{self.path} is not a GGUF file: it starts with {self.data[:4]!r}, not {_MAGIC!r}"
            )
        try:
            version = self._number("I")
            if version not in _VERSIONS:
                raise ModelLoadError(
                    f"{self.path} is GGUF version {version} (or of another byte order); "
                    f"supported are little-endian versions {' and '.join(map(str, _VERSIONS))}: "
                    "convert it again"
                )
            num_tensors, num_keys = self._number("Q"), self._number("Q")
            metadata: dict[str, MetadataValue] = {}
            for _ in range(num_keys):
                key = self._string()
                metadata[key] = self._value(self._number("I"), key)
            tensors = [self._tensor() for _ in range(num_tensors)]
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise ModelLoadError(
                f"{self.path} is cut short or damaged at byte {self.offset} of {len(self.data)}; "
                "fetch the file again"
            ) from error
        alignment = metadata.get(_ALIGNMENT, 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelLoadError(
                f"{self.path}: {_ALIGNMENT} is {alignment!r}, no number of bytes; fetch the file again"
            )
        first = -(-self.offset // alignment) * alignment
        return GgufHeader(metadata, tuple(each._replace(start=first + each.start) for each in tensors))

    def _tensor(self) -> GgufTensor:
        """Return a tensor whose start counts from where the first one begins."""
        name, num_dimensions = self._string(), self._number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise OverflowError(num_dimensions)
        sizes = self._numbers("Q", num_dimensions)  # the innermost first
        if 0 in sizes:
            raise OverflowError(sizes)
        return GgufTensor(name, sizes[::-1], self._number("I"), self._number("Q"))

    def _number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        start, size = self.offset, count * struct.calcsize("<" + code)
        self._skip(size)
        return struct.unpack_from(f"<{count}{code}", self.data, start)

    def _string(self) -> str:
        start = self.offset + _LENGTH.size
        self._skip(_LENGTH.size + _LENGTH.unpack_from(self.data, self.offset)[0])
        return self.data[start : self.offset].decode()

    def _strings(self, count: int) -> list[str]:
        # `_string` in one loop: a vocabulary and its merges are a hundred thousand or more
        data, length_at, size, start = self.data, _LENGTH.unpack_from, _LENGTH.size, self.offset
        num_bytes, strings = len(data), list[str]()
        for _ in range(count):
            first = start + size
            start = first + length_at(data, start)[0]
            if start > num_bytes:
                raise OverflowError(start)
            strings.append(data[first:start].decode())
        self.offset = start
        return strings

    def _value(self, kind: int, key: str) -> MetadataValue:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        value: MetadataValue = self._number(self._code(kind, key))
        return value

    def _array(self, key: str) -> MetadataValue:
        kind, length = self._number("I"), self._number("Q")
        if length > _MAX_ITEMS:
            raise OverflowError(length)
        if kind == _STRING:
            return self._strings(length)
        return list(self._numbers(self._code(kind, key), length))

    def _code(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise ModelLoadError(
                f"{self.path}: key {key!r} has the unknown or nested value type {kind}; convert it again"
            )
        return _SCALARS[kind]

    def _skip(self, size: int) -> None:
        if self.offset + size > len(self.data):
            raise OverflowError(size)
        self.offset += size
