"""What the server shows of itself: records of requests, Prometheus metrics, the timeline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from onbeat.core.slo import SLOMode
from onbeat.metrics.counts import RunCounts
from onbeat.metrics.exporter import MetricsExporter, state_schema
from onbeat.metrics.fleet_counts import FleetCounts
from onbeat.metrics.tracker import RequestTracker, RunListener
from onbeat.server.middleware import HttpContext
from onbeat.server.server_config import ServerConfig

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
    slo_mode : what keeping a TBT objective means to them.

    Attributes
    ----------
    tracker : must observe the engine client (`observers=[telemetry.tracker]`).
    jobs : counts jobs that end.
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
        slo_mode: SLOMode = "stream",
        fleet_counts: FleetCounts | None = None,
    ) -> None:
        counts = RunCounts(slo_mode)
        self.jobs, self.grammars = counts.jobs, counts.grammars
        self.tracker = RequestTracker([counts, *listeners])
        self.exporter = MetricsExporter(
            counts,
            model_name=model_name,
            policy=policy,
            proposer=proposer,
            aliases=config.metrics_aliases,
            fleet_counts=fleet_counts,
        )

    def on_http(self, context: HttpContext) -> None:
        """Count an HTTP request that has ended."""
        counts = self.exporter.server
        counts.http[context.endpoint, str(context.status)] += 1
        if context.num_choices:
            counts.observe_asked(context.num_choices, context.max_tokens)
        if context.status == 200 and context.error_code is not None:
            counts.stream_errors[context.error_code] += 1

    @asynccontextmanager
    async def watched_loop(self) -> AsyncIterator[None]:
        """Measure how late the event loop is while the block runs."""
        task = asyncio.create_task(self._watch_loop())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _watch_loop(self) -> None:
        while True:
            due = time.monotonic() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            self.exporter.server.loop_lag.observe(max(time.monotonic() - due, 0.0))

    def routes(self) -> APIRouter:
        """Return the routes of the metrics, open to everybody."""
        router = APIRouter(tags=["health"])

        @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
        async def metrics() -> Response:
            """Return Prometheus metrics."""
            body, content_type = self.exporter.render()
            return Response(body, headers={"content-type": content_type})

        described: dict[int | str, dict[str, Any]] = {
            200: {"content": {"application/json": {"schema": state_schema()}}}
        }

        @router.get("/state", response_class=Response, responses=described)
        async def state() -> Response:
            """Return the numbers of the metrics as JSON, by name and then by the values of their labels."""
            return Response(self.exporter.state(), media_type="application/json")

        return router
