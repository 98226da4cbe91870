"""Keep the record of every open request from the engine's step messages, and tell listeners what happened."""

from __future__ import annotations

from collections.abc import Sequence

from onbeat.core.errors import Overloaded, RequestRejected, SLOUnattainable
from onbeat.core.protocols import StepOutputs
from onbeat.core.request import FinishReason, Request, RequestOutput
from onbeat.core.slo import Fate
from onbeat.core.step_stats import StepStats
from onbeat.metrics.record import RequestRecord

REFUSALS = ("slo_unattainable", "deadline_exceeded", "queue_too_long", "queue_full", "no_replica")
"""Why requests are refused: TTFT cannot be kept; it was not kept in the queue; the wait that is predicted
without being in time; the queue's hard limits; nobody is there to serve them."""


class RunListener:
    """Hears of steps and requests in the order in which things happened; by itself it does nothing."""

    __slots__ = ()

    def on_request(self, record: RequestRecord, /) -> None:
        """Hear of a request that went to the engine."""

    def on_delivery(self, record: RequestRecord) -> None:
        """Hear of new tokens: the last delivery of `record`."""

    def on_preemption(self, record: RequestRecord, now: float, /) -> None:
        """Hear that a request was preempted since its delivery before."""

    def on_relegation(self, record: RequestRecord, now: float, /) -> None:
        """Hear that a request is served as best effort from now on."""

    def on_refusal(self, record: RequestRecord, reason: str, /) -> None:
        """Hear why (of `REFUSALS`) a request was refused or ended in the queue; its end follows."""

    def on_leave(self, record: RequestRecord) -> None:
        """Hear that the engine has done with a request; a slow reader may still have to get its answer."""

    def on_finish(self, record: RequestRecord) -> None:
        """Hear that a request ended; the record is complete and nothing follows for it."""

    def on_step(self, stats: StepStats, replica: int = 0, /) -> None:
        """Hear of a step of a replica, before the deliveries it made."""


class RequestTracker:
    """A `core.protocols.StepObserver` that keeps one `RequestRecord` for each open request.

    The engine client feeds `on_step`. All else comes from whoever writes the answer: where it ends, and why,
    is decided there alone. The engine does not know of stop strings, and may go on behind one.
    """

    def __init__(self, listeners: Sequence[RunListener] = ()) -> None:
        self._listeners = tuple(listeners)
        self._open: dict[str, RequestRecord] = {}
        self._in_engine: set[str] = set()

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def open(self, request: Request, *, is_streamed: bool = True) -> RequestRecord:
        """Start the record of a request that goes to the engine now.

        Parameters
        ----------
        is_streamed : whether its caller sees each delivery; if not, it is held to `ttft` and `e2e` alone.
        """
        record = RequestRecord(
            request_id=request.request_id,
            arrival=request.arrival,
            num_prompt_tokens=len(request.prompt_token_ids),
            request_class=request.slo_class,
            slo=request.slo,
            tenant=request.tenant,
            is_streamed=is_streamed,
            is_embedding=request.pooling is not None,
        )
        self._open[request.request_id] = record
        self._in_engine.add(request.request_id)
        for listener in self._listeners:
            listener.on_request(record)
        return record

    def deliver(self, output: RequestOutput, now: float, num_tokens: int, *, made: float) -> None:
        """Take in what a delivery of the engine brought an answer.

        Parameters
        ----------
        now : when it was handed over to be sent, seconds.
        num_tokens : of its tokens, those that are in the answer: none behind its end.
        made : when the engine made it, seconds.
        """
        record = self._open.get(output.request_id)
        if record is None:
            return
        record.num_untaken_tokens -= len(output.new_token_ids)
        _take_start(record, output)
        if output.num_preemptions > record.num_preemptions:
            record.num_preemptions = output.num_preemptions
            for listener in self._listeners:
                listener.on_preemption(record, now)
        if num_tokens or output.embedding is not None:
            if record.engine_ttft is None:
                record.engine_ttft = made - record.arrival
            record.delivery_times.append(now)
            record.delivery_sizes.append(num_tokens)
            record.num_output_tokens += num_tokens
            for listener in self._listeners:
                listener.on_delivery(record)
        if output.fate is Fate.RELEGATED and record.fate is not Fate.RELEGATED:
            record.fate = Fate.RELEGATED
            for listener in self._listeners:
                listener.on_relegation(record, now)

    def close(self, request_id: str, finish_reason: FinishReason, now: float) -> None:
        """End a request with its answer. Does nothing if it has ended already."""
        if (record := self._open.pop(request_id, None)) is not None:
            self._finish(record, finish_reason.value, now)

    def refuse(self, request_id: str, error: RequestRejected, now: float) -> None:
        """End a request that the engine did not take. Does nothing if it has ended already."""
        record = self._open.pop(request_id, None)
        if record is None:
            return
        if not isinstance(error, Overloaded | SLOUnattainable):
            self._finish(record, FinishReason.ERROR.value, now)  # less load would not have helped it
            return
        record.fate = Fate.REJECTED
        if isinstance(error, SLOUnattainable):
            record.predicted_ttft = record.predicted_wait = error.predicted_ttft
        self._tell_refusal(record, _reason(error))
        self._finish(record, "rejected", now)

    def on_step(self, message: StepOutputs, replica: int = 0) -> None:
        """Take in one step message of the engine."""
        if message.stats is not None:
            for listener in self._listeners:
                listener.on_step(message.stats, replica)
        for output in message.outputs:
            record = self._open.get(output.request_id)
            if record is None:
                continue
            record.num_untaken_tokens += len(output.new_token_ids)
            if output.finish_reason is None:
                continue
            self._leave(record)
            if output.finish_reason is FinishReason.EXPIRED:  # it has no answer that could end otherwise
                del self._open[record.request_id]
                _take_start(record, output)
                record.fate = output.fate
                self._tell_refusal(
                    record, "queue_too_long" if output.fate is Fate.OVERDUE else "deadline_exceeded"
                )
                self._finish(record, output.finish_reason.value, message.now)

    def _leave(self, record: RequestRecord) -> None:
        """Tell once that the engine has done with a request."""
        if record.request_id in self._in_engine:
            self._in_engine.remove(record.request_id)
            for listener in self._listeners:
                listener.on_leave(record)

    def _tell_refusal(self, record: RequestRecord, reason: str) -> None:
        for listener in self._listeners:
            listener.on_refusal(record, reason)

    def _finish(self, record: RequestRecord, finish_reason: str, now: float) -> None:
        self._leave(record)
        record.finish_reason = finish_reason
        record.end = now
        for listener in self._listeners:
            listener.on_finish(record)


def _reason(error: Overloaded | SLOUnattainable) -> str:
    """Return for which reason (of `REFUSALS`) a request was not taken."""
    if isinstance(error, SLOUnattainable):
        return error.code if error.code in REFUSALS else "slo_unattainable"
    return error.reason


def _take_start(record: RequestRecord, output: RequestOutput) -> None:
    """Note what only a request's first output is sure to say."""
    if output.predicted_ttft is not None:
        record.predicted_ttft = output.predicted_ttft
    if output.scheduled_time > 0 and record.scheduled is None:
        record.scheduled = output.scheduled_time
        record.num_cached_tokens = output.num_cached_tokens
