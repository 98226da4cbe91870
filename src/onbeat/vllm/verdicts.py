"""Open requests of this process: what the client has got of each, its verdict, and four numbers of all."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from math import inf, nan
from typing import Any

import msgspec
from prometheus_client import Counter, Gauge

from onbeat.core.slo import Fate, SLOMode
from onbeat.metrics.record import RequestRecord
from onbeat.server.answer_report import record_report, worst_report
from onbeat.vllm.objectives import ReadRequest
from onbeat.vllm.telemetry import WRONG, Message, Refusal, RequestNews

_MOST_CHOICES = 512
"""Choices of one answer that are judged one by one."""
_LAST_VERDICTS = 1000
"""Of which the share of objectives met is taken."""


class ClientRequest:
    """One request of a client, with a record for each choice of its answer.

    Parameters
    ----------
    arrival : when its whole body had come, seconds of the monotonic clock.
    mode : what keeping a TBT objective means.

    Attributes
    ----------
    refusal : why the scheduler does not serve it.
    predicted_ttft : seconds; None where nobody predicts.
    has_met : what its verdict says; None before, and without objectives.
    """

    def __init__(self, request: ReadRequest, arrival: float, mode: SLOMode) -> None:
        self.request = request
        self.refusal: Refusal | None = None
        self.predicted_ttft: float | None = None
        self.has_met: bool | None = None
        self._told = asyncio.Event()
        self._arrival, self._mode = arrival, mode
        self._records: dict[int, RequestRecord] = {}
        self._record(0)

    def deliver(self, index: int, now: float) -> None:
        """Count a token that goes to the client."""
        record = self._record(index)
        record.delivery_times.append(now)
        record.delivery_sizes.append(1)
        record.num_output_tokens += 1

    def finish(self, index: int, reason: str) -> None:
        """Note that a choice ended: by `stop`, or by `abort` where it is not whole."""
        self._record(index).finish_reason = reason

    def verdict(self) -> dict[str, Any] | None:
        """Return the object `slo` of the answer; None without objectives."""
        for record in self._records.values():
            record.predicted_ttft = self.predicted_ttft
            if record.delivery_times:
                record.end = record.delivery_times[-1]
        reports = [record_report(record, self._mode) for record in self._records.values()]
        worst = worst_report([report for report in reports if report is not None])
        if worst is None:
            self.has_met = None
            return None
        self.has_met = worst.met
        shown: dict[str, Any] = msgspec.to_builtins(worst)
        return shown

    def is_late(self, now: float) -> bool:
        """Whether its next token, or its end, is overdue."""
        return any(now > _due(record, self._mode) for record in self._records.values())

    async def refusal_told(self, seconds: float) -> Refusal | None:
        """Return why the scheduler refused it, for which its word may take some time."""
        if self.refusal is None and seconds > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), seconds)
        return self.refusal

    def take(self, news: RequestNews) -> None:
        """Take what the scheduler tells of it."""
        if news.predicted_ttft is not None:
            self.predicted_ttft = news.predicted_ttft
        if news.is_relegated:
            for record in self._records.values():
                record.fate = Fate.RELEGATED
        if news.refusal is not None:
            self.refusal = news.refusal
            self._told.set()

    def _record(self, index: int) -> RequestRecord:
        record = self._records.get(index)
        if record is not None or len(self._records) >= _MOST_CHOICES:
            return record or self._records[0]
        held = self.request.objectives
        self._records[index] = record = RequestRecord(
            request_id=f"{self.request.slo_id}-{index}",
            arrival=self._arrival,
            num_prompt_tokens=0,
            request_class=held.slo_class,
            slo=held.slo,
            is_streamed=self.request.is_streamed,
            fate=self._records[0].fate if index and self._records else None,
        )
        return record


def _due(record: RequestRecord, mode: SLOMode) -> float:
    """Return when a client must get the next token of a choice, or its end; seconds."""
    slo, times = record.slo, record.delivery_times
    if slo is None or record.finish_reason is not None:
        return inf
    end = inf if slo.e2e is None else record.arrival + slo.e2e
    first = inf if slo.ttft is None else record.arrival + slo.ttft
    if not times:
        return min(first, end)
    if slo.tbt is None or not record.is_streamed:
        return end
    if mode == "gap":
        return min(times[-1] + slo.tbt, end)
    begun = times[0] if slo.ttft is None else max(times[0], first)
    return min(begun + slo.tbt * record.num_output_tokens, end)


ATTAINMENT = Gauge(
    "onbeat_slo_attainment",
    f"Share of the last {_LAST_VERDICTS} verdicts whose objectives were met",
    multiprocess_mode="liveall",
)
LATE = Gauge("onbeat_requests_late", "Open requests whose next token is overdue", multiprocess_mode="livesum")
REJECTED = Counter("onbeat_requests_rejected", "Requests that were refused", ["reason"])
STEP_TIME_RATIO = Gauge(
    "onbeat_step_time_ratio",
    "Predicted time of the last steps over what they took, by data-parallel rank",
    ["rank"],
    multiprocess_mode="mostrecent",
)


class OpenRequests:
    """The open requests of this process, and the four numbers that it adds to vLLM's metrics.

    They say whether promises are kept, how many are hurt now, who was turned away, and whether plans can be
    trusted. All else vLLM counts itself.

    Parameters
    ----------
    mode : what keeping a TBT objective means.
    """

    def __init__(self, mode: SLOMode) -> None:
        self._mode = mode
        self._open: dict[str, ClientRequest] = {}
        self._verdicts: deque[bool] = deque(maxlen=_LAST_VERDICTS)
        ATTAINMENT.set(nan)

    def open(self, request: ReadRequest) -> ClientRequest:
        """Begin a request; `close` ends it."""
        opened = self._open[request.slo_id] = ClientRequest(request, time.monotonic(), self._mode)
        return opened

    def close(self, request: ClientRequest) -> None:
        """Forget a request."""
        if request.has_met is not None:
            self._verdicts.append(request.has_met)
            ATTAINMENT.set(sum(self._verdicts) / len(self._verdicts))
        if request.refusal is not None and request.refusal.code != WRONG:
            REJECTED.labels(request.refusal.counted_as).inc()
        self._open.pop(request.request.slo_id, None)

    def take(self, message: Message) -> None:
        """Take a message of the scheduler's process."""
        if isinstance(message, RequestNews):
            if (found := self._open.get(message.slo_id)) is not None:
                found.take(message)
        elif message.measured > 0:
            STEP_TIME_RATIO.labels(message.rank).set(message.predicted / message.measured)

    def count_late(self) -> None:
        """Count who waits for too long, before somebody asks for it."""
        now = time.monotonic()
        LATE.set(sum([each.is_late(now) for each in self._open.values()]))
