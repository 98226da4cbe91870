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
from math import inf
from pathlib import Path
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType, field

from onbeat.core.errors import ConfigError
from onbeat.files import read_lines
from onbeat.typed import Number, Table, Text
from onbeat.workload.job import Call, Job
from onbeat.workload.lengths import MOST_TOKENS

CountTokens = Callable[[str], int]


class _Call(Table, kw_only=True):
    id: Text | None = None
    input_tokens: Annotated[int, Meta(ge=1, le=MOST_TOKENS)] | None = None
    text: Text | None = None
    output_tokens: Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
    think_ms: Number | None = None
    continues: str | UnsetType | None = UNSET
    quotes: tuple[str, ...] | UnsetType = UNSET
    after: tuple[str, ...] | UnsetType = UNSET
    schema: dict[str, Any] | None = None


class _Job(Table, kw_only=True):
    kind: Text | None = field(name="class", default=None)
    start_ms: Number | None = None
    deadline_ms: Number | None = None
    tenant: Text | None = None
    system_tokens: Annotated[int, Meta(ge=0, le=MOST_TOKENS)] = 0
    calls: tuple[_Call, ...]


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
    for number, entry in read_lines(_Job, path):
        where = f"{path}, line {number}"
        try:
            jobs.append(_job(entry, count_tokens))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        if (jobs[-1].start is None) != (jobs[0].start is None):
            raise ConfigError(
                f"{where}: some jobs have start_ms and others do not; give it to all or to none"
            )
    if not jobs:
        raise ConfigError(f"{path}: the file has no jobs")
    return sorted(jobs, key=lambda job: job.start or 0.0)


def _job(entry: _Job, count_tokens: CountTokens | None) -> Job:
    places, calls = dict[str, int](), list[Call]()
    for index, each in enumerate(entry.calls):
        calls.append(_call(each, index, places, count_tokens))
        if each.id in places:
            raise ConfigError(f"two calls have the id {each.id!r}; give each another")
        if each.id is not None:
            places[each.id] = index
    return Job(
        calls=tuple(calls),
        start=None if entry.start_ms is None else entry.start_ms / 1e3,
        deadline=inf if entry.deadline_ms is None else entry.deadline_ms / 1e3,
        kind=entry.kind or "job",
        tenant=entry.tenant,
        system_tokens=entry.system_tokens,
    )


def _call(entry: _Call, index: int, places: Mapping[str, int], count_tokens: CountTokens | None) -> Call:
    input_tokens = entry.input_tokens
    if entry.text is not None:
        if count_tokens is None:
            raise ConfigError(
                f"call {index} has a text, whose length only a tokenizer can tell: give --tokenizer, or "
                "input_tokens in place of text"
            )
        input_tokens = max(1, count_tokens(entry.text))
    if input_tokens is None:
        raise ConfigError(f"call {index} lacks input_tokens; give them, or its text")
    call = Call(
        input_tokens=input_tokens,
        output_tokens=entry.output_tokens,
        think=(entry.think_ms or 0.0) / 1e3,
        quotes=tuple(_place(each, "quotes", places) for each in entry.quotes or ()),
        after=tuple(_place(each, "after", places) for each in entry.after or ()),
        text=entry.text,
        schema=entry.schema,
    )
    if entry.continues is not UNSET:
        name = entry.continues
        return replace(call, continues=None if name is None else _place(name, "continues", places))
    is_next = index > 0 and entry.quotes is UNSET and entry.after is UNSET
    return replace(call, continues=index - 1) if is_next else call


def _place(name: str, what: str, places: Mapping[str, int]) -> int:
    if name not in places:
        known = ", ".join(map(repr, places)) or "none"
        raise ConfigError(
            f"{what} names call {name!r}, which does not come before it; before it are: {known}"
        )
    return places[name]
