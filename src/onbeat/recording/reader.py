"""Read a record file back: its header at once, its calls one by one.

Lines are read as far as they go: a file whose writer was killed ends in the middle.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from onbeat.background_file import GZIP_FORMAT
from onbeat.core.errors import ConfigError, quoted
from onbeat.files import GZIP_MAGIC
from onbeat.recording import log
from onbeat.typed import convert, decode

_CHUNK_BYTES = 2**18


def gzip_lines(path: Path) -> Iterator[bytes]:
    r"""Yield the lines of a file, without the last one if that has no ``\n``.

    Raises
    ------
    ConfigError : the file cannot be read, is not gzip, or is damaged.
    """
    num_lines, rest, decompressor = 0, b"", zlib.decompressobj(GZIP_FORMAT)
    try:
        with path.open("rb") as file:
            data = file.read(_CHUNK_BYTES)
            if not data.startswith(GZIP_MAGIC):
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


_LINE: Any = log.Call | log.Trailer
_HINT = "; give a file that `onbeat serve --record FILE` has written"


class Recording:
    """A record file that has been read through once: every line is known to be good.

    Its calls are read again each time they are asked for, so that a long run needs little memory.

    Parameters
    ----------
    path : the file.
    allow_partial : take a file that was cut short as far as it goes.

    Attributes
    ----------
    header : who recorded what.
    is_complete : whether the file has its trailer; False only with `allow_partial`.
    num_calls : calls in the file.
    num_steps : steps that came back.

    Raises
    ------
    ConfigError : the file is no record, of another version, damaged, or cut short; names the line.
    """

    def __init__(self, path: Path, *, allow_partial: bool = False) -> None:
        self.path = path
        self.is_complete = False
        self.num_calls = 0
        self.num_steps = 0
        self._block_hashes: dict[int, list[bytes]] = {}
        self._in_flight: deque[log.ScheduleCall] = deque()
        self._remedy = _HINT
        self._check(allow_partial=allow_partial)

    def block_hashes(self, request: int) -> tuple[bytes, ...]:
        """Return the hashes of a request's full blocks, prompt and output, as far as they were recorded."""
        return tuple(self._block_hashes.get(request, ()))

    def calls(self) -> Iterator[log.Call]:
        """Read the calls in the order in which they were made."""
        lines = enumerate(gzip_lines(self.path), 1)
        next(lines)
        for number, line in lines:
            if isinstance(call := self._parse(number, line), log.Trailer):
                return
            yield call

    def _check(self, *, allow_partial: bool) -> None:
        lines = gzip_lines(self.path)
        trailer: log.Trailer | None = None
        number = 0
        for number, line in enumerate(lines, 1):
            if number == 1:
                self.header = self._parse_header(line)
                continue
            call = self._parse(number, line)
            if isinstance(call, log.Trailer):
                trailer = call
                break
            self.num_calls += 1
            self._note(call, f"{self.path}, line {number}")
        if number == 0:
            raise ConfigError(f"{self.path} is cut short before its first line; record the run again")
        self.is_complete = trailer is not None
        if trailer is not None and trailer.calls != self.num_calls:
            raise ConfigError(
                f"{self.path}, line {number}: the trailer counts {trailer.calls} calls, but the file has "
                f"{self.num_calls}; lines are missing: record the run again"
            )
        if not self.is_complete and not allow_partial:
            raise ConfigError(
                f"{self.path} is cut short after line {number} ({self.num_calls} calls): the recording "
                "server was killed or could not write on; give --allow-partial to use what is there"
            )

    def _note(self, call: log.Call, where: str) -> None:
        """Keep what calls add up to; refuse one that cannot follow those before it."""
        num_requests, wrong = len(self._block_hashes), ""
        if isinstance(call, log.AddCall):
            if call.request != num_requests:
                wrong = f"request is {call.request}; the one that comes next has number {num_requests}"
            self._block_hashes[call.request] = list(call.block_hashes)
        elif unknown := [number for number in _requests_of(call) if number >= num_requests]:
            wrong = f"request {unknown[0]} was not added before"
        elif isinstance(call, log.ScheduleCall) and call.step_id is not None:
            self._in_flight.append(call)
        elif isinstance(call, log.UpdateCall):
            wrong = call.misfit(self._in_flight.popleft() if self._in_flight else None)
        if wrong:
            raise ConfigError(f"{where}: {wrong}{self._remedy}")
        if isinstance(call, log.UpdateCall):
            self.num_steps += 1
            for request, hashes in call.block_hashes.items():
                self._block_hashes[request] += hashes

    def _parse_header(self, line: bytes) -> log.RecordHeader:
        where = f"{self.path}, line 1"
        values = decode(dict[str, Any], line, where, hint=_HINT)
        kind, version = values.pop("file", None), values.pop("schema_version", None)
        if kind != log.FILE_KIND:
            raise ConfigError(f"{where}: file is {quoted(kind)}{_HINT}")
        self._remedy = f"{_HINT}, or replay it with onbeat {quoted(values.get('onbeat_version'))}"
        if version not in log.READABLE_VERSIONS:
            raise ConfigError(
                f"{where}: the record has schema version {quoted(version)}, this onbeat reads "
                f"{log.READABLE_VERSIONS[0]} to {log.READABLE_VERSIONS[-1]}{self._remedy}"
            )
        return convert(log.RecordHeader, values, where, hint=self._remedy)

    def _parse(self, number: int, line: bytes) -> log.Call | log.Trailer:
        found: log.Call | log.Trailer = decode(_LINE, line, f"{self.path}, line {number}", hint=self._remedy)
        return found


def _requests_of(call: log.Call) -> Iterable[int]:
    """Return the numbers of the requests that a call names."""
    match call:
        case log.AbortCall():
            return call.requests
        case log.ScheduleCall():
            released = [each for each in call.released if isinstance(each, int)]
            return (*call.expired, *released, *call.row_requests, *(each.request for each in call.admitted))
        case log.UpdateCall():
            return (*call.finished, *call.failed, *call.row_guide_seconds, *call.block_hashes)
    return ()
