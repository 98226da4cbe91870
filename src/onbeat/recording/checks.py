"""What a record must say for a replay to make sense of it: files are edited by hand, and cut together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

from onbeat.core.errors import quoted
from onbeat.core.request import FinishReason, Pooling
from onbeat.recording.log import AbortCall, AddCall, Call, HandoverCall, ScheduleCall, UpdateCall
from onbeat.recording.typed import MOST

_Check = Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < MOST


def _is_text(value: Any) -> bool:
    return type(value) is str


def _are_counts(values: Any) -> bool:
    """Written for rows, of which a file has millions: truth values are counts here."""
    if type(values) is not list or not {int, bool}.issuperset(map(type, values)):
        return False
    return not values or (min(values) >= 0 and max(values) < MOST)


def _optional(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _row_of(*checks: _Check) -> _Check:
    return lambda values: (
        type(values) is list
        and len(values) == len(checks)
        and all(check(value) for check, value in zip(checks, values, strict=True))
    )


def _all(check: _Check) -> _Check:
    return lambda values: type(values) is list and all(map(check, values))


def _by_number(check: _Check) -> _Check:
    return lambda values: (
        type(values) is dict
        and all(key.isascii() and key.isdecimal() and len(key) < 19 for key in values)
        and all(map(check, values.values()))
    )


_REASONS = tuple(FinishReason)
_are_hashes = _all(_is_text)
_is_time = _optional(_is_number)
_FIELDS: Mapping[str, _Check] = {
    **dict.fromkeys(("now", "arrival", "seconds", "weight", "kept_for"), _is_number),
    **dict.fromkeys(("first_token_time", "predicted_seconds", "guide_seconds"), _is_time),
    **dict.fromkeys(("request", "num_prompt_tokens", "max_tokens"), _is_count),
    **dict.fromkeys(("num_resumed_tokens", "num_external_tokens", "calls"), _is_count),
    **dict.fromkeys(("request_id", "id", "shed"), _is_text),
    **dict.fromkeys(("slo_class", "tenant"), _optional(_is_text)),
    **dict.fromkeys(("requests", "expired", "failed", "faults"), _are_counts),
    **dict.fromkeys(("counts", "drafted", "available", "block_ids"), _optional(_are_counts)),
    "pooling": (None, *get_args(Pooling)).__contains__,
    "priority": lambda value: type(value) is int and abs(value) < MOST,
    "slo": _optional(_row_of(*3 * (lambda value: value is None or (_is_number(value) and value > 0),))),
    "refused": _optional(
        lambda values: _row_of(_is_text)(values) or _row_of(_is_text, _is_time, _is_time)(values)
    ),
    "adoption": _optional(
        _row_of(_is_text, _is_number, _is_count, _is_count, _optional(lambda value: type(value) is list))
    ),
    "whole": _optional(_row_of(_is_text, _is_count, _is_count)),
    "step_id": _optional(_is_count),
    "rows": lambda values: _are_counts(values) and len(values) % 4 == 0,
    "drafts": _optional(_are_counts),
    "new_block_ids": _by_number(_are_counts),
    "admitted": _all(_row_of(_is_count, _is_count, _are_counts)),
    "released": _all(lambda value: _is_count(value) or _is_text(value)),
    "undelivered": _by_number(_is_count),
    "row_guide_seconds": _by_number(_is_number),
    "finished": _by_number(_REASONS.__contains__),
    "block_hashes": lambda value: _are_hashes(value) or _by_number(_are_hashes)(value),
    "verb": _is_text,
    "num_tokens": _optional(_is_count),
    **dict.fromkeys(("is_out", "is_scored", "is_guided"), lambda value: value is None or type(value) is bool),
}
"""Of the lines of a record; a field means the same in all calls that have it."""


def check_fields(values: Mapping[str, Any]) -> None:
    """Check the types of a line's fields.

    Raises
    ------
    ValueError : names the first that is wrong.
    """
    for name, value in values.items():
        check = _FIELDS.get(name)
        if check is not None and not check(value):
            raise ValueError(f"{name} is {quoted(value)}")


class Consistency:
    """Checks that calls speak of requests and steps which the calls before them have named."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._open: set[str] = set()
        self._steps: deque[ScheduleCall] = deque()

    def check(self, call: Call) -> None:
        """Check the next call.

        Raises
        ------
        ValueError : says what it speaks of in vain.
        """
        match call:
            case AddCall():
                self._add(call)
            case AbortCall():
                self._end(call.requests)
            case ScheduleCall():
                self._schedule(call)
            case UpdateCall():
                self._update(call)
            case HandoverCall():
                if call.verb in ("reserve", "fetched") and call.num_tokens is None:
                    raise ValueError(f"{call.verb} has no num_tokens")
                if call.verb == "free":
                    self._open.discard(call.id)

    def _add(self, call: AddCall) -> None:
        if call.request != len(self._ids):
            raise ValueError(f"request is {call.request}, the next is {len(self._ids)}")
        if call.request_id in self._open:
            raise ValueError(f"request_id {quoted(call.request_id)} is that of an open request")
        self._ids.append(call.request_id)
        if call.refused is None:
            self._open.add(call.request_id)

    def _schedule(self, call: ScheduleCall) -> None:
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

    def _update(self, call: UpdateCall) -> None:
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
