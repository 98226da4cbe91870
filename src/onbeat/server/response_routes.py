"""The paths of the Responses API. Responses are kept, to be read on after a break, or gone on from."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Raw, Struct
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Scope

from onbeat.core.errors import InvalidRequest, OnbeatError, quoted
from onbeat.server.answer import EVENT_STREAM_HEADERS, AnswerResponse
from onbeat.server.body import read_body
from onbeat.server.chat import chat_prompt, chat_requests
from onbeat.server.errors import ApiError, ErrorBody, error_reply
from onbeat.server.fields import WHOLE, Flag, validated
from onbeat.server.generation_request import read_request
from onbeat.server.kept_answers import AnswerShelf, KeptAnswer
from onbeat.server.middleware import context_of
from onbeat.server.openapi import Routes, query_of
from onbeat.server.pen import event_bytes
from onbeat.server.pieces import encode, json_response
from onbeat.server.response_request import ResponseRequest, chat_of, items_of, listed_item
from onbeat.server.responses import ModelResponse, ResponseEvent, ResponsePen
from onbeat.server.services import Services

logger = logging.getLogger("onbeat.server")

_BYTES_A_CHARACTER = 64
"""Of JSON, which take as long as a character that is encoded."""


class InputTokens(Struct):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class DeletedResponse(Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(Struct, tag_field="object", tag="list"):
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class _Told(Struct):
    response: Raw


def _response_in(events: bytes) -> bytes:
    """Return the response, as JSON, in the first of some events."""
    _, _, data = events.partition(b"data: ")
    return bytes(msgspec.json.decode(data.partition(b"\n\n")[0], type=_Told).response)


async def keep(shelf: AnswerShelf, name: str, owner: str, items: bytes, told: bytes) -> None:
    """Have a response kept: what a whole answer is, or the last event of a stream."""
    response = _response_in(told) if told.startswith(b"event") else told
    try:
        await shelf.keep(name, owner, KeptAnswer(items, response, is_background=False, is_running=False), b"")
    except OnbeatError as error:  # the answer is whole all the same
        logger.warning("%s is not kept: %s", name, error)


async def begin(
    answer: AnswerResponse, pen: ResponsePen, shelf: AnswerShelf, items: bytes, scope: Scope
) -> bytes:
    """Begin a response whoever reads it, and return it as it stands, as JSON.

    Raises
    ------
    Overloaded : too many are being made.
    """
    events = event_bytes([pen.begin()])
    kept = KeptAnswer(items, _response_in(events), is_background=True, is_running=True)
    await shelf.keep(answer.name, owner_of(scope), kept, events)
    # its connection may end, or be slow: neither is the answer's
    context_of(scope).work = asyncio.create_task(_make(answer, pen, shelf, {**scope, "state": {}}))
    return kept.response


async def _make(answer: AnswerResponse, pen: ResponsePen, shelf: AnswerShelf, scope: Scope) -> None:
    """Have the events of a response kept as they come, until it ends or is to end."""
    context, response, last = context_of(scope), b"", b""

    async def send(message: Message) -> None:
        nonlocal response, last
        if message.get("more_body") is False:
            last = message["body"]
        elif events := message.get("body"):
            is_new, response = not response, response or _response_in(events)
            await shelf.add(answer.name, events, response if is_new else b"", ends=False)

    making = asyncio.ensure_future(answer(scope, asyncio.Event().wait, send))  # type: ignore[arg-type]
    stopping = asyncio.ensure_future(shelf.until_stopped(answer.name))
    await asyncio.wait((making, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    making.cancel()
    await asyncio.wait((making,))
    if making.cancelled():
        context.finish = "cancelled"
        last = event_bytes(pen.cancelled())
    elif isinstance(error := making.exception(), Exception):
        reply = error_reply(error)
        context.error_code = reply.code
        last = event_bytes(pen.failed(reply))
        if not isinstance(error, OnbeatError):
            logger.error("%s failed in the background", answer.name, exc_info=error)
    await shelf.add(answer.name, last, _response_in(last), ends=True)


def _kept_events(shelf: AnswerShelf, response_id: str, owner: str, number: int) -> Response:
    """Return what sends the events of a response that is kept, from a number on, as they come."""

    async def events() -> AsyncIterator[bytes]:
        next_number, is_last = number, False
        while not is_last:
            try:
                batch, next_number, is_last = await shelf.read(response_id, owner, next_number)
            except OnbeatError as error:  # the status is out: the stream itself must tell
                batch, is_last = event_bytes([ErrorBody(error_reply(error).error)]), True
            yield batch

    return StreamingResponse(events(), headers=EVENT_STREAM_HEADERS)


def owner_of(scope: Scope) -> str:
    """Return who may read a response: whoever has the API key that asked for it."""
    return context_of(scope).key_digest or ""


async def _items_before(body: ResponseRequest, request: Request, services: Services) -> list[dict[str, Any]]:
    """Return the conversation that a response goes on with, the input and output of the previous one.

    Raises
    ------
    ApiError : that is not kept (404).
    InvalidRequest : it is still being made.
    """
    if (previous := body.previous_response_id) is None:
        return []
    try:
        kept = await services.shared.answers.get(previous, owner_of(request.scope))
    except ApiError as error:
        error.param = "previous_response_id"
        raise
    if kept.is_running:
        raise InvalidRequest(
            f"the response {quoted(previous)} is still being made; wait for its end, or cancel it",
            param="previous_response_id",
        )
    size = (len(kept.items) + len(kept.response)) // _BYTES_A_CHARACTER

    def read() -> list[dict[str, Any]]:
        return [*orjson.loads(kept.items), *orjson.loads(kept.response)["output"]]

    return await services.encoder.off_loop(context_of(request.scope).caller, size, read)


class ReadQuery(BaseModel):
    stream: Flag | None = None
    starting_after: Annotated[int, Field(ge=0, lt=10**9), WHOLE] | None = None

    def first_number(self) -> int | None:
        """Return the number of the first event that is asked for; None where the response is.

        Raises
        ------
        InvalidRequest : no events are asked for, and yet those behind a number.
        """
        if self.starting_after is None:
            return 0 if self.stream else None
        if self.stream is False:
            raise InvalidRequest("starting_after is of a stream; send stream=true", param="starting_after")
        return self.starting_after + 1


class ItemsQuery(BaseModel):
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=100), WHOLE] = 20

    def page(self, kept: KeptAnswer, response_id: str) -> bytes:
        """Return some of the items before a response, as JSON.

        Raises
        ------
        InvalidRequest : none of them has the id that is named.
        """
        items = [listed_item(each, f"{response_id}_{n}") for n, each in enumerate(orjson.loads(kept.items))]
        items = items[:: 1 if self.order == "asc" else -1]
        start = next((n for n, each in enumerate(items, 1) if each["id"] == self.after), 0)
        if self.after is not None and not start:
            raise InvalidRequest(f"after is {quoted(self.after)}, which no item has", param="after")
        page = items[start : start + self.limit]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return encode(ItemList(page, first, last, start + len(page) < len(items)))


def response_routes(services: Services) -> Routes:
    """Return the routes of the Responses API."""
    router, shelf = Routes(), services.shared.answers

    @router.post("/v1/responses", **router.generating(ResponseRequest, ModelResponse, ResponseEvent))
    async def responses(request: Request) -> Response:
        """Answer with a response, now or in the background."""
        body, head = await read_request(request, ResponseRequest, services, "resp", joint="_")
        before = await _items_before(body, request, services)
        async with chat_of(body, before, request) as chat:
            requests, options = await chat_requests(chat, request, services)
        is_stream, chat.stream = bool(body.stream), body.stream or body.background
        pen = ResponsePen(head, body, services.logprobs[bool(body.return_tokens_as_token_ids)])
        answer = AnswerResponse(chat, requests, options, pen, services)
        answer.prompt_field = body.prompt_field
        context = context_of(request.scope)
        answer.repeated_size = context.num_body_bytes // _BYTES_A_CHARACTER
        if body.store is False:
            return answer
        dump, owner = partial(orjson.dumps, [*before, *items_of(body.input)]), owner_of(request.scope)
        items = await services.encoder.off_loop(context.caller, answer.repeated_size, dump)
        if not body.background:
            answer.keep = partial(keep, shelf, answer.name, owner, items)
            return answer
        response = await begin(answer, pen, shelf, items, request.scope)
        if is_stream:
            return _kept_events(shelf, answer.name, owner, 0)
        return Response(response, media_type="application/json")

    @router.post("/v1/responses/input_tokens", **router.taking(ResponseRequest, InputTokens))
    async def input_tokens(request: Request) -> Response:
        """Return how many tokens the prompt of a response has."""
        body = await read_body(request, ResponseRequest)
        services.check_model(body.model)
        async with chat_of(body, await _items_before(body, request, services), request) as chat:
            num_tokens = len(await chat_prompt(chat, request, services))
        return json_response(InputTokens(num_tokens))

    _add_kept(router, services)
    return router


def _add_kept(router: Routes, services: Services) -> None:
    """Add the routes of responses that are kept."""
    path, shelf = "/v1/responses/{response_id}", services.shared.answers

    def described(answer: type[Struct], *statuses: int) -> dict[str, Any]:
        return {"tags": ["generation"], "responses": router.telling(answer, 400, 401, 404, *statuses)}

    @router.get(path, **described(ModelResponse), openapi_extra=query_of(ReadQuery))
    async def read(response_id: str, request: Request) -> Response:
        """Return a response that is kept, or with `stream` its events, as they come."""
        if response_id == "input_tokens":
            raise HTTPException(405, headers={"Allow": "POST"})
        owner = owner_of(request.scope)
        number = validated(ReadQuery, dict(request.query_params), []).first_number()
        kept = await shelf.get(response_id, owner, number or 0)
        if number is None:
            return Response(kept.response, media_type="application/json")
        if not kept.is_background:
            raise InvalidRequest(
                "the response was not made in the background, so its events are not kept; leave stream out",
                param="stream",
            )
        return _kept_events(shelf, response_id, owner, number)

    @router.get(f"{path}/input_items", **described(ItemList), openapi_extra=query_of(ItemsQuery))
    async def input_items(response_id: str, request: Request) -> Response:
        """Return what a response that is kept goes on from: its input, and the conversation before that."""
        query, context = validated(ItemsQuery, dict(request.query_params), []), context_of(request.scope)
        kept = await shelf.get(response_id, owner_of(request.scope))
        page, size = partial(query.page, kept, response_id), len(kept.items) // _BYTES_A_CHARACTER
        listed = await services.encoder.off_loop(context.caller, size, page)
        return Response(listed, media_type="application/json")

    @router.delete(path, **described(DeletedResponse))
    async def delete(response_id: str, request: Request) -> Response:
        """Keep a response no more; one that is being made ends."""
        await shelf.forget(response_id, owner_of(request.scope))
        return json_response(DeletedResponse(response_id))

    @router.post(f"{path}/cancel", **described(ModelResponse, 429))
    async def cancel(response_id: str, request: Request) -> Response:
        """End a response if it is being made in the background, and return it."""
        stopped = await shelf.stop(response_id, owner_of(request.scope))
        return Response(stopped.response, media_type="application/json")
