"""POST /v1/embeddings: its body and its answers."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from msgspec import Struct
from numpy.typing import NDArray
from pydantic import Field, PlainValidator, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from onbeat.core.errors import InvalidRequest
from onbeat.server import embedding_request
from onbeat.server.answer import prediction_header
from onbeat.server.chat_prompt import render_chat
from onbeat.server.completions import TOKEN_IDS_SCHEMA, checked_prompts
from onbeat.server.fields import WHOLE, Flag
from onbeat.server.generation_request import EngineFields, read_request
from onbeat.server.openapi import Routes
from onbeat.server.pen import AnswerHead
from onbeat.server.pieces import PiecesResponse, gathered, list_of, written
from onbeat.server.prompts import PromptInput
from onbeat.server.reply_fields import TemplateFields
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


class EmbeddingRequest(EngineFields, TemplateFields):
    """OpenAI's embeddings, with vLLM's extra fields. Either `input` or `messages`, a chat, is given."""

    input: Annotated[
        list[PromptInput] | None, PlainValidator(_checked_input), WithJsonSchema(_INPUT_SCHEMA)
    ] = None
    encoding_format: Literal["float", "base64"] | None = None
    """base64 is of the numbers' bytes: of each, the four of a float, little end first."""
    dimensions: Annotated[int, Field(ge=1), WHOLE] | None = None
    """Give the first numbers of each embedding alone."""
    normalize: Flag | None = None
    """Give each embedding the length 1; true if absent."""


class Embedding(Struct, tag_field="object", tag="embedding"):
    index: int
    embedding: list[float] | str


class EmbeddingList(embedding_request.TextsAnswer, kw_only=True, tag_field="object", tag="list"):
    created: int
    data: list[Embedding]


def embedding_routes(services: Services) -> Routes:
    """Return the routes of embeddings."""
    router = Routes()

    @router.post("/v1/embeddings", **router.embedding(EmbeddingRequest, EmbeddingList))
    async def embeddings(request: Request) -> Response:
        """Make vectors of texts."""
        body, head = await read_request(request, EmbeddingRequest, services, "embd")
        embedded = await _embedded(body, request, services)
        return await _answer(embedded, body, head, services)

    return router


async def _embedded(
    body: EmbeddingRequest, request: Request, services: Services
) -> embedding_request.Embedded:
    """Return the embeddings that a request asks for.

    Raises
    ------
    OnbeatError : it is refused, or fails.
    """
    info = services.info
    if body.dimensions is not None and body.dimensions > info.embedding_size:
        raise InvalidRequest(
            f"dimensions is {body.dimensions}; embeddings of this model have {info.embedding_size} numbers. "
            "Ask for at most as many",
            param="dimensions",
            code="invalid_value",
        )
    if (body.input is None) == (body.messages is None):
        raise InvalidRequest("send either input or messages", param="input")
    texts, param = body.input, "input"
    if texts is None:
        texts, param = [await render_chat(body, request, services)], "messages"
    embedding_request.check_texts(texts, param)
    options = embedding_request.encode_options(
        body, info.max_model_len, param=param, special=param == "input"
    )
    return await embedding_request.embed(services, request, body, texts, options)


async def _answer(
    embedded: embedding_request.Embedded, body: EmbeddingRequest, head: AnswerHead, services: Services
) -> Response:
    """Return the answer, written in pieces, one for each embedding."""
    write = _base64 if body.encoding_format == "base64" else _numbers
    vectors = enumerate(embedded.vectors(dimensions=body.dimensions, normalize=body.normalize is not False))
    data = list_of(Embedding(index, written(write(vector))) for index, vector in vectors)
    about = head.completion_id, head.model, embedded.usage, embedded.slo
    pieces = await gathered(EmbeddingList(*about, created=head.created, data=data))
    return PiecesResponse(pieces, services.slow_readers, prediction_header(embedded.choices))


def _numbers(vector: NDArray[np.float32]) -> bytes:
    """Return a vector as a JSON array."""
    return orjson.dumps(np.ascontiguousarray(vector), option=orjson.OPT_SERIALIZE_NUMPY)


def _base64(vector: NDArray[np.float32]) -> bytes:
    """Return a vector as JSON text: the base64 of its numbers."""
    return b'"%b"' % base64.b64encode(vector.astype("<f4").tobytes())
