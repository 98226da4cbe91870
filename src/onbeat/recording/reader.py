"""Read a record file back: its header at once, its calls one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import Any, get_args

import orjson

from onbeat.core.errors import ConfigError, quoted
from onbeat.core.handover import StreamDeadlines
from onbeat.core.request import UNKNOWN_GRAMMAR, WholeRequest
from onbeat.core.slo import ShedMode
from onbeat.recording.checks import Consistency, check_fields
from onbeat.recording.lines import GzipLines
from onbeat.recording.log import (
    DEADLINES,
    FILE_KIND,
    READABLE_VERSIONS,
    TRAILER,
    AbortCall,
    AddCall,
    Call,
    HandoverCall,
    HandoverVerb,
    RecordedAdmission,
    RecordedAdoption,
    RecordedRefusal,
    RecordedRow,
    RecordHeader,
    ScheduleCall,
    UpdateCall,
)
from onbeat.recording.typed import typed

_ROW_FIELDS = 4


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
        self._check(allow_partial=allow_partial)

    def block_hashes(self, request: int) -> tuple[bytes, ...]:
        """Return the hashes of a request's full blocks, prompt and output, as far as they were recorded."""
        return tuple(self._block_hashes.get(request, ()))

    def calls(self) -> Iterator[Call]:
        """Read the calls in the order in which they were made."""
        lines = enumerate(GzipLines(self.path), 1)
        next(lines)
        for number, line in lines:
            call = self._parse(number, line)
            if call is not None:
                yield call

    def _check(self, *, allow_partial: bool) -> None:
        lines = GzipLines(self.path)
        trailer: Mapping[str, Any] | None = None
        consistency = Consistency()
        number = 0
        for number, line in enumerate(lines, 1):
            if number == 1:
                self.header = self._parse_header(line)
                continue
            call = self._parse(number, line, is_new=True)
            if call is None:
                trailer = _load(line)
                break
            self.num_calls += 1
            try:
                consistency.check(call)
            except ValueError as error:
                raise self._bad_line(number, line, error) from error
            self._note(call)
        if number == 0:
            raise ConfigError(f"{self.path} is cut short before its first line; record the run again")
        self.is_complete = trailer is not None
        if trailer is not None and (counted := trailer.get("calls")) != self.num_calls:
            raise ConfigError(
                f"{self.path}, line {number}: the trailer counts {quoted(counted)} calls, but the file has "
                f"{self.num_calls}; lines are missing: record the run again"
            )
        if not self.is_complete and not allow_partial:
            raise ConfigError(
                f"{self.path} is cut short after line {number} ({self.num_calls} calls): the recording "
                "server was killed or could not write on; give --allow-partial to use what is there"
            )

    def _note(self, call: Call) -> None:
        if isinstance(call, AddCall):
            self._block_hashes[call.request] = list(call.block_hashes)
        elif isinstance(call, UpdateCall):
            self.num_steps += 1
            for request, hashes in call.block_hashes.items():
                self._block_hashes[request] += hashes

    def _parse_header(self, line: bytes) -> RecordHeader:
        try:
            values = _load(line)
            kind, version = values.pop("file"), values.pop("schema_version")
        except (ValueError, KeyError, TypeError) as error:
            raise self._bad_line(1, line, error) from error
        if kind != FILE_KIND:
            raise self._bad_line(1, line, f"file is {quoted(kind)}")
        if version not in READABLE_VERSIONS:
            *earlier, last = map(str, READABLE_VERSIONS)
            readable = f"{', '.join(earlier)} and {last}"
            raise ConfigError(
                f"{self.path}, line 1: the record has schema version {version}, this onbeat reads "
                f"{readable}; replay it with onbeat {values.get('onbeat_version')}"
            )
        known = {field.name for field in fields(RecordHeader)}
        if unknown := values.keys() - known:
            raise ConfigError(
                f"{self.path}, line 1: unknown header field {min(unknown)!r}; replay it with onbeat "
                f"{values.get('onbeat_version')}"
            )
        try:
            header: RecordHeader = typed(RecordHeader, values)
        except ValueError as error:
            raise self._bad_line(1, line, error) from error
        return header

    def _parse(self, number: int, line: bytes, *, is_new: bool = False) -> Call | None:
        """Return the call of a line, or None for the trailer; a line is checked when it is new."""
        try:
            values = _load(line)
            name = values["call"]
            if is_new:
                check_fields(values)
            if not _comes_late(values):
                return None if name == TRAILER else _PARSERS[name](values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._bad_line(number, line, error) from error
        raise ConfigError(
            f"{self.path}, line {number}: the record is of KV that comes after its request was admitted, or "
            f"outlives it, which this onbeat does not do; replay it with onbeat {self.header.onbeat_version}"
        )

    def _bad_line(self, number: int, line: bytes, why: object) -> ConfigError:
        shown = line[:80].decode(errors="replace")
        return ConfigError(
            f"{self.path}, line {number}: {shown!r} is not a line of a record ({why}); give a file that "
            "`onbeat serve --record FILE` has written"
        )


def _load(line: bytes) -> dict[str, Any]:
    values = orjson.loads(line)
    if not isinstance(values, dict):
        raise TypeError("a line is one JSON object")
    return values


def _add_call(values: Mapping[str, Any]) -> AddCall:
    slo, refused, whole = values.get("slo"), values.get("refused"), values.get("whole")
    return AddCall(
        now=values["now"],
        request=values["request"],
        request_id=values["request_id"],
        arrival=values["arrival"],
        num_prompt_tokens=values["num_prompt_tokens"],
        max_tokens=values["max_tokens"],
        priority=values.get("priority", 0),
        block_hashes=_hashes(values.get("block_hashes", ())),
        slo=None if slo is None else _three(*slo),
        slo_class=values.get("slo_class"),
        weight=values.get("weight", 1.0),
        tenant=values.get("tenant"),
        shed=ShedMode(values.get("shed", ShedMode.OFF)),
        whole=None if whole is None else WholeRequest(*whole),
        refused=None if refused is None else RecordedRefusal(*refused),
        num_resumed_tokens=values.get("num_resumed_tokens", 0),
        first_token_time=values.get("first_token_time"),
        num_external_tokens=values.get("num_external_tokens", 0),
        adoption=None if (adoption := values.get("adoption")) is None else _adoption(*adoption),
        is_scored=values.get("is_scored", False),
        pooling=values.get("pooling"),
        is_guided=values.get("is_guided", False),
        guide_seconds=values.get("guide_seconds", UNKNOWN_GRAMMAR.seconds),
        kept_for=values.get("kept_for", 0.0),
    )


def _adoption(
    handover_id: str,
    scheduled_time: float,
    num_cached_tokens: int,
    num_preemptions: int,
    stood: list[Any] | None,
) -> RecordedAdoption:
    deadlines = None
    if stood is not None:
        # Files before version 6 lack the last one, which has a default.
        values = dict(zip(DEADLINES[: len(stood)], stood, strict=True))
        for name, value in values.items():
            if value is None and name != DEADLINES[-1]:
                values[name] = -inf if name.endswith("_delivery") else inf
        deadlines = StreamDeadlines(**values)
    return RecordedAdoption(handover_id, scheduled_time, num_cached_tokens, num_preemptions, deadlines)


def _handover_call(values: Mapping[str, Any]) -> HandoverCall:
    if values["verb"] not in get_args(HandoverVerb):
        raise ValueError(f"no verb {values['verb']}")
    return HandoverCall(
        now=values["now"],
        verb=values["verb"],
        id=values["id"],
        num_tokens=values.get("num_tokens"),
        block_ids=_numbers(values.get("block_ids")),
        is_out=values.get("is_out"),
    )


def _comes_late(values: Mapping[str, Any]) -> bool:
    """Whether a line is of KV that is fetched after an admission, or kept beyond an end, as none is now."""
    if values["call"] == "handover":
        return values["verb"] in ("fetch", "receive", "fail")
    has_kv = values.get("num_external_tokens", 0) and values.get("adoption") is None
    return values["call"] == "add" and bool(has_kv or values.get("keeps_kv"))


def _three(
    ttft: float | None, tbt: float | None, e2e: float | None
) -> tuple[float | None, float | None, float | None]:
    return ttft, tbt, e2e


def _abort_call(values: Mapping[str, Any]) -> AbortCall:
    return AbortCall(values["now"], tuple(values["requests"]))


def _schedule_call(values: Mapping[str, Any]) -> ScheduleCall:
    flat = values.get("rows", ())
    columns = [flat[start::_ROW_FIELDS] for start in range(_ROW_FIELDS)]
    num_drafts = values.get("drafts") or [0] * len(columns[0])
    return ScheduleCall(
        now=values["now"],
        step_id=values.get("step_id"),
        rows=tuple(
            RecordedRow(request, num_computed, num_new, bool(samples), drafts)
            for request, num_computed, num_new, samples, drafts in zip(*columns, num_drafts, strict=True)
        ),
        new_block_ids={int(row): tuple(ids) for row, ids in values.get("new_block_ids", {}).items()},
        admitted=tuple(
            RecordedAdmission(request, num_output, tuple(ids))
            for request, num_output, ids in values.get("admitted", ())
        ),
        released=tuple(values.get("released", ())),
        predicted_seconds=values.get("predicted_seconds"),
        expired=tuple(values.get("expired", ())),
    )


def _update_call(values: Mapping[str, Any]) -> UpdateCall:
    return UpdateCall(
        now=values["now"],
        step_id=values["step_id"],
        seconds=values["seconds"],
        counts=_numbers(values.get("counts")),
        drafted=_numbers(values.get("drafted")),
        available=_numbers(values.get("available")),
        undelivered={int(row): count for row, count in values.get("undelivered", {}).items()},
        finished={int(request): reason for request, reason in values.get("finished", {}).items()},
        failed=tuple(values.get("failed", ())),
        faults=tuple(values.get("faults", ())),
        guide_seconds=values.get("guide_seconds"),
        row_guide_seconds={int(each): took for each, took in values.get("row_guide_seconds", {}).items()},
        block_hashes={
            int(request): _hashes(hashes) for request, hashes in values.get("block_hashes", {}).items()
        },
    )


def _numbers(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _hashes(texts: list[str]) -> tuple[bytes, ...]:
    return tuple(map(bytes.fromhex, texts))


_PARSERS: Mapping[str, Callable[[Mapping[str, Any]], Call]] = {
    "add": _add_call,
    "abort": _abort_call,
    "schedule": _schedule_call,
    "update": _update_call,
    "handover": _handover_call,
}
