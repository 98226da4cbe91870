"""What the server says of itself: its health and version, open to everybody, and its models.

And the page at `/`: a chat with an objective, and the server's state beside it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, Literal

from fastapi import APIRouter
from msgspec import Struct
from starlette.responses import HTMLResponse, Response

from onbeat.core.errors import EngineDead, Overloaded
from onbeat.core.fleet import FleetView
from onbeat.server.errors import engine_hangs
from onbeat.server.openapi import Routes, error_answers
from onbeat.server.pieces import json_response
from onbeat.server.services import Services
from onbeat.version import __version__


def home_routes() -> APIRouter:
    """Return the route of the page; it is open, and asks for a key where the API wants one."""
    router = APIRouter(include_in_schema=False)
    text = (files("onbeat.server") / "assets/index.html").read_text(encoding="utf-8")
    headers = {
        "content-security-policy": content_policy(text),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    async def home() -> Response:
        """Return the page."""
        return HTMLResponse(text, headers=headers)

    router.add_api_route("/", home, methods=["GET", "HEAD"])
    return router


def content_policy(page: str) -> str:
    """Return a policy under which a page runs its own script and style, and talks to its own server alone."""
    digests = {
        tag: base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
        for tag in ("script", "style")
        if (found := re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL))
    }
    return (
        f"default-src 'none'; script-src 'sha256-{digests['script']}'; "
        f"style-src 'sha256-{digests['style']}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class EngineLoad(Struct):
    server_load: int


class VersionInfo(Struct):
    version: str


class ModelCard(Struct, kw_only=True):
    """A model as both OpenAI's and Anthropic's clients read it."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int
    created_at: str
    owned_by: str = "onbeat"
    root: str
    parent: str | None = None
    """Of a LoRA adapter: the model that it changes."""
    max_model_len: int


class ModelList(Struct, tag_field="object", tag="list"):
    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: bool = False


def health_routes(services: Services) -> Routes:
    """Return the routes of health, readiness, load and version."""
    router = Routes(tags=["health"])
    empty: dict[int | str, dict[str, Any]] = {200: {"description": "Yes; no body"}, **error_answers(503)}

    async def health() -> Response:
        """Tell whether the server can go on by itself: it does while it drains, or replaces engines.

        What restarts a server that fails here ends its other engines, and the streams that wait for one.
        """
        _check_goes_on(services)
        return Response()

    async def ready() -> Response:
        """Tell whether a replica takes new requests; 503 as soon as the server is told to stop."""
        services.lifecycle.check_open()
        _check_ready(services)
        return Response()

    async def load() -> Response:
        """Return how many HTTP requests are generating."""
        return json_response(EngineLoad(services.lifecycle.num_open))

    async def version() -> Response:
        """Return the server's version."""
        return json_response(VersionInfo(__version__))

    for path, endpoint in (("/health", health), ("/ping", health), ("/ready", ready)):
        # HEAD is what load balancers probe with. Its own route: operation ids must differ.
        for method in ("GET", "HEAD"):
            router.add_api_route(path, endpoint, methods=[method], responses=empty, response_class=Response)
    router.add_api_route("/load", load, methods=["GET"], responses=router.telling(EngineLoad))
    router.add_api_route("/version", version, methods=["GET"], responses=router.telling(VersionInfo))
    return router


def _check_goes_on(services: Services) -> None:
    fleet = services.fleet
    if not services.engine.is_alive and (fleet is None or fleet.seconds_to_ready is None):
        raise _all_down(fleet)
    if fleet is None and services.watch.hang is not None:  # a fleet replaces an engine that hangs
        raise engine_hangs(services.watch.hang)


def _check_ready(services: Services) -> None:
    fleet = services.fleet
    if not services.engine.is_alive or (fleet is not None and not fleet.is_ready):
        raise _all_down(fleet)
    if services.watch.hang is not None:
        raise engine_hangs(services.watch.hang)


def _all_down(fleet: FleetView | None) -> Exception:
    """Return what a probe gets while no replica takes requests."""
    if fleet is None:
        return EngineDead("the engine process has ended; see the server's log")
    states = "; ".join(
        f"{each.replica} is {each.state}" + (f" ({each.why})" if each.why else "")
        for each in fleet.replicas()
    )
    message = f"no replica takes requests: {states or 'there is none'}"
    seconds = fleet.seconds_to_ready
    if seconds is None:
        return EngineDead(f"{message}. None is started again by itself: see the log, then POST /fleet/scale")
    return Overloaded(message, code="no_replica", retry_after=seconds)


def model_routes(services: Services) -> Routes:
    """Return the routes that list what is served."""
    router = Routes(prefix="/v1/models", tags=["models"])

    def card(name: str) -> ModelCard:
        adapter = services.adapters.get(name)
        return ModelCard(
            id=name,
            display_name=name,
            created=services.created,
            created_at=f"{datetime.fromtimestamp(services.created, UTC):%Y-%m-%dT%H:%M:%SZ}",
            root=services.info.model_name if adapter is None else adapter.path,
            parent=None if adapter is None else services.model_names[0],
            max_model_len=services.info.limits.max_model_len,
        )

    @router.get("", responses=router.telling(ModelList, 401))
    async def list_models() -> Response:
        """List the names under which the model answers, with OpenAI's fields and Anthropic's."""
        names = (*services.model_names, *services.adapters)
        return json_response(ModelList(list(map(card, names)), names[0], names[-1]))

    @router.get("/{model:path}", responses=router.telling(ModelCard, 400, 401, 404))
    async def retrieve_model(model: str) -> Response:
        """Describe one of them."""
        return json_response(card(services.check_model(model)))

    return router
