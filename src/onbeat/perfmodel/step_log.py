"""Files of recorded steps: one JSON object a line, plain or gzip.

The first line is the header::

    {"file": "onbeat-steps", "schema_version": 1, "engine": "vllm", "model": ..., ...}

with any of the fields of `StepOrigin`. Each further line is one step, in the order in which they ended:

* ``{"end": 12.5, "seconds": 0.02, "num_prompts": 1, "prompt_tokens": 64, "num_decodes": 3, ...}``: the fields
  of `STEP_FIELDS`. What is left out is 0. One of `end` (seconds of one clock), `seconds` (the engine's own
  measure) and `distance` (seconds since the end of the step before) must be there. `follows_idle` says that
  there was nothing to do before, `request_seconds` what the server of a request did beside its steps;
* ``{"received": 12.5, "fpm": {...}}``: a message of forward-pass metrics as it came.

A file of Dynamo's traces (`dynamo.fpm.trace.v1`), which has no header, is read too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from onbeat.core.errors import ConfigError, quoted
from onbeat.core.step import BatchShape
from onbeat.files import read_text
from onbeat.perfmodel.forward_pass_metrics import StepOrder, read_forward_pass
from onbeat.perfmodel.logged_step import LoggedStep, StepOrigin, StepStream, rows_shape

FILE_KIND = "onbeat-steps"
SCHEMA_VERSION = 1
STEP_FIELDS = (
    *("num_prompts", "prompt_tokens", "prompt_cached_tokens"),
    *("num_decodes", "decode_cached_tokens"),
)
"""Counts of a step's line; `logged_step.rows_shape` says what they are."""
_TIMES = ("end", "seconds", "distance")
_REQUEST = "request_seconds"
_DYNAMO_TRACE = "dynamo.fpm.trace.v1"
_TEXTS = ("engine", "engine_version", "model", "device", "device_name", "dtype")


def header_line(origin: StepOrigin) -> str:
    """Return the first line of a file."""
    said = {name: value for name, value in asdict(origin).items() if value is not None}
    return json.dumps({"file": FILE_KIND, "schema_version": SCHEMA_VERSION, **said})


def read_step_log(path: Path) -> StepStream:
    """Read a file of recorded steps.

    Raises
    ------
    ConfigError : it cannot be read, is something else, or a line is not as it must be; names the line.
    """
    lines = _lines(path)
    number, first = next(lines, (0, {}))
    if not number:
        raise ConfigError(f"{path} is empty; record steps first")
    if first.get("schema") == _DYNAMO_TRACE:
        return _stream(path, StepOrigin(), [(number, first), *lines])
    return _stream(path, _origin(first, f"{path}, line {number}"), lines)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    text = read_text(path, "the recorded steps")
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number > 1 and not text.endswith("\n") and number == text.count("\n") + 1:
                return  # whoever wrote it was killed in the middle of a line
            raise ConfigError(
                f"{where} is not JSON ({error}); a file of recorded steps is one JSON object a line"
            ) from error
        if not isinstance(values, dict):
            raise ConfigError(f"{where} holds a JSON {type(values).__name__}; it must be an object")
        event = values.get("event")  # of the envelope that Dynamo's traces have
        yield number, event if isinstance(event, dict) else values


def _origin(header: Mapping[str, Any], where: str) -> StepOrigin:
    if header.get("file") != FILE_KIND:
        raise ConfigError(
            f'{where}: this is no file of recorded steps: its first line must have "file": "{FILE_KIND}" '
            "(docs/other-engines.md has the form)"
        )
    if header.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"{where}: schema_version is {quoted(header.get('schema_version'))}; this onbeat reads version "
            f"{SCHEMA_VERSION}. Record the steps again, or use a newer onbeat"
        )
    known = [each.name for each in fields(StepOrigin)]
    said = {name: value for name, value in header.items() if name in known and value is not None}
    for name, value in said.items():
        is_text = name in _TEXTS
        least = 0 if name == "steps_ahead" else 1
        is_good = isinstance(value, str) if is_text else type(value) is int and value >= least
        if not is_good:
            wanted = "a text" if is_text else f"a whole number of at least {least}"
            raise ConfigError(f"{where}: {name} is {quoted(value)}; it must be {wanted}")
    return StepOrigin(**said)


