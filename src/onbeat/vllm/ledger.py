"""What became of requests, as this process sees it: for verdicts, and for onbeat's metrics on /metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from onbeat.core.slo import Fate, SLOMode
from onbeat.metrics.counts import RunCounts
from onbeat.metrics.exporter import MetricsExporter
from onbeat.metrics.record import RequestRecord
from onbeat.server.answer_report import record_report, worst_report
from onbeat.vllm.refusals import Refusal, refusal_of
from onbeat.vllm.requests import ReadRequest
from onbeat.vllm.telemetry import stats_of

_ENDS = ("stop", "length", "abort", "error")
_MOST_CHOICES = 512
"""Choices of one answer that are judged one by one."""


class Entry:
    """One request of a client, with a record for each choice of its answer.

    Parameters
    ----------
    arrival : when its whole body had come, seconds of the monotonic clock.
    """

    def __init__(self, request: ReadRequest, arrival: float, counts: RunCounts) -> None:
        self.request = request
        self.refusal: Refusal | None = None
        self.predicted_ttft: float | None = None
        """Seconds."""
        self._told = asyncio.Event()
        self._arrival = arrival
        self._counts = counts
        self._records: dict[int, RequestRecord] = {}
        self._num_prompt_tokens = 0
        self._is_closed = False
        self._record(0)

    @property
    def has_delivered(self) -> bool:
        """Whether any choice has a token."""
        return any(record.delivery_times for record in self._records.values())

    def deliver(self, index: int, now: float, num_tokens: int = 1) -> None:
        """Count tokens that go to the client."""
        record = self._record(index)
        record.delivery_times.append(now)
        record.delivery_sizes.append(num_tokens)
        record.num_output_tokens += num_tokens
        self._counts.on_delivery(record)

    def finish(self, index: int, reason: str) -> None:
        """Note why a choice ended, in OpenAI's words."""
        self._record(index).finish_reason = reason if reason in _ENDS else "stop"

    def take_usage(self, usage: Mapping[str, Any]) -> None:
        """Take the length of the prompt from what an answer says of itself."""
        for name in ("prompt_tokens", "input_tokens"):
            value = usage.get(name)
            if isinstance(value, int):
                self._know_prompt(value)

    def verdict(self, mode: SLOMode) -> dict[str, Any] | None:
        """Return the object `slo` of the answer; None without objectives."""
        for record in self._records.values():
            record.predicted_ttft = self.predicted_ttft
            if record.delivery_times:
                record.end = record.delivery_times[-1]
        reports = [record_report(record, mode) for record in self._records.values()]
        return worst_report([report for report in reports if report is not None])

    async def refusal_told(self, seconds: float) -> Refusal | None:
        """Return why the scheduler refused it, for which its word may take some time."""
        if self.refusal is None and seconds > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), seconds)
        return self.refusal

    def refuse(self, refusal: Refusal, now: float) -> None:
        """End it as refused."""
        for record in self._records.values():
            if refusal.status == 400:
                record.finish_reason = "error"
                continue
            has_waited = refusal.status == 504
            record.fate = Fate.EXPIRED if has_waited else Fate.REJECTED
            record.predicted_ttft = record.predicted_wait = refusal.predicted_ttft
            record.finish_reason = "expired" if has_waited else "rejected"
            self._counts.on_refusal(record, refusal.counted_as)
        self.close("error", now)

    def close(self, reason: str, now: float) -> None:
        """End it; choices that have not ended have ended so. Later calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for record in self._records.values():
            record.finish_reason = record.finish_reason or reason
            record.end = record.delivery_times[-1] if record.is_completed and record.delivery_times else now
            self._counts.on_leave(record)
            self._counts.on_finish(record)

    def take(self, message: Mapping[str, Any]) -> None:
        """Take what the scheduler tells of it."""
        event, now = message.get("event"), message.get("now")
        if event == "added":
            predicted = message.get("predicted_ttft_ms")
            if isinstance(predicted, int | float):
                self.predicted_ttft = predicted / 1e3
            self._know_prompt(message.get("num_prompt_tokens"))
        elif event == "scheduled" and isinstance(now, float):
            self._begin(now, message.get("num_cached_tokens"))
        elif event == "refused":
            status = message.get("status")
            self.refusal = refusal_of(status if isinstance(status, int) else 429, message)
            self._told.set()
        elif event in ("relegated", "preempted"):
            for record in self._records.values():
                record.fate = Fate.RELEGATED if event == "relegated" else record.fate
                record.num_preemptions += event == "preempted"

    def _begin(self, now: float, num_cached_tokens: object) -> None:
        for record in self._records.values():
            if record.scheduled is None:
                record.scheduled = now
                record.num_cached_tokens = num_cached_tokens if isinstance(num_cached_tokens, int) else 0

    def _know_prompt(self, num_tokens: object) -> None:
        if isinstance(num_tokens, int) and not self._num_prompt_tokens:
            self._num_prompt_tokens = num_tokens
            for record in self._records.values():
                record.num_prompt_tokens = num_tokens

    def _record(self, index: int) -> RequestRecord:
        record = self._records.get(index)
        if record is not None or len(self._records) >= _MOST_CHOICES:
            return record or self._records[0]
        held = self.request.objectives
        record = RequestRecord(
            request_id=f"{self.request.slo_id}-{index}",
            arrival=self._arrival,
            num_prompt_tokens=self._num_prompt_tokens,
            request_class=held.slo_class,
            slo=held.slo,
            tenant=held.tenant,
            is_streamed=self.request.is_streamed,
        )
        if (first := self._records.get(0)) is not None:
            record.fate, record.scheduled = first.fate, first.scheduled
        self._records[index] = record
        self._counts.on_request(record)
        return record


class Ledger:
    """The open requests of this process, and the counts of all.

    Parameters
    ----------
    mode : what keeping a TBT objective means.
    model_name, policy : as metrics show them.
    """

    def __init__(self, mode: SLOMode, *, model_name: str, policy: str) -> None:
        self.mode = mode
        self._counts = RunCounts(mode)
        self.exporter = MetricsExporter(self._counts, model_name=model_name, policy=policy)
        self._registry = CollectorRegistry()
        self._registry.register(self.exporter)  # its own has metrics of the process, which vLLM shows too
        self._open: dict[str, Entry] = {}

    def open(self, request: ReadRequest, arrival: float) -> Entry:
        """Begin a request; `drop` forgets it."""
        entry = self._open[request.slo_id] = Entry(request, arrival, self._counts)
        return entry

    def drop(self, entry: Entry, now: float) -> None:
        """Forget a request; one that has not ended was left by its client."""
        entry.close("abort", now)
        self._open.pop(entry.request.slo_id, None)

    def take(self, message: Mapping[str, Any]) -> None:
        """Take a message of the scheduler's process; what is not as it should be is passed over."""
        match message["kind"]:
            case "step":
                rank = message.get("rank")
                with suppress(msgspec.ValidationError):
                    self._counts.on_step(stats_of(message), rank if isinstance(rank, int) else 0)
            case "request":
                entry = self._open.get(str(message.get("id")))
                if entry is not None:
                    entry.take(message)

    def forget_steps(self) -> None:
        """Forget how the scheduler stood: it is not there any more."""
        self._counts.keep_engines(())

    def metrics(self) -> bytes:
        """Return onbeat's metrics, as Prometheus reads them."""
        return generate_latest(self._registry)
