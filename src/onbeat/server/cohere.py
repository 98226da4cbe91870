"""POST /v2/embed: Cohere's form of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import orjson
from fastapi import APIRouter
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from onbeat.core.errors import InvalidRequest, quoted
from onbeat.server.answer import prediction_header
from onbeat.server.answer_format import AnswerHead
from onbeat.server.answer_models import SLOReport
from onbeat.server.body import WHOLE
from onbeat.server.embedding_request import Embedded, TextsRequest, check_texts, embed, read_texts
from onbeat.server.embeddings import as_base64, as_numbers, check_dimensions
from onbeat.server.errors import unsupported
from onbeat.server.fair_threads import Turns
from onbeat.server.openapi import embedding_route
from onbeat.server.pieces import Piece, PiecesResponse
from onbeat.server.prompts import EncodeOptions
from onbeat.server.services import Services

COHERE_PATH = "/v2/embed"

_Kind = Literal["float", "base64", "binary", "ubinary"]
_Text = Annotated[str, Field(min_length=1)]


class CohereEmbedRequest(TextsRequest):
    """Cohere's request for embeddings."""

    texts: Annotated[list[_Text], Field(min_length=1, fail_fast=True)]
    embedding_types: Annotated[list[_Kind], Field(min_length=1)] | None = None
    """`binary` has a bit for each number, set where that is at least 0: eight in a number of -128 to 127;
    `ubinary` in one of 0 to 255."""
    output_dimension: Annotated[int, Field(ge=1), WHOLE] | None = None
    """Give the first numbers of each embedding alone."""
    truncate: Literal["NONE", "START", "END"] | None = None
    """What is left out of a text that is too long: nothing, which is then an error, its start, or its end."""
    max_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    """From how many tokens on a text is too long; what fits the model if absent."""
    input_type: str | None = None
    """Refused: no model here has prompts of its own for it."""


_Vectors = list[list[float]]
# `float` is a field below, which would stand for itself there.


class CohereEmbeddings(BaseModel):
    float: _Vectors | None = None
    base64: list[str] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None


class CohereAnswer(BaseModel):
    id: str
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: dict[str, dict[str, str | int]]
    response_type: Literal["embeddings_by_type"]
    slo: SLOReport | None = None


def cohere_routes(services: Services) -> APIRouter:
    """Return the route of Cohere's embeddings."""
    router = APIRouter()

    @router.post(COHERE_PATH, **embedding_route(CohereEmbedRequest, CohereAnswer))
    async def cohere_embed(request: Request) -> Response:
        """Make vectors of texts, in Cohere's form."""
        body, head = await read_texts(request, CohereEmbedRequest, services, prefix="embd")
        info = services.info
        check_dimensions(body.output_dimension, "output_dimension", info)
        check_texts(body.texts, "texts")
        if body.input_type is not None:
            raise unsupported(
                f"Unsupported input_type {quoted(body.input_type)}: this model has no prompts of its own. "
                "Leave it out, and write into the texts what your model wants before them",
                "input_type",
            )
        embedded = await embed(services, request, body, body.texts, _options(body, info.max_model_len))
        pieces, turns = list[Piece](), Turns()
        for piece in _whole(embedded, body, head):
            pieces.append(piece)
            await turns.rest()
        return PiecesResponse(pieces, services.slow_readers, prediction_header(embedded.choices))

    return router


def _options(body: CohereEmbedRequest, max_model_len: int) -> EncodeOptions:
    """Return how texts become tokens.

    Raises
    ------
    InvalidRequest : both Cohere's fields and ours say how texts are cut.
    """
    for name in ("truncate_prompt_tokens", "truncation_side"):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name} is not taken here; send truncate and max_tokens", param=name)
    most = min(body.max_tokens or max_model_len, max_model_len)
    options = EncodeOptions(add_special_tokens=body.add_special_tokens is not False, param="texts")
    if body.truncate == "NONE":
        return replace(options, most=most)
    return replace(options, truncate_to=most, keeps_first=body.truncate != "START")


def _whole(embedded: Embedded, body: CohereEmbedRequest, head: AnswerHead) -> Iterator[Piece]:
    """Yield the answer in pieces, one for each embedding of each kind."""
    yield b'{"id":"%b","embeddings":{' % head.completion_id.encode()
    kinds: Sequence[_Kind] = tuple(dict.fromkeys(body.embedding_types or ("float",)))
    for number, kind in enumerate(kinds):
        start = b"%b%b:[" % (b"," if number else b"", orjson.dumps(kind))
        for vector in embedded.vectors(dimensions=body.output_dimension):
            yield start + _WRITERS[kind](vector)
            start = b","
        yield b"]"
    units = {"input_tokens": embedded.usage["prompt_tokens"], "image_tokens": 0}
    rest = {
        "texts": body.texts,
        "meta": {"api_version": {"version": "2"}, "billed_units": units},
        "response_type": "embeddings_by_type",
        **({} if embedded.slo is None else {"slo": embedded.slo}),
    }
    yield b"}," + orjson.dumps(rest)[1:]


def _bits(vector: NDArray[np.float32]) -> NDArray[np.int16]:
    return np.packbits(vector >= 0).astype(np.int16)


def _as_binary(vector: NDArray[np.float32]) -> bytes:
    return orjson.dumps((_bits(vector) - 128).tolist())


def _as_ubinary(vector: NDArray[np.float32]) -> bytes:
    return orjson.dumps(_bits(vector).tolist())


_WRITERS: dict[_Kind, Callable[[NDArray[np.float32]], bytes]] = {
    "float": as_numbers,
    "base64": as_base64,
    "binary": _as_binary,
    "ubinary": _as_ubinary,
}
