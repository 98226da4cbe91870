"""Jobs: chains of calls with one deadline, in which later prompts contain earlier answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite
from typing import Any

from onbeat.core.errors import ConfigError


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
    says_calls_left: bool = True
    """Whether its calls say how many follow; else a server has to learn it."""

    def __post_init__(self) -> None:
        if not self.calls:
            raise ConfigError("a job has no calls; give at least one")
        if not self.deadline > 0:
            raise ConfigError(f"the deadline of a job is {self.deadline:g} s; it must be above 0")
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
