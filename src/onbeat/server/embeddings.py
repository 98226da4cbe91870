"""POST /v1/embeddings, /v1/rerank and /score: vectors of texts, and how near these are to one another.

How near texts are is the cosine of their embeddings.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import cycle
from typing import Annotated, Literal, NamedTuple

import numpy as np
import orjson
from msgspec import UNSET, Struct, UnsetType
from numpy.typing import NDArray
from pydantic import Field, PlainValidator, WithJsonSchema
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from onbeat.core.errors import InvalidRequest, OnbeatError, PromptTooLong
from onbeat.core.request import Request, SamplingParams, WholeRequest
from onbeat.server.answer import cancelled_on_disconnect, note_choices, prediction_header
from onbeat.server.answer_report import SLOReport, slo_report, worst_report
from onbeat.server.chat_prompt import render_chat
from onbeat.server.choices import Choice, TextOptions
from onbeat.server.completions import TOKEN_IDS_SCHEMA, checked_prompts
from onbeat.server.errors import error_reply
from onbeat.server.fair_threads import Turns
from onbeat.server.fields import WHOLE, Flag, only_one
from onbeat.server.generation import MOST_EMBEDDED
from onbeat.server.generation_request import EngineFields, read_request
from onbeat.server.middleware import HttpContext, context_of
from onbeat.server.objectives import RequestObjectives, request_objectives
from onbeat.server.openapi import Routes
from onbeat.server.paths import RERANK_PATHS, SCORE_PATHS
from onbeat.server.pieces import PiecesResponse, gathered, list_of, written
from onbeat.server.prompts import EncodeOptions, PromptInput
from onbeat.server.reply_fields import TemplateFields
from onbeat.server.server_config import MAX_INPUTS
from onbeat.server.services import Services
from onbeat.text.embedding import vector_of

_NO_SAMPLING = SamplingParams(max_tokens=1)


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class TextsAnswer(Struct):
    """What answers about texts have in common."""

    id: str
    model: str
    usage: EmbeddingUsage
    slo: SLOReport | UnsetType = UNSET


class Embedded(NamedTuple):
    """Texts that have become vectors."""

    choices: Sequence[Choice]
    """One for each text, with its embedding."""
    usage: EmbeddingUsage
    slo: SLOReport | UnsetType
    """How the objectives were kept, by the worst text; unset without any."""


def check_texts(texts: Sequence[PromptInput], param: str) -> None:
    """Refuse more texts than one request may hold, and empty ones.

    Raises
    ------
    InvalidRequest : there are too many, or one is empty.
    """
    if len(texts) > MAX_INPUTS:
        raise InvalidRequest(
            f"{param} holds {len(texts)} texts; at most {MAX_INPUTS} are taken. Send several requests",
            param=param,
        )
    for index, text in enumerate(texts):
        if not text:
            raise InvalidRequest(f"{param}[{index}] is empty; send some text", param=param)


async def embed(
    services: Services,
    http: HttpRequest,
    body: EngineFields,
    texts: Sequence[PromptInput],
    options: EncodeOptions,
    names: Sequence[str] = (),
) -> Embedded:
    """Return the embeddings of texts, all of which are requests of the engine of their own.

    Parameters
    ----------
    http : whose answer it is; a client that leaves aborts what still runs.
    texts : in their order.
    options : how they become tokens.
    names : of the texts, where not all are of one field.

    Raises
    ------
    InvalidRequest, PromptTooLong : a text is empty, does not fit, or holds unknown tokens.
    RequestRejected, EngineDead, EngineError : as the engine does.
    ClientGone : nobody waits for the answer any more.
    """
    if not services.info.embeds:
        raise InvalidRequest(
            "this server makes no embeddings; serve the model with --backend native, cuda or torch, or with "
            "--backend vllm -- --convert embed"
        )
    body.check(services.config, services.info)
    context = context_of(http.scope)
    objectives = request_objectives(body, http.headers, context, services.config.slo)
    if objectives.job is not None:
        raise InvalidRequest(
            "slo.job is for calls that generate text; leave it out here, and state slo.e2e_ms",
            param="slo.job",
        )
    choices: list[Choice] = []
    try:
        with services.lifecycle.generation():
            async with cancelled_on_disconnect(http.receive):
                prompts = await services.encoder.encode_all(texts, options, context.caller)
                _check_lengths(prompts, services.info.limits.max_model_len, options, names)
                if context.desk is not None:
                    await context.desk.take_answers(
                        context.number, sum(map(len, prompts)), (), is_stated=True
                    )
                turns = Turns()
                for request in _requests(body, prompts, objectives, services, context):
                    index = len(choices)
                    choices.append(
                        Choice(index=index, prompt_index=index, request=request, is_streamed=False)
                    )
                    await turns.rest()
                async with aclosing(services.generator.run(choices, TextOptions())) as deltas:
                    async for _ in deltas:
                        await turns.rest()
    except OnbeatError as error:
        if isinstance(error, PromptTooLong) and error.param == "prompt":  # the engine's, which knows no field
            error.param = options.param
        context.error_code = error_reply(error).code
        raise
    finally:
        if choices:
            note_choices(choices, context)
    reports = list[SLOReport]()
    for choice in choices:
        reports += filter(None, [slo_report(choice, services.config.slo.mode)])
        await turns.rest()
    num_tokens = sum(map(len, prompts))
    return Embedded(choices, EmbeddingUsage(num_tokens, num_tokens), worst_report(reports) or UNSET)


def encode_options(
    body: EngineFields, max_model_len: int, *, param: str, special: bool = True
) -> EncodeOptions:
    """Return how texts become tokens.

    Parameters
    ----------
    param : the field that errors name.
    special : whether the model's own start and end tokens are added, unless the body says.

    Raises
    ------
    InvalidRequest : truncation leaves nothing of them, or more than fits.
    """
    asked = body.truncate_prompt_tokens
    if (asked or 0) > max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {asked}; this model takes at most {max_model_len} tokens. Please "
            "request a smaller truncation size. -1 keeps what fits",
            param="truncate_prompt_tokens",
        )
    # there is no answer to leave room for
    return body.encode_options(max_model_len + 1, param=param, special=special)


def _check_lengths(
    prompts: Sequence[list[int]], max_model_len: int, options: EncodeOptions, names: Sequence[str]
) -> None:
    """Refuse texts that do not fit the context, before any of them is computed."""
    for index, token_ids in enumerate(prompts):
        if len(token_ids) > max_model_len:
            name = names[index] if names else f"{options.param}[{index}]"
            raise PromptTooLong(
                f"{name} has {len(token_ids)} tokens; this model takes at most {max_model_len}. "
                "Please reduce the length of the input prompt, or set truncate_prompt_tokens to -1 to keep "
                "what fits",
                param=name.partition("[")[0],
            )


def _requests(
    body: EngineFields,
    prompts: Sequence[list[int]],
    objectives: RequestObjectives,
    services: Services,
    context: HttpContext,
) -> Iterator[Request]:
    """Yield the engine's requests, one for each text."""
    whole, of_request = None, objectives.of_request
    if len(prompts) > 1:
        num_at_once = min(len(prompts), MOST_EMBEDDED)
        whole = WholeRequest(context.completion_id, num_at_once, sum(map(len, prompts)))
    for index, token_ids in enumerate(prompts):
        yield Request(
            request_id=context.completion_id if whole is None else f"{context.completion_id}-{index}",
            prompt_token_ids=tuple(token_ids),
            sampling=_NO_SAMPLING,
            pooling=services.info.pooling,
            arrival=context.arrival,
            caller=context.caller,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            adapter=services.adapters.get(body.model or ""),
            whole=whole,
            **of_request,
        )


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


