"""A tracker and what /metrics would show of it, with a clock that a test sets."""

from __future__ import annotations

from typing import Any, cast

import orjson

from onbeat.core.protocols import StepOutputs
from onbeat.core.request import FinishReason
from onbeat.core.slo import SLO
from onbeat.metrics.counts import RunCounts
from onbeat.metrics.exporter import MetricsExporter
from onbeat.metrics.tracker import RequestTracker
from tests.pure.metrics.runs import output, request, stats, step

CHAT = SLO(ttft=1.0, tbt=0.1)


class FakeServer:
    """Serves requests that a test tells of."""

    def __init__(self, *, proposer: str | None = None, **options: Any) -> None:
        self.now = 0.0
        self.counts = RunCounts(**options)
        self.tracker = RequestTracker([self.counts])
        self.exporter = MetricsExporter(
            self.counts, model_name="tiny", policy="slo", proposer=proposer, clock=lambda: self.now
        )

    def text(self, now: float) -> str:
        """Return what /metrics shows at a time."""
        self.now = now
        return self.exporter.render().decode()

    def state(self, now: float) -> dict[str, Any]:
        """Return what `GET /state` shows at a time."""
        self.now = now
        return cast("dict[str, Any]", orjson.loads(self.exporter.state()))

    def open(self, name: str, arrival: float, slo: SLO | None = CHAT, **fields: Any) -> None:
        """Let a request arrive; `is_streamed` goes to the tracker, the rest is the request's."""
        is_streamed = fields.pop("is_streamed", True)
        terms = {"slo_class": "chat", **fields}
        self.tracker.open(request(name, arrival=arrival, slo=slo, **terms), is_streamed=is_streamed)

    def serve(
        self, name: str, arrival: float, times: list[float], slo: SLO | None = CHAT, **fields: Any
    ) -> None:
        """Deliver one token at each time after the arrival; the last ends the request."""
        self.open(name, arrival, slo, **fields)
        for number, time in enumerate(times, start=1):
            reason = FinishReason.STOP if number == len(times) else None
            step(self.tracker, StepOutputs(arrival + time, [output(name, finish_reason=reason)]))

    def step(self, start: float, end: float, **fields: Any) -> None:
        """Make a step that delivers nothing."""
        step(self.tracker, StepOutputs(end, [], stats(start, end, **fields)))
