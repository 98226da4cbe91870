"""Forward-pass metrics, version 1: one message for each step of vLLM under Dynamo, of SGLang, and of others.

A message is a map with names, as ai-dynamo/dynamo and sgl-project/sglang define it (`ForwardPassMetrics`).
Further fields are allowed, as its own readers allow them. Everything else that is not as it must be is an
error: a number in the wrong field would make a wrong profile, and nobody would see it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onbeat.core.errors import ConfigError, quoted
from onbeat.core.step import BatchShape
from onbeat.perfmodel.logged_step import LoggedStep, rows_shape

VERSION = 1
_COUNTS = (
    *("num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens"),
    *("num_decode_requests", "sum_decode_kv_tokens"),
)
_SPREADS = ("var_prefill_length", "var_decode_kv_tokens")
_QUEUED_COUNTS = tuple(name for name in _COUNTS if name != "sum_prefill_kv_tokens")


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One message."""

    worker: str
    """Its worker and data-parallel rank: each has steps of its own."""
    counter: int
    wall: float
    """Seconds; 0 of a heartbeat."""
    shape: BatchShape
    num_queued: int
    """Requests that waited."""


def read_forward_pass(message: object, where: str) -> ForwardPass:
    """Return what a message says.

    Parameters
    ----------
    where : it stands, for errors.

    Raises
    ------
    ConfigError : another version, a field that is missing or stands elsewhere, or a value that cannot be.
    """
    top = _Fields(message, where, "")
    version = top.items.get("version")
    if version != VERSION or isinstance(version, bool):
        raise ConfigError(
            f"{where}: forward-pass metrics of version {quoted(version)}; this onbeat reads version "
            f"{VERSION}. Use an engine that sends it, or a newer onbeat"
        )
    scheduled, queued = top.part("scheduled_requests"), top.part("queued_requests")
    counts = {name: scheduled.count(name) for name in _COUNTS}
    spread = {name: scheduled.number(name) for name in _SPREADS}
    num_queued = sum(queued.count(name) for name in _QUEUED_COUNTS if name.startswith("num_"))
    found = ForwardPass(
        worker=f"{top.text('worker_id')}/{top.count('dp_rank')}",
        counter=top.count("counter_id"),
        wall=top.number("wall_time"),
        shape=rows_shape(
            num_prompts=counts["num_prefill_requests"],
            prompt_tokens=counts["sum_prefill_tokens"],
            prompt_cached_tokens=counts["sum_prefill_kv_tokens"],
            num_decodes=counts["num_decode_requests"],
            decode_cached_tokens=counts["sum_decode_kv_tokens"],
            prompt_variance=spread["var_prefill_length"],
        ),
        num_queued=num_queued,
    )
    _check(found, counts, where)
    return found


def _check(found: ForwardPass, counts: Mapping[str, int], where: str) -> None:
    """Refuse sums that no step has, which numbers in wrong fields would make."""
    prompts, tokens = counts["num_prefill_requests"], counts["sum_prefill_tokens"]
    decodes, context = counts["num_decode_requests"], counts["sum_decode_kv_tokens"]
    wrong = ""
    if tokens < prompts:
        wrong = f"sum_prefill_tokens {tokens} is less than num_prefill_requests {prompts}"
    elif context < decodes:
        wrong = f"sum_decode_kv_tokens {context} is less than num_decode_requests {decodes}"
    elif context and not decodes:
        wrong = f"sum_decode_kv_tokens is {context}, but num_decode_requests is 0"
    elif found.wall > 0 and not found.shape.num_new_tokens:
        wrong = f"wall_time is {found.wall:g} s, but nothing was scheduled"
    elif not found.wall and found.shape.num_new_tokens:
        wrong = f"wall_time is 0, but {found.shape.num_new_tokens} tokens were scheduled"
    if wrong:
        raise ConfigError(f"{where}: {wrong}; no step is like that. Are the fields in their places?")


class StepOrder:
    """Turns messages and their times into steps, each with its distance from the step before."""

    def __init__(self) -> None:
        self.num_heartbeats = 0
        self.num_lost = 0
        self._last: dict[str, tuple[ForwardPass, float | None]] = {}

    def take(self, message: ForwardPass, received: float | None, where: str) -> LoggedStep | None:
        """Return the step of a message; None of a heartbeat.

        Parameters
        ----------
        received : when it came, seconds of any clock; None where nobody wrote it down.

        Raises
        ------
        ConfigError : it is older than the one before.
        """
        before, came = self._last.get(message.worker, (None, None))
        self._last[message.worker] = (message, received)
        if before is not None:
            _check_order(before, came, message, received, where)
            self.num_lost += message.counter - before.counter - 1
        if not message.shape.num_new_tokens:
            self.num_heartbeats += 1
            return None
        distance = None
        if before is not None and came is not None and received is not None:
            is_next = message.counter == before.counter + 1 and before.shape.num_new_tokens > 0
            # A request that generates was in the step before, and one that waited had work to wait for.
            if is_next and (message.shape.num_decodes or before.num_queued):
                distance = received - came
        return LoggedStep(message.shape, message.wall, distance)


def _check_order(
    before: ForwardPass, came: float | None, message: ForwardPass, received: float | None, where: str
) -> None:
    if message.counter <= before.counter:
        raise ConfigError(
            f"{where}: counter_id {message.counter} of worker {quoted(message.worker)} comes after "
            f"{before.counter}; messages must be in their order, and of one run of the engine"
        )
    if came is not None and received is not None and received < came:
        raise ConfigError(
            f"{where}: its time {received:g} s is before that of the message before it, {came:g} s; times "
            "must not go back. Are two recordings joined?"
        )


class _Fields:
    """A map of the message, which knows where it stands."""

    def __init__(self, items: object, where: str, place: str) -> None:
        self._where = where
        self._place = place
        if not isinstance(items, dict):
            kind = "an array" if isinstance(items, list) else repr(items)[:60]
            raise ConfigError(
                f"{where}: {place or 'the message'} is {kind}, not a map with names; forward-pass metrics of "
                f"version {VERSION} are maps"
            )
        self.items: Mapping[str, Any] = items

    def part(self, name: str) -> _Fields:
        return _Fields(self._raw(name), self._where, name)

    def count(self, name: str) -> int:
        value = self._raw(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._error(name, value, "a whole number of at least 0")
        return value

    def number(self, name: str) -> float:
        value = self._raw(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf:
            raise self._error(name, value, "a finite number of at least 0")
        return float(value)

    def text(self, name: str) -> str:
        value = self._raw(name)
        if not isinstance(value, str):
            raise self._error(name, value, "a text")
        return value

    def _raw(self, name: str) -> Any:
        if name not in self.items:
            place = f" in {self._place}" if self._place else ""
            raise ConfigError(
                f"{self._where}: the field {name} is missing{place}; forward-pass metrics of version "
                f"{VERSION} have it there"
            )
        return self.items[name]

    def _error(self, name: str, value: object, wanted: str) -> ConfigError:
        place = f"{self._place}.{name}" if self._place else name
        return ConfigError(f"{self._where}: {place} is {quoted(value)}; it must be {wanted}")
