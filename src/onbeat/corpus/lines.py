"""The texts of a corpus: JSON lines, each a text or an object with one."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import orjson

from onbeat.core.errors import ConfigError

_GZIP_MAGIC = b"\x1f\x8b"
_MOST_QUOTED = 80


class Text(NamedTuple):
    """One text of a corpus."""

    line: int
    """Of its file, counted from 1."""
    text: str
    name: str | int | None
    """Its `id`; None without one."""
    digest: int
    """64 bits of the text's SHA-256, never 0: tells whether a line has changed."""


def read_texts(path: Path, field: str) -> Iterator[Text]:
    """Yield the texts of a file; empty lines have none.

    Parameters
    ----------
    path : JSON lines, plain or gzip.
    field : that an object has its text in.

    Raises
    ------
    ConfigError : the file cannot be read, or a line is wrong; the message begins with `FILE:LINE`.
    """
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _text(line, number, path, field)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {path}: {reason}; name a file of JSON lines") from error


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        is_packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    return cast("IO[bytes]", gzip.open(path)) if is_packed else path.open("rb")


def _text(line: bytes, number: int, path: Path, field: str) -> Text:
    where = f"{path}:{number}"
    try:
        value: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(
            f"{where}: not JSON ({error}): {_start(line)}; each line must be a text in quotes, or an object"
        ) from error
    name = None
    if isinstance(value, dict):
        if field not in value:
            known = ", ".join(map(repr, value)) or "nothing"
            raise ConfigError(
                f"{where}: no field {field!r}; the line has {known[:_MOST_QUOTED]}. Name the field of the "
                "texts with --field"
            )
        name, value = value.get("id"), value[field]
        if isinstance(name, bool) or not (name is None or isinstance(name, str | int)):
            raise ConfigError(f"{where}: id is {str(name)[:_MOST_QUOTED]}; it must be a text or a number")
    if not isinstance(value, str) or not value:
        raise ConfigError(
            f"{where}: the text is {_start(orjson.dumps(value))}; it must be a text that is not empty"
        )
    digest = int.from_bytes(hashlib.sha256(value.encode()).digest()[:8], "big") or 1
    return Text(number, value, name, digest)


def _start(line: bytes) -> str:
    text = line.decode(errors="replace").strip()
    return text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}..."
