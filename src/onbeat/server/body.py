"""A request's body from bytes to a checked model, with errors that name the field."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler
from starlette.requests import Request

from onbeat.core.errors import InvalidRequest
from onbeat.server.errors import ClientGone
from onbeat.server.fair_threads import Turns
from onbeat.server.fields import check_fields, refuse_unknown, validated
from onbeat.server.json_reader import JsonReader, has_many_marks, num_bytes_of
from onbeat.server.middleware import context_of
from onbeat.server.server_config import MAX_JSON_LEVELS, MAX_QUOTED

_Model = TypeVar("_Model", bound=BaseModel)


class _AlsoText:
    """Lets a number or a boolean be written as text, as pydantic does unless it is strict; no other type.

    Parameters
    ----------
    pattern : of the texts that are taken.
    read : makes a value of one.
    """

    def __init__(self, pattern: str, read: Callable[[str], object]) -> None:
        self._pattern = re.compile(pattern)
        self._read = read

    def _value(self, value: object) -> object:
        if isinstance(value, str):
            return self._read(value) if self._pattern.fullmatch(value) else value
        # some languages have no integers: 5.0; above, a float may stand for one that it cannot hold
        is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        return int(value) if is_whole and self._read is int else value  # type: ignore[call-overload]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return BeforeValidator(self._value).__get_pydantic_core_schema__(source, handler)

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> Any:
        text = {"type": "string", "pattern": f"^({self._pattern.pattern})$"}
        return {"anyOf": [handler(schema), text]}


WHOLE = _AlsoText(r"[+-]?[0-9]{1,19}", int)
"""Of integers, which may be written as 5.0 or "5"."""
NUMBER = _AlsoText(r"[+-]?[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?", float)
"""Of other numbers, which may be written as "0.5"."""
Flag = Annotated[bool, _AlsoText("[Tt]rue|[Ff]alse|TRUE|FALSE|[01]", lambda text: text[0] in "tT1")]
"""A boolean, which may be written as "true"."""


async def read_body(request: Request, model: type[_Model], *, unused: Collection[str] = ()) -> _Model:
    """Return the body of a request as a checked model; fields that are `unused` are taken, and dropped.

    The request's context gets the time of its arrival and the names of the fields that are ignored.

    Raises
    ------
    InvalidRequest : it is no JSON object (NaN and Infinity are not JSON), or a field is misspelt, missing,
        unsupported or wrong.
    ApiError : it holds so many values that reading it would hold up all other requests (413).
    ClientGone : the connection closed before the body was complete.
    """
    context = context_of(request.scope)
    body = await read_json_object(request)
    context.arrival = time.monotonic()
    if model.model_config.get("extra") == "forbid":
        refuse_unknown(body, model.model_fields)
        kept = body
    else:
        kept, ignored = check_fields(body, model.model_fields, unused)
        context.ignored_fields += ignored
    turns = Turns()
    checked = validated(model, kept, context.ignored_fields)
    await turns.rest()
    return checked


async def read_json_object(request: Request) -> dict[str, Any]:
    """Return the body of a request, a JSON object; raise as `read_body` does."""
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequest(
            f"the content type is {content_type[:MAX_QUOTED]!r}; send JSON as 'application/json'",
            code="invalid_content_type",
        )
    raw = await _read_body(request)
    context_of(request.scope).num_body_bytes = len(raw)
    turns = Turns()
    if has_many_marks(raw):
        await asyncio.to_thread(JsonReader("the body").count, raw)
    await turns.rest()
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise InvalidRequest(
            f"the body is a JSON {_json_type(body)}; it must be an object", code="invalid_json"
        )
    await turns.rest()
    if num_bytes_of(raw, b"{[") > MAX_JSON_LEVELS and is_nested_too_deep(body):
        raise InvalidRequest(
            f"the body is nested deeper than {MAX_JSON_LEVELS} levels; flatten it", code="invalid_json"
        )
    await turns.rest()
    return body


def is_nested_too_deep(value: dict[str, Any]) -> bool:
    """Return whether JSON is nested too deep to be written again, inside of something that is less deep."""
    try:
        orjson.dumps([[[[value]]]])
    except orjson.JSONEncodeError:
        return True
    return False


async def _read_body(request: Request) -> bytearray:
    body = bytearray()  # pieces of a list may be of two bytes each, and take thirty times as much
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def _json_type(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
