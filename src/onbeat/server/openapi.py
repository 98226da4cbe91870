"""The description at /openapi.json, where FastAPI cannot find it by itself: bodies, headers, answers."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from msgspec import Struct
from msgspec.json import schema_components
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from onbeat.core.slo import LONGEST_OBJECTIVE, SHORTEST_OBJECTIVE
from onbeat.server.errors import ErrorBody
from onbeat.server.fields import HARMLESS, NO_OP_VALUES, without_effect
from onbeat.server.jobs import JOB_HEADERS, JobFields
from onbeat.server.objectives import LONGEST_TENANT, TBT_HEADER, TENANT_HEADER, TTFT_HEADER
from onbeat.server.paths import OPEN_PATHS
from onbeat.server.prompts import TOKEN_ID_SCHEMA

_COMPONENT = "#/components/schemas/{name}"
_JOB_SCHEMAS: dict[str, Any] = JobFields.model_json_schema()["properties"]


_ALL_ERRORS = (400, 401, 404, 413, 429, 500, 503, 504)
_STREAM: dict[str, Any] = {
    "type": "object",
    "description": "One event; `data` is a chunk as JSON, an error body, or [DONE]",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}


class Routes(APIRouter):
    """Routes that read their bodies and write their answers themselves, and what describes both.

    FastAPI would accept NaN, and answer mistakes with its own 422.

    Attributes
    ----------
    bodies, answers : the classes whose schemas `describe` adds.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.bodies: list[type[BaseModel]] = []
        self.answers: list[type[Struct]] = []

    def generating(
        self,
        body: type[BaseModel],
        answer: type[Struct],
        event: type[Struct],
        error: type[Struct] = ErrorBody,
    ) -> dict[str, Any]:
        """Return the description of an endpoint that generates, as arguments of FastAPI's route."""
        about = self.embedding(body, answer, error=error, tag="generation")
        self.answers.append(event)
        told = about["responses"][200]
        told["description"] = "The whole answer, or with `stream` server-sent events"
        told["content"]["text/event-stream"] = {"schema": _STREAM}
        return about

    def embedding(self, body: type[BaseModel], answer: type[Struct], **how: Any) -> dict[str, Any]:
        """Return the same of one that embeds texts."""
        about = self.taking(body, answer, **{"tag": "embeddings", "statuses": _ALL_ERRORS, **how})
        about["openapi_extra"]["parameters"] = _slo_headers()
        return about

    def taking(
        self,
        body: type[BaseModel],
        answer: type[Struct],
        error: type[Struct] = ErrorBody,
        *,
        tag: str = "tokenizer",
        statuses: Iterable[int] = (400, 401, 404, 413),
    ) -> dict[str, Any]:
        """Return the same of any other one that takes a body."""
        self.bodies.append(body)
        taken = {"requestBody": {"required": True, "content": _json(body)}}
        told = self.telling(answer, *statuses, error=error)
        return {"tags": [tag], "responses": told, "openapi_extra": taken}

    def telling(
        self, answer: type[Struct], *statuses: int, error: type[Struct] = ErrorBody
    ) -> dict[int | str, dict[str, Any]]:
        """Return the description of answers by status: of 200, and of errors."""
        self.answers += (answer, error)
        told = {"description": "Successful Response", "content": _json(answer)}
        return {200: told, **error_answers(*statuses, error=error)}


