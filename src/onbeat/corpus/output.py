"""The file of embeddings. It says by itself which lines of the corpus are done.

A line is written whole or not at all: what a killed run has left of its last line is cut off.
"""

from __future__ import annotations

import fcntl
import os
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from onbeat.core.errors import ConfigError, OnbeatError
from onbeat.corpus.lines import Text


class Embeddings:
    """A file of embeddings that is written to, by one run at a time.

    Parameters
    ----------
    path : the file; it is made if there is none.

    Raises
    ------
    ConfigError : it cannot be written, or another run writes to it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; choose another --out") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise ConfigError(
                f"another run writes to {path}; wait for it, or choose another --out"
            ) from error

    def __enter__(self) -> Embeddings:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def done(self) -> array[int]:
        """Return the digest of the text of each line of the corpus that is done, by its number; 0 of others.

        What is no whole line at the file's end is cut off.

        Raises
        ------
        ConfigError : a line is none of such a file.
        """
        found, end = array("Q"), 0
        self._file.seek(0)
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n") and b'{"line":'.startswith(line[:8]):  # else it is another's file
                break
            end += len(line)
            try:
                values = orjson.loads(line)
                place, digest = values["line"], int(values["digest"], 16)
                found.extend([0] * (place + 1 - len(found)))
                found[place] = digest if place > 0 else -1  # which no array holds
            except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
                raise ConfigError(
                    f"{self._path}:{number} was not written by onbeat embed; choose another --out"
                ) from error
        self._file.truncate(end)
        return found

    def write(self, texts: Iterable[tuple[Text, Any]]) -> None:
        """Write texts with their embeddings.

        Raises
        ------
        OnbeatError : the file cannot be written, such as on a full disk.
        """
        content = b"".join(
            orjson.dumps(
                {
                    "line": text.line,
                    **({} if text.name is None else {"id": text.name}),
                    "digest": f"{text.digest:016x}",
                    "embedding": embedding,
                }
            )
            + b"\n"
            for text, embedding in texts
        )
        view = memoryview(content)
        try:
            while view:
                view = view[os.write(self._file.fileno(), view) :]
        except OSError as error:
            raise OnbeatError(
                f"cannot write {self._path}: {error.strerror}; make room, and run the command again: it goes "
                "on with what is left"
            ) from error
