"""The description at /openapi.json, where FastAPI cannot find it by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from onbeat.core.slo import LONGEST_OBJECTIVE, SHORTEST_OBJECTIVE
from onbeat.server.fields import HARMLESS, NO_OP_VALUES
from onbeat.server.middleware import OPEN_PATHS
from onbeat.server.objectives import LONGEST_TENANT, TBT_HEADER, TENANT_HEADER, TTFT_HEADER

_COMPONENT = "#/components/schemas/{model}"


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a body that a route parses by hand; `describe` adds its schema."""
    schema = {"$ref": _COMPONENT.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def slo_headers() -> list[dict[str, Any]]:
    """Return the description of the headers that say a request's objectives, and for whom it is."""
    objective = {"type": "number", "minimum": SHORTEST_OBJECTIVE * 1e3, "maximum": LONGEST_OBJECTIVE * 1e3}
    tenant = {"type": "string", "maxLength": LONGEST_TENANT}
    described = [
        (TTFT_HEADER, "TTFT objective, milliseconds", objective),
        (TBT_HEADER, "TBT objective, milliseconds", objective),
        (TENANT_HEADER, "Who shares the server fairly with others", tenant),
    ]
    return [
        {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
        for name, text, schema in described
    ]


def describe(app: FastAPI, bodies: Iterable[type[BaseModel]], *, needs_key: bool) -> None:
    """Let an application describe the bodies it parses by hand, and its API key.

    Parameters
    ----------
    app : changed in place.
    bodies : the models that `json_body` was called with.
    needs_key : whether the guarded paths need an API key.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(_body_schemas(bodies))
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)  # FastAPI's 422, which this server never sends
            _finish_operations(schema, needs_key=needs_key)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _body_schemas(bodies: Iterable[type[BaseModel]]) -> dict[str, Any]:
    schemas: dict[str, Any] = {}
    for model in bodies:
        schema = model.model_json_schema(ref_template=_COMPONENT)
        schemas.update(schema.pop("$defs", {}))
        for name in HARMLESS - schema["properties"].keys():
            schema["properties"][name] = {"description": "Accepted, without effect"}
        for name in NO_OP_VALUES.keys() - schema["properties"].keys():
            schema["properties"][name] = {
                "description": "Not supported: only values that ask for nothing are accepted",
                "enum": list(NO_OP_VALUES[name]),
            }
        schemas[model.__name__] = schema
    return schemas


def _finish_operations(schema: dict[str, Any], *, needs_key: bool) -> None:
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if needs_key and path not in OPEN_PATHS:
                operation["security"] = [{"ApiKey": []}]
    if needs_key:
        schema["components"]["securitySchemes"] = {"ApiKey": {"type": "http", "scheme": "bearer"}}
