"""POST /v1/rerank and /score: how near texts are to one another, as the cosines of their embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import Annotated

import numpy as np
from msgspec import UNSET, Struct, UnsetType
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from onbeat.core.errors import InvalidRequest
from onbeat.server import embedding_request
from onbeat.server.answer import prediction_header
from onbeat.server.fair_threads import Turns
from onbeat.server.fields import WHOLE, Flag
from onbeat.server.generation_request import EngineFields, read_request
from onbeat.server.openapi import Routes
from onbeat.server.pieces import PiecesResponse, gathered, list_of
from onbeat.server.services import Services
from onbeat.text.embedding import vector_of

RERANK_PATHS = ("/v1/rerank", "/rerank")
"""Jina's path, and vLLM's."""
SCORE_PATHS = ("/score", "/v1/score")


_Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
_OneOrMore = str | _Texts


class RerankRequest(EngineFields):
    """Documents that are to be ordered by how near they are to a query (Jina's)."""

    query: str
    documents: _Texts
    top_n: Annotated[int, Field(ge=0), WHOLE] | None = None
    """Give the nearest documents alone, as many as this; 0 and none give all."""
    return_documents: Flag | None = None
    """Put their texts into the answer; true if absent."""


_FIRST = ("text_1", "queries", "data_1")
_SECOND = ("text_2", "documents", "items", "data_2")


class ScoreRequest(EngineFields):
    """Pairs of texts: one with each of many, or pair by pair, by all of vLLM's names for the two sides."""

    text_1: _OneOrMore | None = None
    queries: _OneOrMore | None = None
    data_1: _OneOrMore | None = None
    text_2: _OneOrMore | None = None
    documents: _OneOrMore | None = None
    items: _OneOrMore | None = None
    data_2: _OneOrMore | None = None

    def side(self, names: Sequence[str]) -> tuple[str, list[str]]:
        """Return the name that one side has in this request, and its texts.

        Raises
        ------
        InvalidRequest : it is missing, or there twice.
        """
        given = {name: texts for name in names if (texts := getattr(self, name)) is not None}
        if len(given) != 1:
            found = f"{' and '.join(given)} are both given" if given else f"{names[0]} is missing"
            raise InvalidRequest(
                f"{found}; send one of {', '.join(names)}",
                param=next(iter(given), names[0]),
                code="invalid_value" if given else "missing_required_parameter",
            )
        ((name, texts),) = given.items()
        return name, [texts] if isinstance(texts, str) else texts


class RankedText(Struct):
    text: str


class RankedDocument(Struct):
    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(embedding_request.TextsAnswer, kw_only=True):
    results: list[RankedDocument]


class Score(Struct, tag_field="object", tag="score"):
    index: int
    score: float


class ScoreList(embedding_request.TextsAnswer, kw_only=True, tag_field="object", tag="list"):
    created: int
    data: list[Score]


def score_routes(services: Services) -> Routes:
    """Return the routes of reranking and of scores."""
    router = Routes()

    async def rerank(request: Request) -> Response:
        """Order documents by how near they are to a query."""
        body, head = await read_request(request, RerankRequest, services, "score")
        embedded = await _embed(services, request, body, {"query": [body.query], "documents": body.documents})
        about = head.completion_id, head.model, embedded.usage, embedded.slo
        results = list_of(_results(body, await _cosines(embedded, 1)))
        return await _answer(Ranking(*about, results=results), embedded, services)

    async def score(request: Request) -> Response:
        """Tell how near texts are to one another."""
        body, head = await read_request(request, ScoreRequest, services, "score")
        sides = dict((body.side(_FIRST), body.side(_SECOND)))
        num_first = _num_first(sides)
        embedded = await _embed(services, request, body, sides)
        about = head.completion_id, head.model, embedded.usage, embedded.slo
        data = list_of(Score(*each) for each in enumerate(await _cosines(embedded, num_first)))
        return await _answer(ScoreList(*about, created=head.created, data=data), embedded, services)

    for path in RERANK_PATHS:
        router.add_api_route(path, rerank, methods=["POST"], **router.embedding(RerankRequest, Ranking))
    for path in SCORE_PATHS:
        router.add_api_route(path, score, methods=["POST"], **router.embedding(ScoreRequest, ScoreList))
    return router


async def _embed(
    services: Services, request: Request, body: EngineFields, fields: Mapping[str, Sequence[str]]
) -> embedding_request.Embedded:
    """Return the embeddings of the texts of some fields, one field after the other."""
    for param, texts in fields.items():
        embedding_request.check_texts(texts, param)
    *_, last = fields
    together = [text for texts in fields.values() for text in texts]
    names = [f"{param}[{index}]" for param, texts in fields.items() for index in range(len(texts))]
    options = embedding_request.encode_options(body, services.info.max_model_len, param=last)
    return await embedding_request.embed(services, request, body, together, options, names)


def _num_first(sides: dict[str, list[str]]) -> int:
    """Return how many texts the first side has: one, or as many as the other.

    Raises
    ------
    InvalidRequest : it has another number of them.
    """
    (name, first), (other, second) = sides.items()
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"{name} holds {len(first)} texts and {other} {len(second)}; give one, or as many as {other} has",
            param=name,
            code="invalid_value",
        )
    return len(first)


async def _cosines(embedded: embedding_request.Embedded, num_first: int) -> list[float]:
    """Return how near each later text is to the first one, or to its own of the first ones: -1 to 1."""
    choices, turns, cosines = embedded.choices, Turns(), list[float]()
    for first, last in zip(cycle(choices[:num_first]), choices[num_first:], strict=False):
        products = vector_of(first.embedding).astype(np.float64) * vector_of(last.embedding)
        cosines.append(float(products.sum().clip(-1, 1)))
        await turns.rest()
    return cosines


def _results(body: RerankRequest, cosines: Sequence[float]) -> Iterator[RankedDocument]:
    shows = body.return_documents is not False
    for index in sorted(range(len(cosines)), key=lambda index: -cosines[index])[: body.top_n or None]:
        document = RankedText(body.documents[index]) if shows else UNSET
        yield RankedDocument(index, cosines[index], document)


async def _answer(
    answer: embedding_request.TextsAnswer, embedded: embedding_request.Embedded, services: Services
) -> Response:
    pieces = await gathered(answer)
    return PiecesResponse(pieces, services.slow_readers, prediction_header(embedded.choices))