class EmbeddingRequest(EngineFields, TemplateFields):
    """OpenAI's embeddings, with vLLM's extra fields. Either `input` or `messages`, a chat, is given."""

    input: Annotated[
        list[PromptInput] | None,
        PlainValidator(lambda value: None if value is None else checked_prompts(value, "input")),
        WithJsonSchema(_INPUT_SCHEMA),
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


class EmbeddingList(TextsAnswer, kw_only=True, tag_field="object", tag="list"):
    created: int
    data: list[Embedding]


def embedding_routes(services: Services) -> Routes:
    """Return the routes of embeddings."""
    router = Routes()

    @router.post("/v1/embeddings", **router.embedding(EmbeddingRequest, EmbeddingList))
    async def embeddings(request: HttpRequest) -> Response:
        """Make vectors of texts."""
        body, head = await read_request(request, EmbeddingRequest, services, "embd")
        info, fields = services.info, ("input", "messages")
        if body.dimensions is not None and body.dimensions > info.embedding_size:
            raise InvalidRequest(
                f"dimensions is {body.dimensions}; embeddings of this model have {info.embedding_size} "
                "numbers. Ask for at most as many",
                param="dimensions",
            )
        texts, param = body.input, only_one(body, fields, context_of(request.scope).ignored_fields)
        if texts is None:
            texts = [await render_chat(body, request, services)]
        check_texts(texts, param)
        options = encode_options(body, info.limits.max_model_len, param=param, special=param == "input")
        embedded = await embed(services, request, body, texts, options)
        write = _base64 if body.encoding_format == "base64" else _numbers
        scale = body.normalize is not False
        vectors = (vector_of(each.embedding, body.dimensions, normalize=scale) for each in embedded.choices)
        data = list_of(Embedding(index, written(write(vector))) for index, vector in enumerate(vectors))
        about = head.completion_id, head.model, embedded.usage, embedded.slo
        listed = EmbeddingList(*about, created=head.created, data=data)
        return await _answer(listed, embedded, services)

    return router


def _numbers(vector: NDArray[np.float32]) -> bytes:
    """Return a vector as a JSON array."""
    return orjson.dumps(np.ascontiguousarray(vector), option=orjson.OPT_SERIALIZE_NUMPY)


def _base64(vector: NDArray[np.float32]) -> bytes:
    """Return a vector as JSON text: the base64 of its numbers."""
    return b'"%b"' % base64.b64encode(vector.astype("<f4").tobytes())


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

    def sides(self, ignored: Sequence[str]) -> dict[str, list[str]]:
        """Return the names that the two sides have in this request, and their texts; see `only_one`."""
        names = (only_one(self, each, ignored) for each in (_FIRST, _SECOND))
        given = {name: getattr(self, name) for name in names}
        return {name: [texts] if isinstance(texts, str) else texts for name, texts in given.items()}


class RankedText(Struct):
    text: str


class RankedDocument(Struct):
    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(TextsAnswer, kw_only=True):
    results: list[RankedDocument]


class Score(Struct, tag_field="object", tag="score"):
    index: int
    score: float


class ScoreList(TextsAnswer, kw_only=True, tag_field="object", tag="list"):
    created: int
    data: list[Score]


def score_routes(services: Services) -> Routes:
    """Return the routes of reranking and of scores."""
    router = Routes()

    async def rerank(request: HttpRequest) -> Response:
        """Order documents by how near they are to a query."""
        body, head = await read_request(request, RerankRequest, services, "score")
        embedded = await _embed(services, request, body, {"query": [body.query], "documents": body.documents})
        about = head.completion_id, head.model, embedded.usage, embedded.slo
        results = list_of(_results(body, await _cosines(embedded, 1)))
        return await _answer(Ranking(*about, results=results), embedded, services)

    async def score(request: HttpRequest) -> Response:
        """Tell how near texts are to one another."""
        body, head = await read_request(request, ScoreRequest, services, "score")
        sides = body.sides(context_of(request.scope).ignored_fields)
        (name, first), (other, second) = sides.items()
        if len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"{name} holds {len(first)} texts and {other} {len(second)}; give one, or as many as {other} "
                "has",
                param=name,
            )
        embedded = await _embed(services, request, body, sides)
        about = head.completion_id, head.model, embedded.usage, embedded.slo
        data = list_of(Score(*each) for each in enumerate(await _cosines(embedded, len(first))))
        return await _answer(ScoreList(*about, created=head.created, data=data), embedded, services)

    for path in RERANK_PATHS:
        router.add_api_route(path, rerank, methods=["POST"], **router.embedding(RerankRequest, Ranking))
    for path in SCORE_PATHS:
        router.add_api_route(path, score, methods=["POST"], **router.embedding(ScoreRequest, ScoreList))
    return router


async def _embed(
    services: Services, request: HttpRequest, body: EngineFields, fields: Mapping[str, Sequence[str]]
) -> Embedded:
    """Return the embeddings of the texts of some fields, one field after the other."""
    for param, texts in fields.items():
        check_texts(texts, param)
    *_, last = fields
    together = [text for texts in fields.values() for text in texts]
    names = [f"{param}[{index}]" for param, texts in fields.items() for index in range(len(texts))]
    options = encode_options(body, services.info.limits.max_model_len, param=last)
    return await embed(services, request, body, together, options, names)


async def _cosines(embedded: Embedded, num_first: int) -> list[float]:
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


async def _answer(answer: TextsAnswer, embedded: Embedded, services: Services) -> Response:
    pieces = await gathered(answer)
    return PiecesResponse(pieces, services.slow_readers, prediction_header(embedded.choices))
