"""The lines of a gzip file, as far as they go: a file whose writer was killed ends in the middle."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

from onbeat.core.errors import ConfigError

_CHUNK_BYTES = 2**18
_GZIP_FORMAT = 31
"""zlib's `wbits` of a gzip stream with the largest window."""
_GZIP_MAGIC = b"\x1f\x8b"


def gzip_lines(path: Path) -> Iterator[bytes]:
    r"""Yield the lines of a file, without the last one if that has no ``\n``.

    Raises
    ------
    ConfigError : the file cannot be read, is not gzip, or is damaged.
    """
    num_lines, rest, decompressor = 0, b"", zlib.decompressobj(_GZIP_FORMAT)
    try:
        with path.open("rb") as file:
            data = file.read(_CHUNK_BYTES)
            if not data.startswith(_GZIP_MAGIC):
                raise ConfigError(
                    f"{path} is not a record: it is {'empty' if not data else 'not a gzip file'}; "
                    "give a file that `onbeat serve --record FILE` has written"
                )
            while data and not decompressor.eof:
                *lines, rest = (rest + decompressor.decompress(data)).split(b"\n")
                for line in lines:
                    num_lines += 1
                    yield line
                data = file.read(_CHUNK_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give a readable file") from error
    except zlib.error as error:
        raise ConfigError(
            f"{path} is damaged after line {num_lines} ({error}); record the run again"
        ) from error
