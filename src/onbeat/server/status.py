"""What the server says of itself: its health and version, open to everybody, and its models."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from onbeat import __version__
from onbeat.core.errors import EngineDead
from onbeat.server.errors import engine_hangs
from onbeat.server.openapi import EngineLoad, ModelCard, ModelList, VersionInfo, error_answers
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


def model_routes(services: Services) -> APIRouter:
    """Return the routes that list what is served."""
    router = APIRouter(prefix="/v1/models", tags=["models"])

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": services.created,
            "owned_by": "onbeat",
            "root": services.info.model_name,
            "max_model_len": services.info.max_model_len,
        }

    @router.get("", response_model=ModelList, responses=error_answers(401))
    async def list_models() -> Response:
        """List the names under which the model answers."""
        return _json({"object": "list", "data": [card(name) for name in services.model_names]})

    @router.get("/{model:path}", response_model=ModelCard, responses=error_answers(400, 401, 404))
    async def retrieve_model(model: str) -> Response:
        """Describe one of them."""
        return _json(card(services.check_model(model)))

    return router


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
