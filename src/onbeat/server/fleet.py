"""The routes that show a fleet of replicas and change it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Depends, Request
from msgspec import Struct
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from onbeat.core.errors import InvalidRequest
from onbeat.core.fleet import DRAIN_SECONDS, MOST_REPLICAS, FleetView, ReplicaView, ScalingView
from onbeat.server.body import read_body
from onbeat.server.errors import ApiError
from onbeat.server.fields import WHOLE, Closed
from onbeat.server.middleware import bearer_key
from onbeat.server.openapi import Routes
from onbeat.server.pieces import json_response
from onbeat.server.server_config import MAX_QUOTED, ServerConfig

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

    for path, endpoint, body in (
        ("/load_lora_adapter", load, LoadLoRAAdapter),
        ("/unload_lora_adapter", unload, UnloadLoRAAdapter),
    ):
        about = router.taking(body, FleetState, tag="adapters", statuses=(400, 401, 403, 404, 413))
        about["responses"][200] = {"description": "Done", "content": {"text/plain": {}}}
        router.add_api_route(path, endpoint, methods=["POST"], response_class=PlainTextResponse, **about)
    return router


def fleet_routes(fleet: FleetView, config: ServerConfig) -> Routes:
    """Return the routes under /fleet."""
    router = _keyed_routes(config, prefix="/fleet")

    async def show() -> Response:
        """Return how each replica stands."""
        return _state(fleet)

    async def drain(request: Request) -> Response:
        """Let a replica end: it takes nothing new, and what waits there goes elsewhere."""
        body = await read_body(request, DrainRequest)
        await fleet.drain(body.replica, seconds=body.timeout, restarts=body.restart)
        return _state(fleet)

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

    async def restart(request: Request) -> Response:
        """Start all replicas again, one after another, without loss; or the keeper."""
        body = await read_body(request, RestartRequest)
        await fleet.restart(keeper=body.keeper)
        return _state(fleet)

    shown = router.telling(FleetState, 401, 403)
    router.add_api_route("", show, methods=["GET"], tags=["fleet"], responses=shown)
    for path, endpoint, body in (
        ("/drain", drain, DrainRequest),
        ("/scale", scale, ScaleRequest),
        ("/restart", restart, RestartRequest),
    ):
        about = router.taking(body, FleetState, tag="fleet", statuses=(400, 401, 403, 413))
        router.add_api_route(path, endpoint, methods=["POST"], **about)
    return router


def _state(fleet: FleetView) -> Response:
    return json_response(FleetState(fleet.is_ready, fleet.num_waiting, fleet.scaling, list(fleet.replicas())))
