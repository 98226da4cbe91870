"""Whether the server lives, takes requests and who it is: paths open to everybody."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from onbeat import __version__
from onbeat.core.errors import EngineDead
from onbeat.server.errors import engine_hangs
from onbeat.server.openapi import EngineLoad, VersionInfo, error_answers
from onbeat.server.services import Services


def health_routes(services: Services) -> APIRouter:
    """Return the routes of health, readiness, load and version."""
    router = APIRouter(tags=["health"])
    empty: dict[int | str, dict[str, Any]] = {200: {"description": "Yes; no body"}, **error_answers(503)}

    async def health() -> Response:
        """Tell whether the engine lives and goes on; stays 200 while the server drains."""
        if not services.engine.is_alive:
            raise EngineDead("the engine process has ended, and the server ends too; see its log")
        if services.watch.hang is not None:
            raise engine_hangs(services.watch.hang)
        return Response()

    async def ready() -> Response:
        """Tell whether the server takes new requests; 503 as soon as it is told to stop."""
        services.lifecycle.check_open()
        return await health()

    async def load() -> Response:
        """Return how many HTTP requests are generating."""
        return _json({"server_load": services.lifecycle.num_open})

    async def version() -> Response:
        """Return the server's version."""
        return _json({"version": __version__})

    for path, endpoint in (("/health", health), ("/ping", health), ("/ready", ready)):
        # HEAD is what load balancers probe with. Its own route: operation ids must differ.
        for method in ("GET", "HEAD"):
            router.add_api_route(path, endpoint, methods=[method], responses=empty, response_class=Response)
    router.add_api_route("/load", load, methods=["GET"], response_model=EngineLoad)
    router.add_api_route("/version", version, methods=["GET"], response_model=VersionInfo)
    return router


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
