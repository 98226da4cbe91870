"""POST /v1/embeddings: its body and its answer."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from fastapi import APIRouter
from numpy.typing import NDArray
from pydantic import Field, PlainValidator, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from onbeat.core.errors import InvalidRequest
from onbeat.core.protocols import EngineInfo
from onbeat.server.answer import cancelled_on_disconnect, prediction_header
from onbeat.server.body import WHOLE, Flag
from onbeat.server.chat_messages import ChatMessages
from onbeat.server.chat_prompt import render_chat
from onbeat.server.completions import TOKEN_IDS_SCHEMA, checked_prompts
from onbeat.server.embedding_request import (
    Embedded,
    TextsRequest,
    check_texts,
    embed,
    encode_options,
    read_texts,
)
from onbeat.server.fair_threads import Turns
from onbeat.server.middleware import context_of
from onbeat.server.openapi_embeddings import EmbeddingList, embedding_route
from onbeat.server.pieces import Piece, PiecesResponse
from onbeat.server.prompts import PromptInput
from onbeat.server.services import Services

_TEXT = {"type": "string", "minLength": 1}
_INPUT_SCHEMA = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1},
        TOKEN_IDS_SCHEMA,
        {"type": "array", "items": TOKEN_IDS_SCHEMA, "minItems": 1},
        {"type": "null"},
    ]
}


def _checked_input(value: Any) -> list[PromptInput] | None:
    return None if value is None else checked_prompts(value, "input")


class EmbeddingRequest(TextsRequest):
    """OpenAI's embeddings, with vLLM's extra fields. Either `input` or `messages` is given."""

    input: Annotated[
        list[PromptInput] | None, PlainValidator(_checked_input), WithJsonSchema(_INPUT_SCHEMA)
    ] = None
    messages: ChatMessages | None = None
    """A chat, which the model's template makes one text of."""
    encoding_format: Literal["float", "base64"] | None = None
    """base64 is of the numbers as float32, little-endian."""
    dimensions: Annotated[int, Field(ge=1), WHOLE] | None = None
    """Give the first numbers of each embedding alone."""
    normalize: Flag | None = None
    """Give each embedding the length 1; true if absent."""
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def tool_use(self) -> None:
        """Nothing is called."""
        return


def embedding_routes(services: Services) -> APIRouter:
    """Return the route of embeddings."""
    router = APIRouter()

    @router.post("/v1/embeddings", **embedding_route(EmbeddingRequest, EmbeddingList))
    async def embeddings(request: Request) -> Response:
        """Make vectors of texts."""
        body, head = await read_texts(request, EmbeddingRequest, services, prefix="embd")
        context, info = context_of(request.scope), services.info
        check_dimensions(body.dimensions, "dimensions", info)
        if (body.input is None) == (body.messages is None):
            raise InvalidRequest("send either input or messages", param="input")
        texts, param = body.input, "input"
        if texts is None:
            param = "messages"
            async with cancelled_on_disconnect(request.receive):
                template, style = services.chat_template, services.reply_style
                texts = [await render_chat(body, services.encoder, template, style, context.caller)]
        check_texts(texts, param)
        options = encode_options(body, info.max_model_len, param=param, special=param == "input")
        embedded = await embed(services, request, body, texts, options)
        pieces, turns = list[Piece](), Turns()
        for piece in _whole(embedded, body, head.model):
            pieces.append(piece)
            await turns.rest()
        return PiecesResponse(pieces, services.slow_readers, prediction_header(embedded.choices))

    return router


def check_dimensions(asked: int | None, param: str, info: EngineInfo) -> None:
    """Check how many numbers of each embedding are wanted.

    Raises
    ------
    InvalidRequest : it has fewer.
    """
    if asked is not None and asked > info.embedding_size:
        raise InvalidRequest(
            f"{param} is {asked}; embeddings of this model have {info.embedding_size} numbers. Ask for at "
            "most as many",
            param=param,
            code="invalid_value",
        )


def _whole(embedded: Embedded, body: EmbeddingRequest, model: str) -> Iterator[Piece]:
    """Yield the answer in pieces, one for each embedding."""
    write = as_base64 if body.encoding_format == "base64" else as_numbers
    start = b'{"object":"list","data":['
    vectors = embedded.vectors(dimensions=body.dimensions, normalize=body.normalize is not False)
    for index, vector in enumerate(vectors):
        yield start + b'{"object":"embedding","index":%d,"embedding":%b}' % (index, write(vector))
        start = b","
    yield b"]," + orjson.dumps({"model": model, **embedded.rest})[1:]


def as_numbers(vector: NDArray[np.float32]) -> bytes:
    """Return a vector as a JSON array."""
    return orjson.dumps(np.ascontiguousarray(vector), option=orjson.OPT_SERIALIZE_NUMPY)


def as_base64(vector: NDArray[np.float32]) -> bytes:
    """Return a vector as JSON text: the base64 of its numbers, float32, little-endian."""
    return b'"%b"' % base64.b64encode(vector.astype("<f4").tobytes())
