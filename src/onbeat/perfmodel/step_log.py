"""Steps that engines tell of: forward-pass metrics, version 1, and tables of measured steps.

A message of the metrics is one step of vLLM under Dynamo, of SGLang or of others: a map with names, as
ai-dynamo/dynamo and sgl-project/sglang define it (`ForwardPassMetrics`). Further fields are allowed, as its
own readers allow them. Everything else that is not as it must be is an error: a number in the wrong field
would make a wrong profile, and nobody would see it. A file has a message a line, plain or gzip, as it came
(``{"received": 12.5, "fpm": {...}}``) or in the envelope of Dynamo's traces (`dynamo.fpm.trace.v1`).

A table is a CSV file, gzip or plain, one row a step: `batch` requests with `new_tokens` new tokens each,
after `context` tokens that are cached already; one new token is a decode, more are a chunk of a prompt.
Beside them `decodes` rows may decode, after `decode_context` cached tokens each. `seconds` is what the step
took.

An engine that schedules ahead plans a step while the one before it runs. What it measures of a step may then
be the wait for its result, or two steps at once. The distance from the end of one step to the end of the next
is what a client sees, so that counts where both are known and differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec

from onbeat.core.errors import ConfigError, quoted
from onbeat.core.step import BatchShape
from onbeat.files import csv_rows, read_lines, read_text
from onbeat.perfmodel.shapes import MeasuredStep
from onbeat.typed import Count, NotNegative, decode

_SAME = 0.03
"""Relative difference up to which an engine's own times and the distances between its steps are the same."""
_A_PART = 2.0
"""Distance over an engine's own time from which on that is only a part of a step."""
_FEWEST_DISTANCES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrigin:
    """Whose steps they are; what the source does not say is None."""

    engine: str | None = None
    engine_version: str | None = None
    model: str | None = None
    device: str | None = None
    """A device id."""
    dtype: str | None = None
    """Format of the weights, as `Precision` names it."""


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One step as its engine told of it."""

    shape: BatchShape
    wall: float
    """The engine's own measure, seconds; 0 where it waited for nothing."""
    distance: float | None = None
    """Seconds since the end of the step before; None after idleness, and where nobody knows."""


@dataclass(frozen=True, slots=True)
class StepStream:
    """Steps from one source, in the order in which they ended."""

    origin: StepOrigin
    steps: Sequence[LoggedStep]
    num_heartbeats: int = 0
    """Messages of an idle engine."""
    num_lost: int = 0
    """Steps that the source counted but did not deliver."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What steps took, and how that was found."""

    steps: list[MeasuredStep]
    basis: str
    """For the reader: the engine's own times, or the distances between its steps."""


def step_times(steps: Sequence[LoggedStep]) -> StepTimes:
    """Return what each step took; steps of which nobody knows are left out."""
    pairs = [(step.distance, step.wall) for step in steps if step.distance and step.wall > 0]
    known = [step.distance for step in steps if step.distance]
    ratio = median(distance / wall for distance, wall in pairs) if pairs else 1.0
    if len(known) < _FEWEST_DISTANCES or (pairs and abs(ratio - 1) <= _SAME):
        timed = [MeasuredStep(step.shape, step.wall) for step in steps if step.wall > 0]
        return StepTimes(timed, "the engine's own times")
    # After idleness nothing overlaps: the engine's time holds, but for what its host does between two steps.
    # Where it measures far less than a step, it measures something else.
    host = max(0.0, median(distance - wall for distance, wall in pairs)) if pairs else 0.0
    measures_steps = ratio <= _A_PART
    timed = []
    for step in steps:
        seconds = step.distance
        if seconds is None and measures_steps and step.wall > 0:
            seconds = step.wall + host
        if seconds:
            timed.append(MeasuredStep(step.shape, seconds))
    own = f"its own times are {1 / ratio:.2f} of these" if pairs else "it gave no times of its own"
    return StepTimes(timed, f"the distances between steps ({own})")


