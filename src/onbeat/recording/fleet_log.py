"""The record of a fleet: what it heard, when, and what it wanted done about that.

The file is gzip-compressed text with one JSON object a line:

1. the header: ``{"file": "onbeat-fleet-record", "schema_version": 2, "router": ..., ...}``;
2. one line a call of the fleet: ``{"now": ..., "event": {...}, "actions": [{...}, ...]}``. Events and actions
   carry the name of their class as ``kind``, and their fields, defaults left out; infinity is ``"inf"``;
3. the trailer: ``{"call": "end", "calls": N}``. A file without it is cut short.

Times are seconds of the recording machine's monotonic clock, written so that they read back exactly. There is
no text and no token in the file: shared prefixes are shown by hashes of token blocks, cut as in the record of
a scheduler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

import orjson

from onbeat.background_file import BackgroundFile
from onbeat.core.errors import ConfigError
from onbeat.recording.reader import gzip_lines
from onbeat.recording.writer import LOGGED_BYTES
from onbeat.typed import INFINITY, Number, Table, decode
from onbeat.version import __version__

FILE_KIND = "onbeat-fleet-record"
SCHEMA_VERSION = 2
_TRAILER = b'{"call":"end"'

OnDecision = Callable[[Any, float, Sequence[Any]], None]
"""Takes an event, its time, and the actions."""


def plain(value: object) -> Any:
    """Return an event, an action or a part of one as JSON has it."""
    if isinstance(value, str | int | None):
        return value
    if isinstance(value, float):
        return INFINITY if value == inf else value
    if isinstance(value, bytes):
        return value[:LOGGED_BYTES].hex()
    if isinstance(value, Sequence):
        return [plain(each) for each in value]
    assert dataclasses.is_dataclass(value), f"{type(value).__name__} is no part of an event"
    assert not isinstance(value, type)
    found = {}
    for name, default in _fields(type(value)):
        own = getattr(value, name)
        if own != default:
            found[name] = plain(own)
    return found


def named(value: object) -> dict[str, Any]:
    """Return an event or an action as JSON has it, with its kind."""
    return {"kind": type(value).__name__, **plain(value)}


@lru_cache
def _fields(kind: type) -> tuple[tuple[str, object], ...]:
    return tuple((each.name, each.default) for each in dataclasses.fields(kind))


@contextmanager
def fleet_record(path: Path, about: Mapping[str, Any]) -> Iterator[OnDecision]:
    """Record a fleet while the block runs: what it yields is to be told of every decision.

    Parameters
    ----------
    path : of the file.
    about : the fleet, for the header: `router`, and `seed` and `fleet` (a mapping of `FleetRules`) where
        they are not the defaults.

    Raises
    ------
    ConfigError : the file cannot be created.
    """
    sink = BackgroundFile(path, "record", is_packed=True)
    num_calls = 0

    def on_decision(event: object, now: float, actions: Sequence[object]) -> None:
        nonlocal num_calls
        num_calls += 1
        line = {"now": now, "event": named(event), "actions": [named(each) for each in actions]}
        sink.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    header = {"file": FILE_KIND, "schema_version": SCHEMA_VERSION, "onbeat_version": __version__, **about}
    sink.write(orjson.dumps(header, option=orjson.OPT_APPEND_NEWLINE, default=str))
    try:
        yield on_decision
    finally:
        sink.write(orjson.dumps({"call": "end", "calls": num_calls}, option=orjson.OPT_APPEND_NEWLINE))
        sink.close()


class FleetCall(Table):
    """A call of a fleet."""

    now: Number
    event: dict[str, Any]
    """As `named` makes it, as are the actions."""
    actions: list[dict[str, Any]]


class FleetRecording:
    """A record file of a fleet. Its calls are read as they are asked for.

    Parameters
    ----------
    path : the file.
    allow_partial : take a file that was cut short as far as it goes.

    Attributes
    ----------
    header : the first line.
    is_complete : whether the file had its trailer, once it has been read to its end.

    Raises
    ------
    ConfigError : the file is no record of a fleet, or of another version.
    """

    def __init__(self, path: Path, *, allow_partial: bool = False) -> None:
        self.path = path
        self.is_complete = False
        self._allow_partial = allow_partial
        header = read_header(path)
        if header is None or header.get("file") != FILE_KIND:
            raise ConfigError(f"{path} is not the record of a fleet; give a file that --record has written")
        if header.get("schema_version") != SCHEMA_VERSION:
            raise ConfigError(
                f"{path}: the record has schema version {header.get('schema_version')}, this onbeat reads "
                f"{SCHEMA_VERSION}; replay it with onbeat {header.get('onbeat_version')}"
            )
        self.header = header

    def calls(self) -> Iterator[tuple[int, FleetCall]]:
        """Yield the number of each line, and the call in it.

        Raises
        ------
        ConfigError : a line is damaged, or the file was cut short and may not be; names the line.
        """
        self.is_complete = False
        for number, line in enumerate(gzip_lines(self.path), start=1):
            if line.startswith(_TRAILER):
                self.is_complete = True
                return
            if number > 1:
                yield number, decode(FleetCall, line, f"{self.path}, line {number}")
        if not self._allow_partial:
            raise ConfigError(
                f"{self.path} is cut short: it has no last line; --allow-partial takes it as far as it goes"
            )


def read_header(path: Path) -> dict[str, Any] | None:
    """Return the first line of a record of any kind; None where it is none.

    Raises
    ------
    ConfigError : the file cannot be read, or is no record.
    """
    for line in gzip_lines(path):
        try:
            values = orjson.loads(line)
        except ValueError:
            return None
        return values if isinstance(values, dict) else None
    return None
