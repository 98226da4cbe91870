"""Jobs: chains of calls with one deadline, in which later prompts contain earlier answers.

Their files are JSON lines, a job a line.

    {"class": "support", "start_ms": 0, "deadline_ms": 20000, "tenant": "a", "system_tokens": 800, "calls": [
        {"id": "plan", "input_tokens": 400, "output_tokens": 60, "schema": {"type": "object"}},
        {"input_tokens": 350, "output_tokens": 120, "think_ms": 400}]}

A call continues the one before it unless it has `continues` (the id of another call, or null to begin
anew), `quotes` or `after` (ids of calls whose answers its prompt holds, or which it only waits for). With 0
output tokens it wants the embedding of its input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite
from pathlib import Path
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType, field

from onbeat.core.errors import ConfigError
from onbeat.core.slo import LONGEST_OBJECTIVE
from onbeat.files import read_lines
from onbeat.typed import Number, Table, Text
from onbeat.workload.arrivals import MOST_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request of a job. It is sent once the calls that it needs have ended and its think time has passed.

    Its prompt is: the prompt and the answer of the call that it continues (without one, the job's system
    prompt), the answers that it quotes, and its own input.
    """

    input_tokens: int
    """Of its own: a question, or what a tool has returned."""
    output_tokens: int
    """0 where it wants the embedding of its input, not an answer."""
    think: float = 0.0
    """Seconds between the end of the calls that it needs and its arrival: a person reads, a tool runs."""
    continues: int | None = None
    """The call whose conversation it goes on with, by its place in the job; None begins another one."""
    quotes: tuple[int, ...] = ()
    """Calls whose answers its prompt contains beside that."""
    after: tuple[int, ...] = ()
    """Calls that it waits for without reading their answers."""
    text: str | None = None
    """The words of its input; None: words are made up."""
    schema: Mapping[str, Any] | None = None
    """JSON schema that its answer must match; None: any text."""

    @property
    def needs(self) -> tuple[int, ...]:
        """The calls that must have ended before it begins, each once."""
        first = () if self.continues is None else (self.continues,)
        return tuple(dict.fromkeys((*first, *self.quotes, *self.after)))


@dataclass(frozen=True, kw_only=True)
class Job:
    """Calls that have a purpose together.

    Raises
    ------
    ConfigError : no calls, a length below 1, a time that is negative or not finite, or a call that needs
        one that does not come before it.
    """

    calls: tuple[Call, ...]
    start: float | None = None
    """When its first calls may begin, seconds from the start of the run; None where arrivals are drawn."""
    deadline: float = inf
    """Seconds from its start to the end of its last call; infinite for none."""
    kind: str = "job"
    """Jobs of a kind have their system prompt in common, and are told apart in results."""
    tenant: str | None = None
    system_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.calls:
            raise ConfigError("a job has no calls; give at least one")
        if not (0 < self.deadline <= LONGEST_OBJECTIVE or self.deadline == inf):
            raise ConfigError(
                f"the deadline of a job is {self.deadline:g} s; it must be above 0 and at most 24 h"
            )
        if self.system_tokens < 0:
            raise ConfigError(f"system_tokens of a job is {self.system_tokens}; it must be 0 or more")
        if self.start is not None and not (isfinite(self.start) and self.start >= 0):
            raise ConfigError(f"a job starts at {self.start:g} s; give a finite time, 0 or more")
        for index, call in enumerate(self.calls):
            self._check(index, call)

    def _check(self, index: int, call: Call) -> None:
        for what, value, least in (
            ("input_tokens", call.input_tokens, 1),
            ("output_tokens", call.output_tokens, 0),
        ):
            if value < least:
                raise ConfigError(f"{what} of call {index} is {value}; it must be at least {least}")
        if not (isfinite(call.think) and call.think >= 0):
            raise ConfigError(f"the think time of call {index} is {call.think:g} s; it must be 0 or more")
        if any(not 0 <= each < index for each in call.needs):
            raise ConfigError(
                f"call {index} needs call {max(call.needs)}, which does not come before it; list a job's "
                "calls in an order in which they can run"
            )

        for each in (*call.quotes, *(() if call.continues is None else (call.continues,))):
            if not self.calls[each].output_tokens:
                raise ConfigError(
                    f"call {index} goes on with or quotes call {each}, which has an embedding and no answer; "
                    "let it come after that call ('after')"
                )

    @cached_property
    def calls_left(self) -> tuple[int, ...]:
        """How many answers follow each call, one after another; calls that run at once count as one."""
        left = [0] * len(self.calls)
        for index in range(len(self.calls) - 1, -1, -1):
            for each in self.calls[index].needs:
                left[each] = max(left[each], left[index] + (self.calls[index].output_tokens > 0))
        return tuple(left)

    @cached_property
    def followers(self) -> tuple[tuple[int, ...], ...]:
        """Which calls need each call."""
        found: list[list[int]] = [[] for _ in self.calls]
        for index, call in enumerate(self.calls):
            for each in call.needs:
                found[each].append(index)
        return tuple(map(tuple, found))


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
