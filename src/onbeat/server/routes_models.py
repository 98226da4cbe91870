"""GET /v1/models and GET /v1/models/{model}."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from onbeat.server.openapi import ModelCard, ModelList, error_answers
from onbeat.server.services import Services


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
