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
        consistency = Consistency()
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
            try:
                consistency.check(call)
            except ValueError as error:
                raise ConfigError(f"{self.path}, line {number}: {error}{self._remedy}") from error
            self._note(call)
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

    def _note(self, call: log.Call) -> None:
        if isinstance(call, log.AddCall):
            self._block_hashes[call.request] = list(call.block_hashes)
        elif isinstance(call, log.UpdateCall):
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


class Consistency:
    """Checks that calls speak of requests and steps which the calls before them have named."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._open: set[str] = set()
        self._steps: deque[log.ScheduleCall] = deque()

    def check(self, call: log.Call) -> None:
        """Check the next call.

        Raises
        ------
        ValueError : says what it speaks of in vain.
        """
        match call:
            case log.AddCall():
                self._add(call)
            case log.AbortCall():
                self._end(call.requests)
            case log.ScheduleCall():
                self._schedule(call)
            case log.UpdateCall():
                self._update(call)
            case log.HandoverCall():
                if call.verb == "free":
                    self._open.discard(call.id)

    def _add(self, call: log.AddCall) -> None:
        if call.request != len(self._ids):
            raise ValueError(f"request is {call.request}, the next is {len(self._ids)}")
        if call.request_id in self._open:
            raise ValueError(f"request_id {quoted(call.request_id)} is that of an open request")
        self._ids.append(call.request_id)
        if call.refused is None:
            self._open.add(call.request_id)

    def _schedule(self, call: log.ScheduleCall) -> None:
        self._end(call.expired)
        self._known(row.request for row in call.rows)
        self._known(each.request for each in call.admitted)
        self._known(each for each in call.released if not isinstance(each, str))
        if any(row >= len(call.rows) for row in call.new_block_ids):
            raise ValueError("new_block_ids names a row that the step does not have")
        if len({row.request for row in call.rows}) != len(call.rows):
            raise ValueError("rows has a request twice")
        if call.step_id is not None:
            self._steps.append(call)

    def _update(self, call: log.UpdateCall) -> None:
        if not self._steps:
            raise ValueError(f"step {call.step_id} is not in flight")
        step = self._steps.popleft()
        most = [1 + row.num_draft_tokens for row in step.rows if row.samples]
        for name in ("counts", "drafted", "available"):
            values = getattr(call, name)
            if values is not None and len(values) != len(most):
                raise ValueError(f"{name} has {len(values)} values for {len(most)} rows that sample")
        counts = list(call.counts or [1] * len(most))
        for row, count in call.undelivered.items():
            if row >= len(most):
                raise ValueError(f"undelivered names row {row} of {len(most)}")
            counts[row] += count
        if any(count > limit for count, limit in zip(counts, most, strict=True)):
            raise ValueError("a row has more tokens than were planned")
        self._known(call.block_hashes)
        self._end(call.finished)
        self._end(call.failed)

    def _known(self, requests: Iterable[int]) -> None:
        if unknown := [each for each in requests if each >= len(self._ids)]:
            raise ValueError(f"request {unknown[0]} is unknown")

    def _end(self, requests: Iterable[int]) -> None:
        requests = list(requests)
        self._known(requests)
        self._open.difference_update(self._ids[each] for each in requests)
