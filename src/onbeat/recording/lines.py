"""The lines of a gzip file, as far as they go: a file whose writer was killed ends in the middle."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

from onbeat.core.errors import ConfigError

_CHUNK_BYTES = 2**18
_GZIP_FORMAT = 31
_GZIP_MAGIC = b"\x1f\x8b"


class GzipLines:
    """Iterates over complete lines; afterwards `is_complete` says whether the stream had its end.

    Raises
    ------
    ConfigError : the file cannot be read, or is damaged (not: cut short).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_complete = False
        self.num_lines = 0

    def __iter__(self) -> Iterator[bytes]:
        self.is_complete, self.num_lines = False, 0
        rest = b""
        for text in self._pieces():
            lines = (rest + text).split(b"\n")
            rest = lines.pop()
            for line in lines:
                self.num_lines += 1
                yield line

    def _pieces(self) -> Iterator[bytes]:
        decompressor = zlib.decompressobj(_GZIP_FORMAT)
        try:
            with self._path.open("rb") as file:
                data = file.read(_CHUNK_BYTES)
                if not data.startswith(_GZIP_MAGIC):
                    raise ConfigError(
                        f"{self._path} is not a record: it is {'empty' if not data else 'not a gzip file'}; "
                        "give a file that `onbeat serve --record FILE` has written"
                    )
                while data and not decompressor.eof:
                    yield decompressor.decompress(data)
                    data = file.read(_CHUNK_BYTES)
        except OSError as error:
            raise ConfigError(f"cannot read {self._path}: {error.strerror}; give a readable file") from error
        except zlib.error as error:
            raise ConfigError(
                f"{self._path} is damaged after line {self.num_lines} ({error}); record the run again"
            ) from error
        self.is_complete = decompressor.eof
