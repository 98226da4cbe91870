"""Files of recorded steps: one JSON object a line, plain or gzip.

The first line is the header::

    {"file": "onbeat-steps", "schema_version": 1, "engine": "vllm", "model": ..., ...}

with any of the fields of `StepOrigin`. Each further line is one step, in the order in which they ended:

* ``{"end": 12.5, "seconds": 0.02, "num_prompts": 1, "prompt_tokens": 64, "num_decodes": 3, ...}``: the fields
  of `_Step`. What is left out is 0. One of `end` (seconds of one clock), `seconds` (the engine's own
  measure) and `distance` (seconds since the end of the step before) must be there. `follows_idle` says that
  there was nothing to do before, `request_seconds` what the server of a request did beside its steps;
* ``{"received": 12.5, "fpm": {...}}``: a message of forward-pass metrics as it came.

A file of Dynamo's traces (`dynamo.fpm.trace.v1`), which has no header, is read too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from onbeat.core.errors import ConfigError, quoted
from onbeat.core.step import BatchShape
from onbeat.files import read_lines
from onbeat.perfmodel.forward_pass_metrics import HINT, ForwardPassMetrics, StepOrder, forward_pass
from onbeat.perfmodel.logged_step import LoggedStep, StepOrigin, StepStream, rows_shape
from onbeat.typed import Count, NotNegative, Table, convert, decode

FILE_KIND = "onbeat-steps"
SCHEMA_VERSION = 1
_DYNAMO_TRACE = "dynamo.fpm.trace.v1"
_HINT = "; a file of recorded steps is one JSON object a line (docs/other-engines.md has the form)"


class _Step(Table):
    """A line of the own form."""

    num_prompts: Count = 0
    """`logged_step.rows_shape` says what this and the next four are."""
    prompt_tokens: Count = 0
    prompt_cached_tokens: Count = 0
    num_decodes: Count = 0
    decode_cached_tokens: Count = 0
    end: NotNegative | None = None
    seconds: NotNegative | None = None
    distance: NotNegative | None = None
    request_seconds: NotNegative | None = None
    follows_idle: bool = False

    def shape(self) -> BatchShape:
        """Return its batch.

        Raises
        ------
        ConfigError : no time, no token, or fewer tokens than prompts.
        """
        if self.end is None and self.seconds is None and self.distance is None:
            raise ConfigError("the step has no time; give one of end, seconds, distance")
        if self.prompt_tokens < self.num_prompts:
            raise ConfigError(
                f"prompt_tokens {self.prompt_tokens} is less than num_prompts {self.num_prompts}; each "
                "prompt of a step has a token in it"
            )
        shape = rows_shape(
            num_prompts=self.num_prompts,
            prompt_tokens=self.prompt_tokens,
            prompt_cached_tokens=self.prompt_cached_tokens,
            num_decodes=self.num_decodes,
            decode_cached_tokens=self.decode_cached_tokens,
        )
        if not shape.num_new_tokens:
            raise ConfigError("the step computes nothing; leave empty steps out")
        return shape


class _Message(msgspec.Struct):
    """A line with forward-pass metrics; fields that are not named here are passed over."""

    fpm: ForwardPassMetrics
    received: NotNegative | None = None
    capture_mode: str = ""


class _Event(msgspec.Struct):
    """A line of Dynamo's traces in its envelope."""

    event: _Message


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
    lines = read_lines(msgspec.Raw, path, "the recorded steps", hint=_HINT, may_be_cut=True)
    number, first = next(lines, (0, msgspec.Raw(b"")))
    if not number:
        raise ConfigError(f"{path} is empty; record steps first")
    where = f"{path}, line {number}"
    header = decode(dict[str, Any], first, where, hint=_HINT)
    event = header.get("event")
    if (event if isinstance(event, dict) else header).get("schema") == _DYNAMO_TRACE:
        return _stream(path, StepOrigin(), chain([(number, first)], lines), is_trace=True)
    return _stream(path, _origin(header, where), lines)


def _origin(header: Mapping[str, Any], where: str) -> StepOrigin:
    if header.get("file") != FILE_KIND:
        raise ConfigError(f'{where}: its first line must have "file": "{FILE_KIND}"{_HINT}')
    if header.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"{where}: schema_version is {quoted(header.get('schema_version'))}; this onbeat reads version "
            f"{SCHEMA_VERSION}. Record the steps again, or use a newer onbeat"
        )
    known = {each.name for each in fields(StepOrigin)}
    return convert(StepOrigin, {name: each for name, each in header.items() if name in known}, where)


def _stream(
    path: Path, origin: StepOrigin, lines: Iterable[tuple[int, msgspec.Raw]], *, is_trace: bool = False
) -> StepStream:
    order, own, steps, is_whole = StepOrder(), _OwnOrder(), [], True
    for number, line in lines:
        where, text = f"{path}, line {number}", bytes(line)
        if b'"fpm"' in text:
            is_event = b'"event"' in text
            told = (
                decode(_Event, text, where, hint=HINT).event
                if is_event
                else decode(_Message, text, where, hint=HINT)
            )
            is_whole &= told.capture_mode != "sampled"
            # Milliseconds, as a trace has them, are too coarse for the distance between two steps.
            step = order.take(forward_pass(told.fpm, where), None if is_trace else told.received, where)
        else:
            step = own.take(decode(_Step, text, where, hint=_HINT), where)
        if step is not None:
            steps.append(step)
    if not steps:
        idle = (
            f", only {order.num_heartbeats} signs of life of an idle engine" if order.num_heartbeats else ""
        )
        raise ConfigError(f"{path} has no steps{idle}; send the engine requests while its steps are recorded")
    num_lost = order.num_lost if is_whole else 0
    return StepStream(origin, steps, order.num_heartbeats, num_lost, own.request_seconds)


class _OwnOrder:
    """Turns lines of the own form into steps."""

    def __init__(self) -> None:
        self.request_seconds: list[float] = []
        self._end: float | None = None

    def take(self, step: _Step, where: str) -> LoggedStep:
        try:
            shape = step.shape()
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        if step.request_seconds is not None:
            self.request_seconds.append(step.request_seconds)
        before, self._end = self._end, step.end
        distance = None
        if before is not None and step.end is not None:
            distance = step.end - before
            if distance < 0:
                raise ConfigError(
                    f"{where}: end {step.end:g} s is before that of the step before it, {before:g} s; times "
                    "must not go back"
                )
        if step.distance is not None or step.follows_idle:
            distance = step.distance
        return LoggedStep(shape, step.seconds or 0.0, distance)