def _stream(path: Path, origin: StepOrigin, lines: Iterable[tuple[int, dict[str, Any]]]) -> StepStream:
    order, own, steps, is_whole = StepOrder(), _OwnOrder(), [], True
    for number, values in lines:
        where = f"{path}, line {number}"
        if "fpm" in values:
            received = _received(values, where)
            is_whole &= values.get("capture_mode") != "sampled"
            step = order.take(read_forward_pass(values["fpm"], where), received, where)
        else:
            step = own.take(values, where)
        if step is not None:
            steps.append(step)
    if not steps:
        idle = (
            f", only {order.num_heartbeats} signs of life of an idle engine" if order.num_heartbeats else ""
        )
        raise ConfigError(f"{path} has no steps{idle}; send the engine requests while its steps are recorded")
    num_lost = order.num_lost if is_whole else 0
    return StepStream(origin, steps, order.num_heartbeats, num_lost, own.request_seconds)


def _received(values: Mapping[str, Any], where: str) -> float | None:
    if values.get("schema") == _DYNAMO_TRACE:
        # Milliseconds are too coarse for the distance between two steps.
        return None
    return _time(values, "received", where) if "received" in values else None


class _OwnOrder:
    """Turns lines of the own form into steps."""

    def __init__(self) -> None:
        self.request_seconds: list[float] = []
        self._end: float | None = None

    def take(self, values: Mapping[str, Any], where: str) -> LoggedStep | None:
        known = (*STEP_FIELDS, *_TIMES, _REQUEST, "follows_idle")
        for name in values:
            if name not in known:
                raise ConfigError(f"{where}: unknown field {quoted(name)}; known are {', '.join(known)}")
        times = {name: _time(values, name, where) for name in _TIMES if name in values}
        if not times:
            raise ConfigError(f"{where}: the step has no time; give one of {', '.join(_TIMES)}")
        if _REQUEST in values:
            self.request_seconds.append(_time(values, _REQUEST, where))
        shape = self._shape(values, where)
        before, self._end = self._end, times.get("end")
        distance = None
        if before is not None and self._end is not None:
            distance = self._end - before
            if distance < 0:
                raise ConfigError(
                    f"{where}: end {self._end:g} s is before that of the step before it, {before:g} s; times "
                    "must not go back"
                )
        follows_idle = values.get("follows_idle", False)
        if not isinstance(follows_idle, bool):
            raise ConfigError(f"{where}: follows_idle is {quoted(follows_idle)}; it must be true or false")
        known_distance = times.get("distance", None if follows_idle else distance)
        return LoggedStep(shape, times.get("seconds", 0.0), known_distance)

    @staticmethod
    def _shape(values: Mapping[str, Any], where: str) -> BatchShape:
        counts = {name: values.get(name, 0) for name in STEP_FIELDS}
        for name, value in counts.items():
            if type(value) is not int or value < 0:
                raise ConfigError(f"{where}: {name} is {quoted(value)}; it must be a whole number, 0 or more")
        if counts["prompt_tokens"] < counts["num_prompts"]:
            raise ConfigError(
                f"{where}: prompt_tokens {counts['prompt_tokens']} is less than num_prompts "
                f"{counts['num_prompts']}; each prompt of a step has a token in it"
            )
        shape = rows_shape(**counts)
        if not shape.num_new_tokens:
            raise ConfigError(f"{where}: the step computes nothing; leave empty steps out")
        return shape


def _time(values: Mapping[str, Any], name: str, where: str) -> float:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"{where}: {name} is {quoted(value)}; it must be finite seconds of at least 0")
    return float(value)