def rows_shape(
    *,
    num_prompts: int,
    prompt_tokens: int,
    prompt_cached_tokens: int,
    num_decodes: int,
    decode_cached_tokens: int,
    prompt_variance: float = 0.0,
) -> BatchShape:
    """Return the batch of a step of which only sums are known.

    Parameters
    ----------
    num_prompts, prompt_tokens, prompt_cached_tokens : requests whose prompt goes on, tokens that the step
        computes of it, and tokens of it that were there before.
    num_decodes, decode_cached_tokens : requests that generate, and their tokens before this step.
    prompt_variance : of the prompts' whole lengths, in square tokens. It counts where nothing of the prompts
        was there before: they then come in one piece each, as far as a step can hold them.
    """
    shape = BatchShape.of_decodes(num_decodes, decode_cached_tokens + num_decodes)
    if not prompt_tokens:
        return shape
    num_prompts = max(1, min(num_prompts, prompt_tokens))
    squares = prompt_tokens * prompt_tokens / num_prompts
    if not prompt_cached_tokens:
        squares = min(squares + num_prompts * prompt_variance, float(prompt_tokens * prompt_tokens))
    shape.num_new_tokens += prompt_tokens
    shape.num_sequences += num_prompts
    shape.num_chunks = num_prompts
    shape.chunk_cached_tokens = prompt_cached_tokens
    shape.sum_chunk_squares = round(squares)
    shape.query_key_pairs = round(
        prompt_tokens * prompt_cached_tokens / num_prompts + (squares + prompt_tokens) / 2
    )
    shape.num_lm_head_rows += num_prompts
    return shape


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
    """Seconds; 0 of a heartbeat."""
    scheduled_requests: _Scheduled
    queued_requests: _Queued

    @property
    def worker(self) -> str:
        """Its worker and data-parallel rank: each has steps of its own."""
        return f"{self.worker_id}/{self.dp_rank}"


def _shape_of(message: ForwardPassMetrics, where: str) -> BatchShape:
    """Return what a message says was run; raises ConfigError for sums that no step has."""
    scheduled, wall, wrong = message.scheduled_requests, message.wall_time, ""
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
    return shape


class StepOrder:
    """Turns messages and their times into steps, each with its distance from the step before."""

    def __init__(self) -> None:
        self.num_heartbeats = 0
        self.num_lost = 0
        self._last: dict[str, tuple[ForwardPassMetrics, float | None]] = {}

    def take(self, message: ForwardPassMetrics, received: float | None, where: str) -> LoggedStep | None:
        """Return the step of a message; None of a heartbeat.

        Parameters
        ----------
        received : when it came, seconds of any clock; None where nobody wrote it down.
        where : the message stands, for errors.

        Raises
        ------
        ConfigError : it is older than the one before, or has sums that no step has, which numbers in wrong
            fields would make.
        """
        shape = _shape_of(message, where)
        before, came = self._last.get(message.worker, (None, None))
        self._last[message.worker] = (message, received)
        if before is not None:
            _check_order(before, came, message, received, where)
            self.num_lost += message.counter_id - before.counter_id - 1
        if not shape.num_new_tokens:
            self.num_heartbeats += 1
            return None
        distance = None
        if before is not None and came is not None and received is not None:
            queued = before.queued_requests
            is_next = message.counter_id == before.counter_id + 1 and before.wall_time > 0
            # A request that generates was in the step before, and one that waited had work to wait for.
            if is_next and (shape.num_decodes or queued.num_prefill_requests or queued.num_decode_requests):
                distance = received - came
        return LoggedStep(shape, message.wall_time, distance)


def _check_order(
    before: ForwardPassMetrics,
    came: float | None,
    message: ForwardPassMetrics,
    received: float | None,
    where: str,
) -> None:
    if message.counter_id <= before.counter_id:
        raise ConfigError(
            f"{where}: counter_id {message.counter_id} of worker {quoted(message.worker)} comes after "
            f"{before.counter_id}; messages must be in their order, and of one run of the engine"
        )
    if came is not None and received is not None and received < came:
        raise ConfigError(
            f"{where}: its time {received:g} s is before that of the message before it, {came:g} s; times "
            "must not go back. Are two recordings joined?"
        )


class _Message(msgspec.Struct):
    """A line of a file; fields that are not named here are passed over."""

    fpm: ForwardPassMetrics
    received: NotNegative | None = None
    capture_mode: str = ""


