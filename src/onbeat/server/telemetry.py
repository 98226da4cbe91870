"""What the server shows of itself: records of requests, Prometheus metrics, the timeline, and traces.

A trace has a span for each request, and inside it the queue, the prefill and the decode. Attributes follow
OpenTelemetry's conventions for generative AI (`gen_ai.*`); what they lack is `onbeat.*`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from onbeat.core.extras import require
from onbeat.core.slo import SLOMode
from onbeat.metrics.attainment import good_requests, has_objectives
from onbeat.metrics.counts import RunCounts
from onbeat.metrics.exporter import MetricsExporter, state_schema
from onbeat.metrics.fleet_counts import FleetCounts
from onbeat.metrics.histogram import Histogram
from onbeat.metrics.record import RequestRecord
from onbeat.metrics.tracker import RequestTracker, RunListener
from onbeat.server.middleware import HttpContext
from onbeat.server.server_config import ServerConfig
from onbeat.server.shared import Books, Desk
from onbeat.version import __version__

_PURPOSE = "--otlp-traces-endpoint"
_HEADERS = ("traceparent", "tracestate")
_carrier: ContextVar[dict[str, str] | None] = ContextVar("carrier", default=None)
"""The headers of the HTTP request that is being answered, as far as they are about traces."""


class TraceHeaders:
    """Keeps `traceparent` and `tracestate` of an HTTP request for the spans of its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            _carrier.set({name: headers[name] for name in _HEADERS if name in headers})
        await self._app(scope, receive, send)


class Tracing(RunListener):
    """A `RunListener` that makes the spans of each request when it has ended.

    Parameters
    ----------
    provider : OpenTelemetry's tracer provider.
    model : the model's public name.
    mode : what keeping a TBT objective means.
    """

    def __init__(self, provider: Any, model: str, mode: SLOMode) -> None:
        self._trace = require("opentelemetry.trace", extra="otel", purpose=_PURPOSE)
        propagation = require("opentelemetry.trace.propagation.tracecontext", extra="otel", purpose=_PURPOSE)
        self._propagator = propagation.TraceContextTextMapPropagator()
        self._tracer = provider.get_tracer("onbeat", __version__)
        self._model = model
        self._mode: SLOMode = mode
        self._carriers: dict[str, dict[str, str]] = {}

    def on_request(self, record: RequestRecord, /) -> None:
        """Remember which trace the request belongs to."""
        if carrier := _carrier.get():
            self._carriers[record.request_id] = carrier

    def on_finish(self, record: RequestRecord) -> None:
        """Make the request's spans; they leave the process by another thread."""
        to_wall = time.time() - time.monotonic()

        def nanoseconds(seconds: float) -> int:
            return int((seconds + to_wall) * 1e9)

        parent = self._propagator.extract(self._carriers.pop(record.request_id, {}))
        span = self._tracer.start_span(
            f"{'embeddings' if record.is_embedding else 'generate'} {self._model}",
            context=parent,
            kind=self._trace.SpanKind.SERVER,
            start_time=nanoseconds(record.arrival),
            attributes=self._attributes(record),
        )
        if record.finish_reason in ("error", "rejected", "expired"):
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, record.finish_reason))
        inside = self._trace.set_span_in_context(span)
        for name, start, end in _phases(record):
            part = self._tracer.start_span(name, context=inside, start_time=nanoseconds(start))
            part.end(nanoseconds(end))
        span.end(nanoseconds(record.end))

    def _attributes(self, record: RequestRecord) -> dict[str, Any]:
        first = record.delivery_times[0] if record.delivery_times else None
        found = {
            "gen_ai.request.model": self._model,
            "gen_ai.operation.name": "embeddings" if record.is_embedding else "text_completion",
            "gen_ai.response.id": record.request_id,
            "gen_ai.response.finish_reasons": [record.finish_reason],
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.output_tokens": record.num_output_tokens,
            "onbeat.cached_tokens": record.num_cached_tokens,
            "onbeat.preemptions": record.num_preemptions,
            "onbeat.replica": record.replica,
            "onbeat.time_to_first_token": None if first is None else first - record.arrival,
            "onbeat.predicted_time_to_first_token": record.predicted_ttft,
            "onbeat.fate": None if record.fate is None else record.fate.value,
        }
        if has_objectives(record) and record.slo is not None:
            found["onbeat.slo.class"] = record.request_class
            found["onbeat.slo.met"] = bool(good_requests([record], mode=self._mode)[0])
            found |= {f"onbeat.slo.{name}": getattr(record.slo, name) for name in ("ttft", "tbt", "e2e")}
        return {name: value for name, value in found.items() if value is not None}


