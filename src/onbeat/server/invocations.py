"""POST /invocations: SageMaker's one path for all requests; their fields say which endpoint answers them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from onbeat.core.errors import InvalidRequest
from onbeat.server.body import read_json_object
from onbeat.server.middleware import context_of
from onbeat.server.services import Services

INVOCATIONS_PATH = "/invocations"

_ENDPOINTS = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
    "query": "/v1/rerank",
    "text_1": "/v1/score",
    "queries": "/v1/score",
    "data_1": "/v1/score",
}
"""A field that a request must have, and whose it is; the first that is there counts."""


def invocation_routes(services: Services) -> APIRouter:
    """Return the route of all requests of SageMaker."""
    router = APIRouter()

    @router.post(INVOCATIONS_PATH, include_in_schema=False)
    async def invocations(request: Request) -> Response:
        """Answer as the endpoint does that has these fields."""
        body = await read_json_object(request)
        context_of(request.scope).body = body
        return _Forwarded(_endpoint(body, generates=services.info.generates), request.app.router)

    return router


def _endpoint(body: Mapping[str, Any], *, generates: bool) -> str:
    """Return the path of the endpoint that a request is for.

    Parameters
    ----------
    generates : whether the model answers chats; else they are embedded.

    Raises
    ------
    InvalidRequest : it is for none.
    """
    for field, path in _ENDPOINTS.items():
        if body.get(field) is not None:
            return path if generates or field != "messages" else _ENDPOINTS["input"]
    raise InvalidRequest(
        f"the body is for no endpoint of this server; send one of {', '.join(_ENDPOINTS)}",
        code="missing_required_parameter",
    )


class _Forwarded(Response):
    """The answer of another path, whose errors are its own."""

    def __init__(self, path: str, router: ASGIApp) -> None:
        super().__init__()
        self._path = path
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._router({**scope, "path": self._path, "raw_path": self._path.encode()}, receive, send)
