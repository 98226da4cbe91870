"""A record file of a vLLM server, from what its scheduler tells: `onbeat vllm record`.

The file has the form of `onbeat serve --record`, so that `onbeat replay` can simulate the run and compare
latencies. Blocks of the KV cache are vLLM's own and are not in it, nor hashes of prompts: a simulation of it
computes each prompt whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from onbeat import __version__
from onbeat.core.errors import ConfigError, Overloaded, SLOUnattainable
from onbeat.core.request import FinishReason, Request, RequestOutput, SamplingParams
from onbeat.core.slo import SLO, Fate, ShedMode
from onbeat.core.step import (
    AdmittedRequest,
    BatchShape,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
    StepStats,
)
from onbeat.recording.log import RecordHeader
from onbeat.recording.writer import RecordWriter, create_record
from onbeat.vllm.refusals import TOO_LONG, refusal_of
from onbeat.vllm.telemetry import SILENCE_SECONDS, Subscriber, stats_of

logger = logging.getLogger("onbeat.vllm")

_PATIENCE = SILENCE_SECONDS


@dataclass(slots=True)
class RecorderCounts:
    """What a record holds."""

    num_requests: int = 0
    num_steps: int = 0
    num_unknown_rows: int = 0
    """Rows of requests that came before the record began, which it leaves out."""
    has_fallen_silent: bool = False
    """Whether the server ended, or hung, before the record did."""


class Recorder:
    """Makes the calls of a record from the messages of one scheduler.

    A step is told of once it has come back. The file has calls in the order in which they were made, so they
    wait until no earlier one can come.

    Parameters
    ----------
    writer : of the file.
    """

    def __init__(self, writer: RecordWriter) -> None:
        self.counts = RecorderCounts()
        self._writer = writer
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._open: dict[str, Request] = {}
        self._admitted: set[str] = set()
        self._released: list[str] = []
        self._num_output: dict[str, int] = {}

    def take(self, message: Mapping[str, Any]) -> None:
        """Take a message; one that is not as it should be is passed over.

        Raises
        ------
        KeyError, TypeError, ValueError : it lacks something, or something else is in its place.
        """
        if message["kind"] == "step":
            step, planned = _Step(message), float(message["planned"])
            self._push(planned, partial(self._schedule, step))
            self._push(step.stats.end, partial(self._update, step))
            self._write_until(planned)  # those that follow were planned later
        elif message["kind"] == "request":
            self._push(float(message["now"]), partial(self._request, message))

    def finish(self) -> None:
        """Write what has waited."""
        self._write_until(inf)

    def _push(self, time: float, call: Callable[[], None]) -> None:
        heappush(self._calls, (time, next(self._numbers), call))

    def _write_until(self, time: float) -> None:
        while self._calls and self._calls[0][0] <= time:
            heappop(self._calls)[2]()

    def _request(self, message: Mapping[str, Any]) -> None:
        request_id, now = str(message["request_id"]), float(message["now"])
        match message["event"]:
            case "added" if request_id not in self._open:
                request = _request_of(request_id, message)
                self._open[request_id] = request
                self._num_output[request_id] = 0
                self.counts.num_requests += 1
                self._writer.add(request, now)
            case "refused" if "arrival" in message:  # it was never taken
                self.counts.num_requests += 1
                self._writer.add(_request_of(request_id, message), now, refusal=_refusal_of(message))
            case "refused" if request_id in self._open:
                output = RequestOutput(request_id, [], FinishReason.EXPIRED, fate=Fate.EXPIRED)
                self._writer.schedule(None, now, num_preempted=0, expired=[output])
                self._forget(request_id)
            case "aborted" if request_id in self._open:
                self._writer.abort([request_id], now)
                self._forget(request_id)

    def _schedule(self, step: _Step) -> None:
        message = step.message
        self._admitted.difference_update(message["preempted"])
        rows, step.counts = self._rows(message)
        if not rows:
            return
        new = {row.request_id for row in rows} - self._admitted
        step.planned = planned = SchedulerOutput(
            step_id=self.counts.num_steps,
            rows=tuple(rows),
            admitted=tuple(
                AdmittedRequest(self._open[each], (0,) * self._num_output[each], ()) for each in sorted(new)
            ),
            released_ids=tuple(self._released),
            shape=BatchShape(),
        )
        self.counts.num_steps += 1
        self._admitted |= new
        self._released.clear()
        predicted = step.stats.predicted_seconds
        self._writer.schedule(
            planned, float(message["planned"]), num_preempted=0, predicted_seconds=predicted
        )

    def _update(self, step: _Step) -> None:
        if (planned := step.planned) is None:
            return
        samples = [row for row in planned.rows if row.samples]
        finished = {str(name): FinishReason(each) for name, each in dict(step.message["finished"]).items()}
        outputs = [
            RequestOutput(row.request_id, [0] * num, finished.get(row.request_id))
            for row, num in zip(samples, step.counts, strict=True)
            if row.request_id in self._open  # else it was aborted meanwhile
        ]
        drafted = [row.num_draft_tokens for row in samples]
        result = ModelRunnerOutput([[0] * num for num in step.counts], num_drafted=drafted)
        begin, end = step.stats.start, step.stats.end
        self._writer.update(planned, result, outputs, now=end, seconds=end - begin)
        for output in outputs:
            self._num_output[output.request_id] += len(output.new_token_ids)
            if output.finish_reason is not None:
                self._forget(output.request_id)

    def _rows(self, message: Mapping[str, Any]) -> tuple[list[ScheduledRequest], list[int]]:
        """Return the rows of requests that are known, and the tokens of those that sample."""
        counts = iter(message["counts"])
        rows: list[ScheduledRequest] = []
        known_counts: list[int] = []
        for request_id, num_computed, num_new, samples in message["rows"]:
            num = int(next(counts, 1)) if samples else 0
            request = self._open.get(request_id)
            if request is None:
                self.counts.num_unknown_rows += 1
                continue
            is_verified = samples and num_new > 1 and num_computed >= len(request.prompt_token_ids)
            num_drafts = num_new - 1 if is_verified else 0
            rows.append(ScheduledRequest(request_id, num_computed, num_new, (), bool(samples), num_drafts))
            if samples:
                known_counts.append(min(num, 1 + num_drafts))
        return rows, known_counts

    def _forget(self, request_id: str) -> None:
        del self._open[request_id], self._num_output[request_id]
        if request_id in self._admitted:
            self._admitted.remove(request_id)
            self._released.append(request_id)


class _Step:
    """A step that was told of, on its way into the file."""

    def __init__(self, message: Mapping[str, Any]) -> None:
        self.message = message
        self.stats: StepStats = stats_of(message)
        self.planned: SchedulerOutput | None = None
        self.counts: list[int] = []


def _request_of(request_id: str, message: Mapping[str, Any]) -> Request:
    slo = message.get("slo")
    return Request(
        request_id=request_id,
        prompt_token_ids=range(int(message["num_prompt_tokens"])),
        sampling=SamplingParams(max_tokens=int(message["max_tokens"])),
        arrival=float(message["arrival"]),
        slo=None if slo is None else SLO(ttft=slo[0], tbt=slo[1], e2e=slo[2]),
        slo_class=message.get("slo_class"),
        weight=float(message.get("weight", 1.0)),
        tenant=message.get("tenant"),
        shed=ShedMode(message.get("shed", "off")),
    )


def _refusal_of(message: Mapping[str, Any]) -> Overloaded | SLOUnattainable:
    """Return what our own scheduler would have raised."""
    refusal = refusal_of(429, message)
    if refusal.code == TOO_LONG:
        return Overloaded(refusal.reason, code=TOO_LONG, retry_after=refusal.retry_after)
    predicted = inf if refusal.predicted_ttft is None else refusal.predicted_ttft
    return SLOUnattainable(refusal.reason, predicted_ttft=predicted, retry_after=refusal.retry_after)


async def record(path: Path, address: str, *, seconds: float | None = None) -> RecorderCounts:
    """Write a record of a server until the time is over, it falls silent, or this task is cancelled.

    Parameters
    ----------
    address : on which its scheduler tells what it does; of data-parallel ranks, one.
    seconds : how long; None: until interrupted.

    Raises
    ------
    ConfigError : nobody tells anything there, or the file cannot be written.
    """
    subscriber = Subscriber(address)
    try:
        header = await _header(subscriber, address)
        writer = create_record(path)(header)
        recorder = Recorder(writer)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await _take_all(subscriber, recorder)
        except asyncio.CancelledError:  # Ctrl-C: the file is to be whole
            pass
        finally:
            recorder.finish()
            writer.close()
    finally:
        subscriber.close()
    return recorder.counts


async def _take_all(subscriber: Subscriber, recorder: Recorder) -> None:
    while True:
        try:
            async with asyncio.timeout(_PATIENCE):
                message = await subscriber.receive()
        except TimeoutError:
            recorder.counts.has_fallen_silent = True
            return
        try:
            recorder.take(message)
        except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
            logger.warning("a message of the scheduler is not understood and is left out: %r", error)


async def _header(subscriber: Subscriber, address: str) -> RecordHeader:
    """Return the head of a record, once the scheduler has said what it is."""
    try:
        async with asyncio.timeout(_PATIENCE):
            while True:
                message = await subscriber.receive()
                if message["kind"] == "hello":
                    break
    except TimeoutError as error:
        raise ConfigError(
            f"no scheduler has told anything at {address} for {_PATIENCE:.0f} s; is the server up, and was "
            "it started by `onbeat vllm serve` with this address?"
        ) from error
    try:
        return record_header(message["header"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the scheduler at {address} does not say how it is configured: {error!r}"
        ) from error


def record_header(told: Mapping[str, Any]) -> RecordHeader:
    """Return the head of a record from what a scheduler says that it is.

    Raises
    ------
    KeyError, TypeError, ValueError : it lacks something.
    """
    return RecordHeader(
        onbeat_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        scheduler={**told["scheduler"], "enable_prefix_caching": False},
        engine=told["engine"],
        max_in_flight_steps=int(told.get("max_in_flight_steps", 1)),
        step_time=told.get("step_time"),
    )