def _slo_headers() -> list[dict[str, Any]]:
    """Return the description of the headers that say a request's objectives, and for whom it is."""
    objective = {"type": "number", "minimum": SHORTEST_OBJECTIVE * 1e3, "maximum": LONGEST_OBJECTIVE * 1e3}
    tenant = {"type": "string", "maxLength": LONGEST_TENANT}
    described = [
        (TTFT_HEADER, "TTFT objective, milliseconds", objective),
        (TBT_HEADER, "TBT objective, milliseconds", objective),
        (TENANT_HEADER, "Who shares the server fairly with others", tenant),
    ]
    for header, name in JOB_HEADERS.items():
        schema = _stated(_JOB_SCHEMAS[name])
        described.append((header, f"The same as slo.job.{name}; the body counts before it", schema))
    return [
        {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
        for name, text, schema in described
    ]


def _stated(field: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of what is there or not: it is never null."""
    stated = next(iter(field.get("anyOf", ())), field)
    return {key: value for key, value in stated.items() if key not in {"title", "default"}}


def query_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a query by the model of its parameters."""
    fields = model.model_json_schema()["properties"].items()
    return {"parameters": [{"name": name, "in": "query", "schema": _stated(each)} for name, each in fields]}


def describe(app: FastAPI, routes: Sequence[Routes], *, vocab_size: int, needs_key: bool) -> None:
    """Let an application describe the bodies it parses by hand, and its API key.

    The description is made when somebody first asks for it, and kept: it takes a quarter of a second.

    Parameters
    ----------
    app : changed in place.
    routes : with the classes of bodies and answers.
    vocab_size : token ids are below.
    needs_key : whether the guarded paths need an API key.
    """
    making = threading.Lock()

    def openapi() -> dict[str, Any]:
        with making:
            return app.openapi_schema or make()

    async def shown(_: Request) -> JSONResponse:
        # In a thread: whoever asks first would hold up all others.
        return await asyncio.to_thread(lambda: JSONResponse(openapi()))

    def make() -> dict[str, Any]:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes, servers=app.servers)
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        answers = dict.fromkeys(each for group in routes for each in group.answers)
        schemas.update(schema_components(answers, ref_template=_COMPONENT)[1])
        schemas.update(_body_schemas(each for group in routes for each in group.bodies))
        _bound_numbers(schemas, vocab_size)
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)  # FastAPI's 422, which this server never sends
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if (needs_key and path not in OPEN_PATHS) or path.startswith("/fleet"):
                    operation["security"] = [{"ApiKey": []}]
        schema["components"]["securitySchemes"] = {"ApiKey": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = schema
        return schema

    own = [getattr(route, "path", None) for route in app.routes].index(app.openapi_url)
    app.routes[own] = Route(str(app.openapi_url), shown, include_in_schema=False)  # not FastAPI's
    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _body_schemas(bodies: Iterable[type[BaseModel]]) -> dict[str, Any]:
    schemas: dict[str, Any] = {}
    for model in bodies:
        template = _COMPONENT.replace("name", "model")
        schema = deepcopy(model.model_json_schema(ref_template=template))  # it holds constants of ours
        schemas.update(schema.pop("$defs", {}))
        is_closed = schema.get("additionalProperties") is False
        for name in () if is_closed else HARMLESS - schema["properties"].keys():
            schema["properties"][name] = without_effect()
        for name in () if is_closed else NO_OP_VALUES.keys() - schema["properties"].keys():
            schema["properties"][name] = {
                "description": "Not supported: only values that ask for nothing are accepted",
                "enum": list(NO_OP_VALUES[name]),
            }
        schemas[model.__name__] = schema
    return schemas


def _bound_numbers(node: Any, vocab_size: int) -> None:
    """Give token ids within a description their largest value; infinity, which JSON lacks, is null."""
    if isinstance(node, dict) and node.items() >= TOKEN_ID_SCHEMA.items():
        node["maximum"] = vocab_size - 1
    elif isinstance(node, dict) and node.get("default") == math.inf:
        node |= {"type": ["number", "null"], "default": None}
    elif isinstance(node, dict | list):
        for each in node.values() if isinstance(node, dict) else node:
            _bound_numbers(each, vocab_size)


_MEANINGS = {
    400: "The request is malformed, asks for something unsupported, or does not fit the context",
    401: "The API key is missing or wrong",
    403: "The caller may not do that",
    404: "There is no such model, or no such response",
    413: "The body is over the limit",
    429: "The server sheds this request; see Retry-After",
    500: "The engine failed on this request",
    503: "The server is overloaded, shutting down, or its engine is dead",
    504: "The TTFT objective is out of reach after a wait in the queue",
}


def error_answers(*statuses: int, error: type[Struct] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """Return the description of error answers by status."""
    return {status: {"description": _MEANINGS[status], "content": _json(error)} for status in statuses}


def _json(kind: type[BaseModel | Struct]) -> dict[str, Any]:
    """Return the description of JSON by the name of its schema: FastAPI would make validators of a class."""
    return {"application/json": {"schema": {"$ref": _COMPONENT.format(name=kind.__name__)}}}
