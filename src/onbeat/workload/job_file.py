"""Files of jobs: JSON lines, a job a line.

    {"class": "support", "start_ms": 0, "deadline_ms": 20000, "tenant": "a", "system_tokens": 800, "calls": [
        {"id": "plan", "input_tokens": 400, "output_tokens": 60, "schema": {"type": "object"}},
        {"input_tokens": 350, "output_tokens": 120, "think_ms": 400}]}

A call continues the one before it unless it has `continues` (the id of another call, or null to begin
anew), `quotes` or `after` (ids of calls whose answers its prompt holds, or which it only waits for). With 0
output tokens it wants the embedding of its input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import orjson

from onbeat.core.errors import ConfigError, quoted
from onbeat.files import read_text
from onbeat.workload.job import Call, Job
from onbeat.workload.lengths import MOST_TOKENS

_JOB_KEYS = frozenset({"class", "start_ms", "deadline_ms", "tenant", "system_tokens", "calls"})
_CALL_KEYS = frozenset(
    {"id", "input_tokens", "text", "output_tokens", "think_ms", "continues", "quotes", "after", "schema"}
)
CountTokens = Callable[[str], int]


def read_jobs(path: Path, count_tokens: CountTokens | None) -> list[Job]:
    """Read a file of jobs; those with a start are returned in its order.

    Parameters
    ----------
    path : JSON lines, plain or gzip.
    count_tokens : measures texts; None refuses them.

    Raises
    ------
    ConfigError : a line that is no job, or starts that some jobs have and others lack; the message names the
        line.
    """
    jobs = list[Job]()
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            jobs.append(_job(orjson.loads(line), count_tokens))
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"{where}: not JSON ({error}): {line[:80]!r}") from error
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        if (jobs[-1].start is None) != (jobs[0].start is None):
            raise ConfigError(
                f"{where}: some jobs have start_ms and others do not; give it to all or to none"
            )
    if not jobs:
        raise ConfigError(f"{path}: the file has no jobs")
    return sorted(jobs, key=lambda job: job.start or 0.0)


def _job(fields: Any, count_tokens: CountTokens | None) -> Job:
    _check_keys(fields, _JOB_KEYS, "a job")
    listed = fields.get("calls")
    if not isinstance(listed, list):
        raise ConfigError(f"calls is {listed!r}; it must be a list of calls")
    places, calls = dict[str, int](), list[Call]()
    for index, each in enumerate(listed):
        calls.append(_call(each, index, places, count_tokens))
        name = _text(each, "id")
        if name in places:
            raise ConfigError(f"two calls have the id {name!r}; give each another")
        if name is not None:
            places[name] = index
    start = fields.get("start_ms")
    return Job(
        calls=tuple(calls),
        start=None if start is None else _number(fields, "start_ms", 0.0) / 1e3,
        deadline=_number(fields, "deadline_ms", inf) / 1e3,
        kind=_text(fields, "class") or "job",
        tenant=_text(fields, "tenant"),
        system_tokens=_whole(fields, "system_tokens", 0),
    )


def _call(fields: Any, index: int, places: Mapping[str, int], count_tokens: CountTokens | None) -> Call:
    _check_keys(fields, _CALL_KEYS, "a call")
    text, schema = _text(fields, "text"), fields.get("schema")
    if not (schema is None or isinstance(schema, dict)):
        raise ConfigError(f"schema of call {index} is {schema!r}; it must be an object")
    if text is not None and count_tokens is None:
        raise ConfigError(
            f"call {index} has a text, whose length only a tokenizer can tell: give --tokenizer, or "
            "input_tokens in place of text"
        )
    call = Call(
        input_tokens=_whole(fields, "input_tokens", None)
        if text is None or count_tokens is None
        else max(1, count_tokens(text)),
        output_tokens=_whole(fields, "output_tokens", None),
        think=_number(fields, "think_ms", 0.0) / 1e3,
        quotes=_places(fields, "quotes", places),
        after=_places(fields, "after", places),
        text=text,
        schema=schema,
    )
    if "continues" in fields:
        continued = fields["continues"]
        return replace(call, continues=None if continued is None else _place(continued, "continues", places))
    is_next = index > 0 and "quotes" not in fields and "after" not in fields
    return replace(call, continues=index - 1) if is_next else call


def _check_keys(fields: Any, known: frozenset[str], what: str) -> None:
    if not isinstance(fields, dict):
        raise ConfigError(f"{what} must be an object, got {str(fields)[:80]!r}")
    if unknown := sorted(fields.keys() - known):
        raise ConfigError(f"{what} has no field {unknown[0]!r}; there are {', '.join(sorted(known))}")


def _number(fields: Mapping[str, Any], name: str, default: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ConfigError(f"{name} is {value!r}; it must be a number")
    return float(value)


def _whole(fields: Mapping[str, Any], name: str, default: int | None) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value > MOST_TOKENS:
        raise ConfigError(f"{name} is {quoted(value)}; it must be a whole number of at most {MOST_TOKENS}")
    return value


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if not (value is None or (isinstance(value, str) and value)):
        raise ConfigError(f"{name} is {value!r}; it must be a text")
    return value


def _places(fields: Mapping[str, Any], name: str, places: Mapping[str, int]) -> tuple[int, ...]:
    listed = fields.get(name, [])
    if not isinstance(listed, list):
        raise ConfigError(f"{name} is {listed!r}; it must be a list of ids")
    return tuple(_place(each, name, places) for each in listed)


def _place(name: Any, what: str, places: Mapping[str, int]) -> int:
    if not isinstance(name, str) or name not in places:
        known = ", ".join(map(repr, places)) or "none"
        raise ConfigError(
            f"{what} names call {name!r}, which does not come before it; before it are: {known}"
        )
    return places[name]
