"""POST /v1/completions: its body, its answers, and the way from one to the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from typing import Annotated, Any

import orjson
from fastapi import APIRouter
from pydantic import Field, PlainValidator, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from onbeat.core.errors import InvalidRequest, counted
from onbeat.core.protocols import EngineInfo, Tokenizer
from onbeat.core.request import TokenLogprobs
from onbeat.server.answer import AnswerResponse, cancelled_on_disconnect
from onbeat.server.answer_format import (
    CACHED_TOKENS,
    AnswerHead,
    ChunkTemplate,
    Extras,
    WholeChoice,
    choice_end,
    chunks_failed,
    new_head,
    whole_answer,
)
from onbeat.server.answer_models import Completion
from onbeat.server.body import WHOLE, Flag, read_body
from onbeat.server.choices import Choice, ChoiceDelta, ShownToken
from onbeat.server.engine_requests import engine_requests
from onbeat.server.errors import unsupported
from onbeat.server.fields import OF_TEMPLATES
from onbeat.server.generation_request import (
    GenerationRequest,
    as_server_has_it,
    check_common,
    check_num_logprobs,
    encode_options,
)
from onbeat.server.middleware import context_of
from onbeat.server.objectives import request_objectives
from onbeat.server.openapi import generation_route
from onbeat.server.pieces import Piece, json_inside
from onbeat.server.prompt_scores import (
    Echo,
    PromptLogprobsWriter,
    columns_of,
    echo_columns,
    joined,
    token_offsets,
)
from onbeat.server.prompts import TOKEN_ID_SCHEMA, EncodeOptions, PromptInput
from onbeat.server.server_config import ServerConfig
from onbeat.server.services import Services
from onbeat.server.structured import grammar_of

TOKEN_IDS_SCHEMA = {"type": "array", "items": TOKEN_ID_SCHEMA, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        TOKEN_IDS_SCHEMA,
        {"type": "array", "items": TOKEN_IDS_SCHEMA, "minItems": 1},
    ]
}


def checked_prompts(value: Any, field: str = "prompt") -> list[PromptInput]:
    """Return the prompts of a request, one or many, as text or token ids.

    Written out because a union of list types would check a prompt of 100,000 tokens four times; sets of types
    because there may be 500,000.
    """
    if isinstance(value, str):
        return [value]
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if kinds == {int}:
        return [value]
    if kinds == {str}:
        return list(value)
    if kinds == {list} and all(value) and set(map(type, chain.from_iterable(value))) == {int}:
        return list(value)
    if value == []:
        raise ValueError(f"{field} is empty; send text or token ids")
    raise ValueError(
        f"{field} must be a string, an array of strings, token ids, or an array of token id arrays"
    )


class CompletionRequest(GenerationRequest):
    """OpenAI's text completion, with vLLM's extra fields."""

    default_max_tokens = 16
    """OpenAI's."""
    has_all_details = False
    """As OpenAI's text completions, whose usage has none."""

    prompt: Annotated[list[PromptInput], PlainValidator(checked_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    echo: Flag | None = None
    """Put the prompt before the answer."""
    max_tokens: Annotated[int, Field(ge=0), WHOLE] | None = None
    """0 asks for the prompt alone, with `echo`."""
    logprobs: Annotated[int, Field(ge=-1), WHOLE] | None = None
    best_of: Annotated[int, WHOLE] | None = None
    """Ranks nothing where it equals `n`, and is refused otherwise."""

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        known = [number for number in asked if number is not None]
        return -1 if -1 in known else max(known, default=None)

    @property
    def continues_prompt(self) -> bool:
        return True


def _check_completion(body: CompletionRequest, config: ServerConfig, info: EngineInfo) -> None:
    """Check the fields that only text completions have.

    Raises
    ------
    InvalidRequest : values contradict each other or exceed this server's caps.
    """
    if body.best_of not in {None, 1, body.n}:
        raise unsupported("best_of is not supported by this server; leave it out", "best_of")
    num_choices = len(body.prompt) * body.num_choices
    if num_choices > config.max_choices:
        raise InvalidRequest(
            f"{counted(len(body.prompt), 'prompt')} with n = {body.num_choices} make {num_choices} choices; "
            f"this server allows at most {config.max_choices} in one request",
            param="prompt",
        )
    check_num_logprobs(body.logprobs, "logprobs", config, info)
    if body.max_tokens == 0 and (not body.echo or body.logprob_token_ids):
        raise InvalidRequest(
            "max_tokens is 0, which asks for no answer; ask for at least 1, or send echo, without "
            "logprob_token_ids, to have the prompt alone",
            param="max_tokens",
        )


def completion_routes(services: Services) -> APIRouter:
    """Return the route of text completions."""
    router = APIRouter()
    config, tokenizer = services.config, services.tokenizer
    token_name = lru_cache(CACHED_TOKENS)(partial(_token_name, tokenizer))
    writers = token_name, PromptLogprobsWriter(tokenizer)

    @router.post("/v1/completions", **generation_route(CompletionRequest, Completion))
    async def completions(request: Request) -> Response:
        """Go on writing a text."""
        services.lifecycle.check_open()
        context, info = context_of(request.scope), services.info
        body = as_server_has_it(await read_body(request, CompletionRequest, unused=OF_TEMPLATES), config)
        head = new_head("cmpl", services.check_model(body.model))
        context.completion_id = head.completion_id
        check_common(body, config, info, num_prompts=len(body.prompt))
        _check_completion(body, config, info)
        async with cancelled_on_disconnect(request.receive):
            await services.grammars.take(grammar_of(body), context)
        objectives = request_objectives(body, request.headers, context, config.slo)
        context.job = objectives.job
        options = encode_options(body, info.max_model_len)
        async with cancelled_on_disconnect(request.receive):
            prompts = await services.encoder.encode_all(body.prompt, options, context.caller)
        requests = await engine_requests(body, prompts, objectives, info, tokenizer, context)
        echoes = [Echo("")] * len(prompts)
        if body.echo:
            echo = partial(_echo, options=options, tokenizer=tokenizer, has_offsets=body.logprobs is not None)
            async with cancelled_on_disconnect(request.receive):
                echoes = await services.encoder.off_loop(
                    context.caller, sum(map(len, prompts)), lambda: list(map(echo, body.prompt, prompts))
                )
        answer_format = CompletionFormat(head, body, writers, echoes)
        text_options = replace(body.text_options, text_starts=tuple(len(echo.text) for echo in echoes))
        return AnswerResponse(body, requests, text_options, answer_format, services)

    return router


def _echo(
    prompt: PromptInput,
    token_ids: list[int],
    *,
    options: EncodeOptions,
    tokenizer: Tokenizer,
    has_offsets: bool,
) -> Echo:
    """Return the prompt that the model sees: what truncation left of it."""
    may_be_cut = options.truncate_to is not None and len(token_ids) >= options.truncate_to
    if isinstance(prompt, str) and not may_be_cut:
        text = prompt
    else:  # of token ids, special ones too: the caller wrote them
        text = tokenizer.decode(token_ids, skip_special_tokens=isinstance(prompt, str))
    return Echo(text, token_ids, token_offsets(token_ids, text, tokenizer) if has_offsets else ())


class CompletionFormat:
    """Writes text completions and their chunks.

    Parameters
    ----------
    head : what all chunks share.
    body : says what the caller wants beside the text.
    writers : what names a token, and what writes the log-probabilities of prompts.
    echoes : for each prompt what goes before its answers, empty unless `echo`.
    """

    def __init__(
        self,
        head: AnswerHead,
        body: CompletionRequest,
        writers: tuple[Callable[[int], str], PromptLogprobsWriter],
        echoes: Sequence[Echo],
    ) -> None:
        self._fields = head.fields("text_completion")
        self._has_logprobs = body.logprobs is not None
        self._has_token_ids = bool(body.return_token_ids)
        token_name, self._prompt_logprobs = writers
        self._token_name = "token_id:{}".format if body.return_tokens_as_token_ids else token_name
        self._asks_prompt_logprobs = body.prompt_logprobs is not None
        self._echoes = echoes if body.echo else None
        self._template = ChunkTemplate(self._fields, has_usage=body.includes_usage)
        self.end, self.failed = self._template.end, chunks_failed
        self._started: set[int] = set()
        self._prompt_json: dict[int, bytes] = {}

    def columns(self, tokens: Sequence[ShownToken]) -> Sequence[bytes]:
        if not self._has_logprobs:
            return ()
        known = [token.known_logprobs for token in tokens]
        return columns_of(known, [token.text_offset for token in tokens], self._token_name)

    def events(self, delta: ChoiceDelta, extras: Extras) -> bytes:
        choice, text, columns = delta.choice, delta.text, self.columns(delta.tokens)
        is_first = choice.index not in self._started
        if is_first:
            self._started.add(choice.index)
            if self._echoes is not None:
                text = self._echoes[choice.prompt_index].text + text
                columns = joined(*self._echo_columns(choice.prompt_index, choice.prompt_logprobs), columns)
        parts: list[Piece] = [b'{"index":%d,"text":' % choice.index, orjson.dumps(text)]
        parts += _logprobs(columns)
        if self._has_token_ids:
            parts += (b',"token_ids":', orjson.dumps(delta.token_ids))
            if is_first:
                parts += (b',"prompt_token_ids":', self._prompt_token_ids(choice))
        return self._template.chunk(b"".join(parts) + choice_end(delta), extras)

    def whole(self, choices: Sequence[WholeChoice], extras: Extras) -> Iterator[Piece]:
        # the first choice of a prompt has what is known of it
        firsts = (each.choice for each in choices if each.choice.prompt_logprobs is not None)
        scores = {choice.prompt_index: choice.prompt_logprobs for choice in firsts}
        wholes = (self._whole(each, scores.get(each.choice.prompt_index)) for each in choices)
        return whole_answer(self._fields, wholes, extras)

    def _whole(self, finished: WholeChoice, scores: list[TokenLogprobs] | None) -> Iterator[Piece]:
        choice, before = finished.choice, list[Sequence[Piece]]()
        for part in self._echo_columns(choice.prompt_index, scores):
            before.append(part)
            yield b""  # others have their turn
        echo = "" if self._echoes is None else self._echoes[choice.prompt_index].text
        yield b'{"index":%d,"text":"%b' % (choice.index, json_inside(echo))
        yield finished.text
        yield b'"'
        yield from _logprobs(joined(*before, finished.columns) if before else finished.columns)
        yield b',"token_ids":'
        yield orjson.dumps(choice.token_ids) if self._has_token_ids else b"null"
        yield b',"prompt_token_ids":'
        yield self._prompt_token_ids(choice) if self._has_token_ids else b"null"
        yield from self._prompt_logprobs.field(scores if self._asks_prompt_logprobs else None)
        yield choice_end(finished)

    def _echo_columns(
        self, prompt_index: int, scores: list[TokenLogprobs] | None
    ) -> Iterator[Sequence[bytes]]:
        """Yield what goes before the columns of an answer, in parts."""
        if self._echoes is not None and self._has_logprobs:
            assert scores is not None, "they were asked for, and came with the first token"
            yield from echo_columns(self._echoes[prompt_index], scores, self._token_name)

    def _prompt_token_ids(self, choice: Choice) -> bytes:
        """Return the tokens of a choice's prompt, which it shares with others."""
        known = self._prompt_json.get(choice.prompt_index)
        if known is None:
            known = orjson.dumps(choice.request.prompt_token_ids)
            self._prompt_json[choice.prompt_index] = known
        return known


def _logprobs(columns: Sequence[Piece]) -> Iterator[Piece]:
    """Yield the field `logprobs`."""
    if not columns:
        yield b',"logprobs":null'
        return
    names = (b"tokens", b"token_logprobs", b"top_logprobs", b"text_offset")
    start = b',"logprobs":{"'
    for name, column in zip(names, columns, strict=True):
        yield start + name + b'":['
        yield column
        start = b'],"'
    yield b"]}"


def _token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's text; of one that is no whole characters its bytes, as OpenAI names it."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + data.decode("ascii", errors="backslashreplace")
