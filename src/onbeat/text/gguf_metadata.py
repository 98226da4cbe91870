"""The metadata of a GGUF file: keys and values only, no tensors.

The `gguf` package makes numpy objects for every element, about ten million for a large vocabulary: seconds
of start-up. This reader walks the same bytes once with `struct`, and needs no more than the standard library.

References
----------
"GGUF", the file format specification of the ggml project, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from onbeat.core.errors import ModelLoadError

MetadataValue: TypeAlias = "int | float | bool | str | list[str] | list[int] | list[float] | list[bool]"
Metadata: TypeAlias = Mapping[str, MetadataValue]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_ITEMS = 1 << 27
"""More array elements than any vocabulary has; a larger count is a broken file."""
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_gguf_metadata(path: Path) -> dict[str, MetadataValue]:
    """Read every key and value that stands before the tensors.

    Parameters
    ----------
    path : a little-endian GGUF file of version 2 or 3.

    Raises
    ------
    ModelLoadError : the file is missing, not GGUF, of another version, or cut short.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path).metadata()
    except OSError as error:
        raise ModelLoadError(f"cannot read the model file {path}: {error.strerror or error}") from error
    except ValueError as error:  # mmap refuses an empty file
        raise ModelLoadError(f"{path} is empty or damaged ({error}); fetch the file again") from error


class _Reader:
    """A cursor over the file; every read checks that the bytes are there."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.offset = 0

    def metadata(self) -> dict[str, MetadataValue]:
        if self.data[:4] != _MAGIC:
            raise ModelLoadError(
                f"{self.path} is not a GGUF file: it starts with {self.data[:4]!r}, not {_MAGIC!r}"
            )
        self.offset = 4
        try:
            version = int(self._scalar("I"))
            if version not in _VERSIONS:
                raise ModelLoadError(
                    f"{self.path} is GGUF version {version} (or of another byte order); "
                    f"supported are little-endian versions {' and '.join(map(str, _VERSIONS))}: "
                    "convert it again"
                )
            self._scalar("Q")  # number of tensors
            num_keys = int(self._scalar("Q"))
            metadata: dict[str, MetadataValue] = {}
            for _ in range(num_keys):
                key = self._string()
                metadata[key] = self._value(int(self._scalar("I")), key)
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise ModelLoadError(
                f"{self.path} is cut short or damaged at byte {self.offset} of {len(self.data)}; "
                "fetch the file again"
            ) from error
        return metadata

    def _scalar(self, code: str) -> int | float | bool:
        value: int | float | bool
        (value,) = struct.unpack_from("<" + code, self.data, self.offset)
        self.offset += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        start = self.offset + 8
        end = start + int(self._scalar("Q"))
        self._need(end)
        self.offset = end
        return self.data[start:end].decode()

    def _value(self, kind: int, key: str) -> MetadataValue:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        return self._scalar(self._code(kind, key))

    def _array(self, key: str) -> MetadataValue:
        kind = int(self._scalar("I"))
        length = int(self._scalar("Q"))
        if length > _MAX_ITEMS:
            raise OverflowError(length)
        if kind == _STRING:
            return self._strings(length)
        code = self._code(kind, key)
        end = self.offset + length * struct.calcsize("<" + code)
        self._need(end)
        raw = self.data[self.offset : end]
        self.offset = end
        if kind == _BOOL:
            return [byte != 0 for byte in raw]
        return list(struct.unpack(f"<{length}{code}", raw))

    def _strings(self, length: int) -> list[str]:
        data, offset = self.data, self.offset
        unpack = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(length):
            start = offset + 8
            offset = start + unpack(data, offset)[0]
            self._need(offset)
            strings.append(data[start:offset].decode())
        self.offset = offset
        return strings

    def _code(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise ModelLoadError(
                f"{self.path}: key {key!r} has the unknown or nested value type {kind}; convert it again"
            )
        return _SCALARS[kind]

    def _need(self, end: int) -> None:
        if end > len(self.data):
            raise OverflowError(end)
