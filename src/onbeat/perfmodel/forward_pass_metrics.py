"""Forward-pass metrics, version 1: one message for each step of vLLM under Dynamo, of SGLang, and of others.

A message is a map with names, as ai-dynamo/dynamo and sgl-project/sglang define it (`ForwardPassMetrics`).
Further fields are allowed, as its own readers allow them. Everything else that is not as it must be is an
error: a number in the wrong field would make a wrong profile, and nobody would see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from onbeat.core.errors import ConfigError, quoted
from onbeat.core.step import BatchShape
from onbeat.perfmodel.logged_step import LoggedStep, rows_shape
from onbeat.typed import Count, NotNegative, convert

HINT = "; this onbeat reads forward-pass metrics of version 1, whose fields docs/other-engines.md names"


class _Scheduled(msgspec.Struct, frozen=True):
    num_prefill_requests: Count
    sum_prefill_tokens: Count
    sum_prefill_kv_tokens: Count
    var_prefill_length: NotNegative
    num_decode_requests: Count
    sum_decode_kv_tokens: Count
    var_decode_kv_tokens: NotNegative


class _Queued(msgspec.Struct, frozen=True):
    num_prefill_requests: Count
    sum_prefill_tokens: Count
    num_decode_requests: Count
    sum_decode_kv_tokens: Count


class ForwardPassMetrics(msgspec.Struct, frozen=True):
    """A message. Fields that are not named here are passed over."""

    version: Literal[1]
    worker_id: str
    dp_rank: Count
    counter_id: Count
    wall_time: NotNegative
    scheduled_requests: _Scheduled
    queued_requests: _Queued


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
    message : plain values.
    where : it stands, for errors.

    Raises
    ------
    ConfigError : another version, a field that is missing or stands elsewhere, or a value that cannot be.
    """
    return forward_pass(convert(ForwardPassMetrics, message, where, hint=HINT), where)


def forward_pass(message: ForwardPassMetrics, where: str) -> ForwardPass:
    """Return what a message says.

    Raises
    ------
    ConfigError : sums that no step has, which numbers in wrong fields would make.
    """
    scheduled, queued = message.scheduled_requests, message.queued_requests
    prompts, tokens = scheduled.num_prefill_requests, scheduled.sum_prefill_tokens
    decodes, context = scheduled.num_decode_requests, scheduled.sum_decode_kv_tokens
    shape = rows_shape(
        num_prompts=prompts,
        prompt_tokens=tokens,
        prompt_cached_tokens=scheduled.sum_prefill_kv_tokens,
        num_decodes=decodes,
        decode_cached_tokens=context,
        prompt_variance=scheduled.var_prefill_length,
    )
    wall, wrong = message.wall_time, ""
    if tokens < prompts:
        wrong = f"sum_prefill_tokens {tokens} is less than num_prefill_requests {prompts}"
    elif context < decodes:
        wrong = f"sum_decode_kv_tokens {context} is less than num_decode_requests {decodes}"
    elif context and not decodes:
        wrong = f"sum_decode_kv_tokens is {context}, but num_decode_requests is 0"
    elif wall > 0 and not shape.num_new_tokens:
        wrong = f"wall_time is {wall:g} s, but nothing was scheduled"
    elif not wall and shape.num_new_tokens:
        wrong = f"wall_time is 0, but {shape.num_new_tokens} tokens were scheduled"
    if wrong:
        raise ConfigError(f"{where}: {wrong}; no step is like that. Are the fields in their places?")
    return ForwardPass(
        worker=f"{message.worker_id}/{message.dp_rank}",
        counter=message.counter_id,
        wall=wall,
        shape=shape,
        num_queued=queued.num_prefill_requests + queued.num_decode_requests,
    )


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