class _Event(msgspec.Struct):
    """A line of Dynamo's traces in its envelope."""

    event: _Message


def read_step_log(path: Path) -> StepStream:
    """Read a file of forward-pass metrics.

    Raises
    ------
    ConfigError : it cannot be read, is something else, or a line is not as it must be; names the line.
    """
    order, steps, is_whole = StepOrder(), [], True
    for number, line in read_lines(msgspec.Raw, path, "the recorded steps", hint=HINT, may_be_cut=True):
        where, text = f"{path}, line {number}", bytes(line)
        if number == 1 and b'"onbeat-steps"' in text:
            continue  # a header, as recordings had one
        is_event = b'"event"' in text
        told = (
            decode(_Event, text, where, hint=HINT).event
            if is_event
            else decode(_Message, text, where, hint=HINT)
        )
        is_whole &= told.capture_mode != "sampled"
        # Milliseconds, as a trace has them, are too coarse for the distance between two steps.
        step = order.take(told.fpm, None if is_event else told.received, where)
        if step is not None:
            steps.append(step)
    if not steps:
        idle = (
            f", only {order.num_heartbeats} signs of life of an idle engine" if order.num_heartbeats else ""
        )
        raise ConfigError(f"{path} has no steps{idle}; send the engine requests while its steps are recorded")
    return StepStream(StepOrigin(), steps, order.num_heartbeats, order.num_lost if is_whole else 0)


COLUMNS = ("batch", "new_tokens", "context", "seconds")
MIXED_COLUMNS = ("decodes", "decode_context")
"""May be left out, both together."""
_TABLE_HINT = f"A table of steps has {', '.join(COLUMNS)}, and may have {' and '.join(MIXED_COLUMNS)}"
MOST_ROWS, MOST_TOKENS = 2**16, 2**24
"""Of a step, and of a row: more than any engine takes."""
SUFFIXES = (".csv", ".csv.gz")


def read_step_table(path: Path) -> StepStream:
    """Read a table of measured steps.

    Parameters
    ----------
    path : CSV with a header; the order of the columns does not matter and further ones are passed over.

    Raises
    ------
    ConfigError : no such file, not a CSV, a missing column, a line of another width, no lines, or a value
        that is no count or no time; names the file, line, column and value.
    """
    steps, text = [], read_text(path, "the table of steps")
    for line, cells in csv_rows(
        path, text, columns=COLUMNS, together=MIXED_COLUMNS, rows="steps", hint=_TABLE_HINT
    ):
        row = _Row(f"{path}, line {line}", cells)
        steps.append(LoggedStep(row.shape(), row.seconds()))
    return StepStream(StepOrigin(), steps)


@dataclass(frozen=True, slots=True)
class _Row:
    where: str
    cells: Mapping[str, str]

    def shape(self) -> BatchShape:
        batch, decodes = self._count("batch"), self._count("decodes")
        new_tokens = self._count("new_tokens", at_least=1 if batch else 0)
        if not batch + decodes:
            raise ConfigError(f"{self.where}: the step has no rows: batch is 0. Leave empty steps out")
        shape = BatchShape()
        for _ in range(batch):
            shape.add(self._count("context"), new_tokens, samples=True)
        for _ in range(decodes):
            shape.add(self._count("decode_context"), 1, samples=True)
        return shape

    def seconds(self) -> float:
        try:
            value = float(self.cells["seconds"])
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise self._error("seconds", "a finite time above 0")
        return value

    def _count(self, column: str, *, at_least: int = 0) -> int:
        if column not in self.cells:
            return 0
        try:
            value = float(self.cells[column])
        except ValueError:
            value = math.nan
        most = MOST_ROWS if column in ("batch", "decodes") else MOST_TOKENS
        if not (at_least <= value <= most and value == int(value)):
            raise self._error(column, f"a whole number of at least {at_least} and at most {most}")
        return int(value)

    def _error(self, column: str, wanted: str) -> ConfigError:
        return ConfigError(
            f"{self.where}: {column} is {self.cells[column]!r}; it must be {wanted}. Correct the line or "
            "leave it out"
        )
