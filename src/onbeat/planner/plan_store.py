"""Results of runs, kept in a file as they end: a plan that was cut short goes on where it was."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson

import onbeat
from onbeat import __version__
from onbeat.core.errors import ConfigError
from onbeat.planner.plan_file import digest_of
from onbeat.simulator.settings import ReplicaSettings, files_of

R = TypeVar("R")

_PACKAGES = ("core", "metrics", "perfmodel", "planner", "scheduler", "simulator", "workload")
"""What results depend on."""


class PlanStore:
    """Keeps results by what they are of: same program, same settings, same requests.

    Parameters
    ----------
    path : of the file, which is read if it is there; None keeps them in memory alone.

    Raises
    ------
    ConfigError : the file is another's, or cannot be read.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[str, Mapping[str, Any]] = {}
        if path is not None and path.exists():
            self._read(path)

    def __len__(self) -> int:
        return len(self._known)

    def find(self, task: Any, make: Callable[..., R]) -> R | None:
        """Return the result of a task; None where it is not known.

        Parameters
        ----------
        make : from its fields to the result.
        """
        found = self._known.get(fingerprint(task))
        return None if found is None else make(**found)

    def keep(self, task: Any, result: Mapping[str, Any]) -> None:
        """Keep a result.

        Raises
        ------
        ConfigError : the file cannot be written.
        """
        key = fingerprint(task)
        self._known[key] = result
        if self._path is None:
            return
        line = orjson.dumps({"key": key, "result": dict(result)}, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            with self._path.open("ab") as file:
                file.write(line + b"\n")
        except OSError as error:
            raise ConfigError(f"--resume: cannot write {self._path}: {error.strerror or error}") from error

    def _read(self, path: Path) -> None:
        try:
            *lines, torn = path.read_bytes().split(b"\n")
        except OSError as error:
            raise ConfigError(f"--resume: cannot read {path}: {error.strerror or error}") from error
        if torn and b'{"key":'.startswith(torn[:7]):  # by a kill; the next result begins a line of its own
            os.truncate(path, sum(len(line) + 1 for line in lines))
        elif torn:
            lines.append(torn)
        for number, line in enumerate(lines, start=1):
            try:
                entry = orjson.loads(line)
                self._known[entry["key"]] = entry["result"]
            except (orjson.JSONDecodeError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"--resume: line {number} of {path} is no result of a plan; give a file that onbeat plan "
                    "wrote, or a new one"
                ) from error


def fingerprint(task: Any) -> str:
    """Return what tells a task from others, and from those of another state of the program."""
    digest = hashlib.sha256(f"{program_digest()} {type(task).__name__}".encode())
    _feed(digest.update, task)
    return digest.hexdigest()[:32]


@cache
def program_digest() -> str:
    """Return what tells the parts of the program that make a result from what they were at other times."""
    root, digest = Path(onbeat.__file__).parent, hashlib.sha256(__version__.encode())
    for package in _PACKAGES:
        for file in sorted((root / package).rglob("*")):
            if file.is_file() and file.suffix != ".pyc":
                digest.update(f"{file.relative_to(root)}\n".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _feed(feed: Callable[[bytes], None], value: Any) -> None:
    if isinstance(value, ReplicaSettings):  # which names files by their paths
        for path in files_of(value):
            feed(digest_of(path).encode())
    if is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            feed(each.name.encode())
            _feed(feed, getattr(value, each.name))
    elif isinstance(value, np.ndarray):
        feed(value.tobytes())
    elif isinstance(value, (tuple, list)):
        feed(str(len(value)).encode())
        for item in value:
            _feed(feed, item)
    elif isinstance(value, Enum):
        feed(str(value.value).encode())
    elif isinstance(value, partial):
        raise TypeError("functions have no fingerprint")
    else:
        feed(repr(value).encode())
    feed(b";")