def _phases(record: RequestRecord) -> Iterator[tuple[str, float, float]]:
    """Yield the parts of a request that took place, with their begin and end."""
    deliveries = record.delivery_times
    begun = record.scheduled
    yield "queue", record.arrival, record.end if begun is None else begun
    if begun is not None:
        yield "prefill", begun, deliveries[0] if deliveries else record.end
    if len(deliveries) > 1:
        yield "decode", deliveries[0], deliveries[-1]


@contextmanager
def exported_traces(endpoint: str, model: str, mode: SLOMode) -> Iterator[Tracing]:
    """Send the spans to a collector, by OTLP over HTTP, while the block runs.

    Spans wait in a bounded queue, and a thread sends them: a collector that is slow or away costs spans, and
    no request waits for it.

    Parameters
    ----------
    endpoint : such as `http://127.0.0.1:4318/v1/traces`.

    Raises
    ------
    MissingExtra : OpenTelemetry is not installed.
    """
    sdk = require("opentelemetry.sdk.trace", extra="otel", purpose=_PURPOSE)
    export = require("opentelemetry.sdk.trace.export", extra="otel", purpose=_PURPOSE)
    resources = require("opentelemetry.sdk.resources", extra="otel", purpose=_PURPOSE)
    otlp = require("opentelemetry.exporter.otlp.proto.http.trace_exporter", extra="otel", purpose=_PURPOSE)
    about = {"service.name": "onbeat", "service.version": __version__}
    provider = sdk.TracerProvider(resource=resources.Resource.create(about))
    provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter(endpoint=endpoint)))
    try:
        yield Tracing(provider, model, mode)
    finally:
        provider.shutdown()


LAG_INTERVAL = 0.05
"""Seconds between two looks at how late the event loop is: a stall as long is never missed."""


class Telemetry:
    """Owns the tracker and the exporter.

    Parameters
    ----------
    config : which aliases to export.
    model_name : the model's name, as metrics label it.
    listeners : more that want to hear of steps and requests, such as a timeline.
    policy : the scheduler's, as metrics show it.
    proposer : what proposes draft tokens; None where nothing is speculated.
    fleet_counts : what a fleet does with requests, as its client counts it.
    shared : what other front ends have a part in; None where there are no others.

    Attributes
    ----------
    tracker : must observe the engine client (`observers=[telemetry.tracker]`).
    counts : what is counted.
    books : of what front ends share, where this is the process that has them.
    shared : what a front end asks of them.
    grammars : counts requests that are refused for what their answer must match.
    """

    def __init__(  # noqa: PLR0913 -- what is served, and who wants to hear
        self,
        config: ServerConfig,
        model_name: str,
        listeners: Sequence[RunListener] = (),
        *,
        policy: str = "",
        proposer: str | None = None,
        fleet_counts: FleetCounts | None = None,
        shared: Desk | None = None,
    ) -> None:
        self.counts = counts = RunCounts(config.slo.mode)
        self.grammars = counts.grammars
        self.tracker = RequestTracker([counts, *listeners])
        self.exporter = MetricsExporter(
            counts,
            model_name=model_name,
            policy=policy,
            proposer=proposer,
            aliases=config.metrics_aliases,
            fleet_counts=fleet_counts,
        )
        on_limited = self.exporter.server.count_rate_limited
        self.books = Books(config.slo.key_limits, on_limited, counts.jobs)
        self.shared = shared or Desk(self.books, self.shown)

    async def shown(self, what: str) -> bytes:
        """Return the numbers of this process as `metrics` or `state` has them."""
        return self.exporter.render() if what == "metrics" else self.exporter.state()

    def on_http(self, context: HttpContext) -> None:
        """Count an HTTP request that has ended."""
        counts = self.exporter.server
        counts.http[context.endpoint, str(context.status)] += 1
        if context.status == 200 and context.error_code is not None:
            counts.stream_errors[context.error_code] += 1

    @asynccontextmanager
    async def watched_loop(self, *, of_keeper: bool = False) -> AsyncIterator[None]:
        """Measure how late the event loop is while the block runs."""
        counts = self.exporter.server
        task = asyncio.create_task(self._watch_loop(counts.keeper_lag if of_keeper else counts.loop_lag))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _watch_loop(self, lag: Histogram) -> None:
        while True:
            due = time.monotonic() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            lag.observe(max(time.monotonic() - due, 0.0))

    def routes(self) -> APIRouter:
        """Return the routes of the metrics, open to everybody."""
        router = APIRouter(tags=["health"])

        @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
        async def metrics() -> Response:
            """Return Prometheus metrics."""
            return Response(await self.shared.show("metrics"), headers={"content-type": CONTENT_TYPE_LATEST})

        described: dict[int | str, dict[str, Any]] = {
            200: {"content": {"application/json": {"schema": state_schema()}}}
        }

        @router.get("/state", response_class=Response, responses=described)
        async def state() -> Response:
            """Return the numbers of the metrics as JSON, by name and then by the values of their labels."""
            return Response(await self.shared.show("state"), media_type="application/json")

        return router
