"""The file of embeddings. It says by itself which lines of the corpus are done.

A line is written whole or not at all: what a killed run has left of its last line is cut off.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
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
        self._options = ""
        """With which the embeddings of the file were made; empty before the first."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; choose another --out") from error
        if not path.is_file():
            self._file.close()
            raise ConfigError(f"{path} is no file that a later run could go on with; choose another --out")
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

    def done(self, digests: Sequence[int]) -> bytearray:
        """Return for each line of the corpus, by its number, whether it is done.

        What is no whole line at the file's end is cut off.

        Parameters
        ----------
        digests : of the texts of the corpus, by the numbers of their lines; 0 of lines without one.

        Raises
        ------
        ConfigError : a line is none of such a file, or of another text, or made with other options.
        """
        done, end = bytearray(len(digests)), 0
        self._file.seek(0)
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n") and b'{"line":'.startswith(line[:8]):  # else it is another's file
                break
            end += len(line)
            where = f"{self._path}:{number}"
            try:
                values = orjson.loads(line)
                place, digest = values["line"], int(values["digest"], 16)
                embedding, model = values["embedding"], values.get("model")
                is_known = 0 < place < len(digests) and digests[place] == digest != 0
                done[place if is_known else 0] = is_known
                self._check_options(embedding, model, where)
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise ConfigError(f"{where} was not written by onbeat embed; choose another --out") from error
            if not is_known:
                raise ConfigError(
                    f"line {place} of the corpus is not the text whose embedding is {where}: the corpus has "
                    "changed; choose another --out"
                )
        self._file.truncate(end)
        return done

    def _check_options(self, embedding: Any, model: str | None, where: str) -> None:
        """Raise ConfigError where an embedding is of another kind than those before it."""
        kind = "base64" if isinstance(embedding, str) else "float"
        options = f"model {model}, encoding {kind}, size {len(embedding)}"
        if self._options not in ("", options):
            raise ConfigError(
                f"{where} has an embedding of {options}, and the file has {self._options}: run the command "
                "with the options of the first run, or choose another --out"
            )
        self._options = options

    def write(self, texts: Sequence[Text], embeddings: Sequence[Any], model: str | None = None) -> None:
        """Write texts with their embeddings, and the model that the server names.

        Raises
        ------
        ConfigError : they are of another kind than those in the file.
        OnbeatError : the file cannot be written, such as on a full disk.
        """
        for embedding in embeddings:
            self._check_options(embedding, model, "the server's answer")
        content = b"".join(
            orjson.dumps(
                {
                    "line": text.line,
                    **({} if text.name is None else {"id": text.name}),
                    "digest": f"{text.digest:016x}",
                    "model": model,
                    "embedding": embedding,
                }
            )
            + b"\n"
            for text, embedding in zip(texts, embeddings, strict=True)
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
