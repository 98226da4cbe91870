"""A request's body from bytes to a checked model, with errors that name the field.

What takes time in JSON is counted before it is read: the reader of JSON holds the interpreter until it is
done, in a thread as well as in the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any, TypeVar

import numpy as np
import orjson
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive

from onbeat.core.errors import InvalidRequest
from onbeat.server.errors import ApiError, ClientGone, too_large
from onbeat.server.fair_threads import Turns
from onbeat.server.fields import Closed, check_fields, validated
from onbeat.server.middleware import context_of
from onbeat.server.server_config import MAX_JSON_LEVELS, MAX_JSON_PARTS, MAX_JSON_VALUES, MAX_QUOTED

_MOST_MARKS = (
    (b",", MAX_JSON_VALUES, "values"),
    (b"{[:", MAX_JSON_PARTS, "objects, arrays and fields"),
)
"""What JSON is counted by, with the most of it: what takes time in JSON is not text."""

Raw = bytes | bytearray


class JsonReader:
    """Reads the JSON of one request, or of one part of it, all of which together is bounded.

    Parameters
    ----------
    what : it is, for errors.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._num_bytes = 0
        self._nums = [0] * len(_MOST_MARKS)

    def read(self, text: str | Raw) -> Any:
        """Return the value that one more text holds.

        Raises
        ------
        ApiError : with those before it has more than is read in a request (413).
        orjson.JSONDecodeError : it is not valid JSON.
        """
        raw = text.encode() if isinstance(text, str) else text
        self._num_bytes += len(raw)
        if self._num_bytes > MAX_JSON_PARTS:  # fewer bytes hold no more marks
            self.count(raw)
        return orjson.loads(raw)

    def count(self, raw: Raw) -> None:
        """Count a text, mostly without the interpreter lock: inside of its strings nothing counts.

        Raises
        ------
        ApiError : as `read`.
        """
        plain = np.frombuffer(raw.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
        is_inside = np.bitwise_xor.accumulate((plain == ord('"')).view(np.uint8)).view(np.bool_)
        for index, (marks, most, name) in enumerate(_MOST_MARKS):
            self._nums[index] += sum(int(np.count_nonzero((plain == mark) & ~is_inside)) for mark in marks)
            if self._nums[index] > most:
                raise ApiError(
                    413,
                    f"{self._what} holds more than {most} {name}; send less in a request",
                    code="request_too_large",
                )


def num_bytes_of(raw: Raw, wanted: bytes) -> int:
    """Return how often some bytes stand in others."""
    return len(raw.translate(None, bytes(set(range(256)) - set(wanted))))


_Model = TypeVar("_Model", bound=BaseModel)


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
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequest(
            f"the content type is {content_type[:MAX_QUOTED]!r}; send JSON as 'application/json'",
            code="invalid_content_type",
        )
    if (encoding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise InvalidRequest(
            f"the body is encoded as {encoding[:MAX_QUOTED]!r}; send it without content-encoding",
            code="invalid_content_type",
        )
    raw = await receive_body(request.headers, request.receive, request.app.state.max_body_bytes)
    context.num_body_bytes = len(raw)
    if context.desk is not None:
        await context.desk.take_body(context.number, len(raw))
    turns = Turns()
    # a look that takes little says whether JSON is to be counted
    if num_bytes_of(raw, b"".join(marks for marks, _, _ in _MOST_MARKS)) > MAX_JSON_PARTS:
        await asyncio.to_thread(JsonReader("the body").count, raw)
    await turns.rest()
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        kind = _JSON_TYPES.get(type(body), "number")
        raise InvalidRequest(f"the body is a JSON {kind}; it must be an object", code="invalid_json")
    await turns.rest()
    if num_bytes_of(raw, b"{[") > MAX_JSON_LEVELS and is_nested_too_deep(body):
        raise InvalidRequest(
            f"the body is nested deeper than {MAX_JSON_LEVELS} levels; flatten it", code="invalid_json"
        )
    await turns.rest()
    context.arrival = time.monotonic()
    if issubclass(model, Closed):
        kept = body
    else:
        kept, ignored = check_fields(body, model.model_fields, unused)
        context.ignored_fields += ignored
    checked = validated(model, kept, context.ignored_fields)
    await turns.rest()
    return checked


def is_nested_too_deep(value: dict[str, Any]) -> bool:
    """Return whether JSON is nested too deep to be written again, inside of something that is less deep."""
    try:
        orjson.dumps([[[[value]]]])
    except orjson.JSONEncodeError:
        return True
    return False


async def receive_body(headers: Headers, receive: Receive, most: int) -> bytearray:
    """Return the whole body of a request.

    Raises
    ------
    ApiError : it has more than `most` bytes.
    ClientGone : the connection closed before the body was complete.
    """
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > most:
        raise too_large(most)
    body = bytearray()  # pieces of a list may be of two bytes each, and take thirty times as much
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > most:
            raise too_large(most)
    return body


_JSON_TYPES = {list: "array", str: "string", bool: "boolean", type(None): "null"}
