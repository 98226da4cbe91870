"""What the server says of itself: its health and version, open to everybody, its models, and its replicas.

And the page at `/`: a chat with an objective, and the server's state beside it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from msgspec import Struct
from pydantic import Field
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from onbeat.core.errors import EngineDead, InvalidRequest, Overloaded
from onbeat.core.fleet import DRAIN_SECONDS, MOST_REPLICAS, FleetView, ReplicaView, ScalingView
from onbeat.server.body import read_body
from onbeat.server.errors import ApiError, engine_hangs
from onbeat.server.fields import WHOLE, Closed
from onbeat.server.middleware import bearer_key
from onbeat.server.openapi import Routes, error_answers
from onbeat.server.pieces import json_response
from onbeat.server.server_config import MAX_QUOTED, ServerConfig
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
    router, fleet = Routes(tags=["health"]), services.fleet
    empty: dict[int | str, dict[str, Any]] = {200: {"description": "Yes; no body"}, **error_answers(503)}

    async def health() -> Response:
        """Tell whether the server can go on by itself: it does while it drains, or replaces engines.

        What restarts a server that fails here ends its other engines, and the streams that wait for one.
        """
        if not services.engine.is_alive and (fleet is None or fleet.seconds_to_ready is None):
            raise _all_down(fleet)
        if fleet is None and services.watch.hang is not None:  # a fleet replaces an engine that hangs
            raise engine_hangs(services.watch.hang)
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


LONGEST_DRAIN_SECONDS = 24 * 3600.0


class DrainRequest(Closed):
    """A replica that is to end without loss."""

    replica: str
    timeout: float = Field(DRAIN_SECONDS, ge=0, le=LONGEST_DRAIN_SECONDS)
    """Seconds that running requests may take; what is left then goes on elsewhere."""
    restart: bool = False
    """Whether it is started again."""


class ScaleRequest(Closed):
    """How many replicas there are to be: a number, or the bounds of a fleet that decides itself.

    Without any a server answers nobody, and has nothing that starts one: only bounds may begin at 0.
    """

    replicas: Annotated[int, Field(ge=1, le=MOST_REPLICAS), WHOLE] | None = None
    min: Annotated[int, Field(ge=0, le=MOST_REPLICAS), WHOLE] | None = None
    max: Annotated[int, Field(ge=1, le=MOST_REPLICAS), WHOLE] | None = None


class RestartRequest(Closed):
    """All replicas are started again, one after another; or the keeper of several front ends is, once."""

    keeper: bool = False


class FleetState(Struct):
    ready: bool
    requests_waiting: int
    scaling: ScalingView | None
    replicas: list[ReplicaView]


class LoadLoRAAdapter(Closed):
    """A LoRA adapter that is to be loaded; the fields are vLLM's."""

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False
    """Whether it may take the place of another of its name."""


class UnloadLoRAAdapter(Closed):
    """A LoRA adapter that no further request is to ask for."""

    lora_name: str


def _keyed_routes(config: ServerConfig, **how: Any) -> Routes:
    """Return routes that need a key, also where the rest of the server needs none."""

    def check_caller(request: Request) -> None:
        # an address is no proof: a proxy on this machine hands on what comes from others
        if not config.fleet_keys:
            raise ApiError(
                403,
                "a fleet and its adapters are shown and changed with a key alone, and this server has none; "
                "serve with --fleet-key KEY, or with --api-key",
                code="forbidden",
            )
        bearer_key(request.headers, config.fleet_keys, name="key of the fleet")

    return Routes(dependencies=[Depends(check_caller)], **how)


def adapter_routes(fleet: FleetView, config: ServerConfig, taken: Sequence[str]) -> Routes:
    """Return the routes that load LoRA adapters and unload them, as vLLM has them.

    Parameters
    ----------
    taken : names of the model itself.
    """
    router = _keyed_routes(config, prefix="/v1")

    def taking(body: type[Closed]) -> dict[str, Any]:
        about = router.taking(body, FleetState, tag="adapters", statuses=(400, 401, 403, 404, 413))
        about["responses"][200] = {"description": "Done", "content": {"text/plain": {}}}
        return {**about, "response_class": PlainTextResponse}

    @router.post("/load_lora_adapter", **taking(LoadLoRAAdapter))
    async def load(request: Request) -> Response:
        """Load a LoRA adapter on every replica."""
        body = await read_body(request, LoadLoRAAdapter)
        name = body.lora_name
        if name in taken:
            raise InvalidRequest(
                f"lora_name is {name!r}, which is the model's own name; choose another", param="lora_name"
            )
        await fleet.load_adapter(name, body.lora_path, in_place=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post("/unload_lora_adapter", **taking(UnloadLoRAAdapter))
    async def unload(request: Request) -> Response:
        """Let no further request ask for a LoRA adapter."""
        body = await read_body(request, UnloadLoRAAdapter)
        if body.lora_name not in fleet.adapters:
            raise ApiError(
                404,
                f"there is no LoRA adapter {body.lora_name[:MAX_QUOTED]!r}; there are "
                f"{', '.join(fleet.adapters) or 'none'}",
                param="lora_name",
                code="model_not_found",
            )
        await fleet.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router


def fleet_routes(fleet: FleetView, config: ServerConfig) -> Routes:
    """Return the routes under /fleet."""
    router = _keyed_routes(config, prefix="/fleet")
    taking = partial(router.taking, answer=FleetState, tag="fleet", statuses=(400, 401, 403, 413))

    @router.get("", tags=["fleet"], responses=router.telling(FleetState, 401, 403))
    async def show() -> Response:
        """Return how each replica stands."""
        return _state(fleet)

    @router.post("/drain", **taking(DrainRequest))
    async def drain(request: Request) -> Response:
        """Let a replica end: it takes nothing new, and what waits there goes elsewhere."""
        body = await read_body(request, DrainRequest)
        await fleet.drain(body.replica, seconds=body.timeout, restarts=body.restart)
        return _state(fleet)

    @router.post("/scale", **taking(ScaleRequest))
    async def scale(request: Request) -> Response:
        """Start replicas, or let some end, until there are so many."""
        body = await read_body(request, ScaleRequest)
        if body.replicas is not None and body.min is None and body.max is None:
            await fleet.scale(body.replicas)
        elif body.replicas is None and body.min is not None and body.max is not None:
            await fleet.autoscale(body.min, body.max)
        else:
            raise InvalidRequest(
                "give replicas, how many there are to be; or min and max, between which a fleet that was "
                "started with --autoscale decides itself",
                param="replicas",
            )
        return _state(fleet)

    @router.post("/restart", **taking(RestartRequest))
    async def restart(request: Request) -> Response:
        """Start all replicas again, one after another, without loss; or the keeper."""
        body = await read_body(request, RestartRequest)
        await fleet.restart(keeper=body.keeper)
        return _state(fleet)

    return router


def _state(fleet: FleetView) -> Response:
    return json_response(FleetState(fleet.is_ready, fleet.num_waiting, fleet.scaling, list(fleet.replicas())))
