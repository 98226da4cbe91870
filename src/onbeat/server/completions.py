"""POST /v1/completions: its body, its answers, and the way from one to the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any

import orjson
from fastapi import APIRouter
from pydantic import Field, PlainValidator, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from onbeat.core.errors import InvalidRequest
from onbeat.core.protocols import Tokenizer
from onbeat.core.request import TokenLogprobs
from onbeat.server.answer import AnswerResponse, cancelled_on_disconnect
from onbeat.server.answer_format import (
    LOWEST_LOGPROB,
    AnswerHead,
    ChunkTemplate,
    Extras,
    choice_end,
    event,
    new_head,
)
from onbeat.server.body import WHOLE, Flag, read_body
from onbeat.server.config import ServerConfig
from onbeat.server.errors import unsupported
from onbeat.server.generation import ChoiceDelta, ShownToken
from onbeat.server.generation_request import (
    GenerationRequest,
    check_common,
    encode_options,
    engine_requests,
)
from onbeat.server.middleware import context_of
from onbeat.server.objectives import request_objectives
from onbeat.server.openapi import Completion, generation_route
from onbeat.server.prompts import TOKEN_ID_SCHEMA, EncodeOptions, PromptInput
from onbeat.server.services import Services

_TOKEN_IDS = {"type": "array", "items": TOKEN_ID_SCHEMA, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
    ]
}


def _checked_prompts(value: Any) -> list[PromptInput]:
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
        raise ValueError("prompt is empty; send text or token ids")
    raise ValueError(
        "prompt must be a string, an array of strings, token ids, or an array of token id arrays"
    )


class CompletionRequest(GenerationRequest):
    """OpenAI's text completion, with vLLM's extra fields."""

    default_max_tokens = 16
    """OpenAI's."""

    prompt: Annotated[list[PromptInput], PlainValidator(_checked_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    echo: Flag | None = None
    """Put the prompt before the answer."""
    logprobs: Annotated[int, Field(ge=0), WHOLE] | None = None
    best_of: Annotated[int, WHOLE] | None = None
    """Ranks nothing where it equals `n`, and is refused otherwise."""

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def continues_prompt(self) -> bool:
        return True


def _check_completion(body: CompletionRequest, config: ServerConfig) -> None:
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
            f"{len(body.prompt)} prompts with n = {body.num_choices} are {num_choices} choices; this server "
            f"allows at most {config.max_choices} in one request",
            param="prompt",
        )
    if (body.logprobs or 0) > config.max_logprobs:
        raise InvalidRequest(
            f"logprobs is {body.logprobs}; this server allows at most {config.max_logprobs}",
            param="logprobs",
        )
    if body.echo and body.logprobs is not None:
        raise InvalidRequest(
            "echo with logprobs is not supported by this server (it computes none for prompts); drop one",
            param="echo",
            code="unsupported_parameter",
        )


def completion_routes(services: Services) -> APIRouter:
    """Return the route of text completions."""
    router = APIRouter()
    config, tokenizer = services.config, services.tokenizer

    @router.post("/v1/completions", **generation_route(CompletionRequest, Completion))
    async def completions(request: Request) -> Response:
        """Go on writing a text."""
        services.lifecycle.check_open()
        context, info = context_of(request.scope), services.info
        body = await read_body(request, CompletionRequest)
        head = new_head("cmpl", services.check_model(body.model))
        context.completion_id = head.completion_id
        check_common(body, config, info, num_prompts=len(body.prompt))
        _check_completion(body, config)
        objectives = request_objectives(body, request.headers, context, config.slo)
        options = encode_options(body, info.max_model_len)
        async with cancelled_on_disconnect(request.receive):
            prompts = await services.encoder.encode_all(body.prompt, options, context.caller)
        requests = engine_requests(body, prompts, objectives, info, tokenizer.eos_token_ids, context)
        echoes = [""] * len(prompts)
        if body.echo:
            used = list(zip(body.prompt, prompts, strict=True))
            async with cancelled_on_disconnect(request.receive):
                echoes = await services.encoder.off_loop(
                    context.caller,
                    sum(map(len, prompts)),
                    lambda: [_echo(*pair, options, tokenizer) for pair in used],
                )
        return AnswerResponse(body, requests, CompletionFormat(head, body, tokenizer, echoes), services)

    return router


def _echo(prompt: PromptInput, token_ids: list[int], options: EncodeOptions, tokenizer: Tokenizer) -> str:
    """Return the text of the prompt that the model sees: what truncation left of it."""
    may_be_cut = options.truncate_to is not None and len(token_ids) >= options.truncate_to
    if isinstance(prompt, str) and not may_be_cut:
        return prompt
    return tokenizer.decode(token_ids)


class CompletionFormat:
    """Writes text completions and their chunks.

    Parameters
    ----------
    head : what all chunks share.
    body : says what the caller wants beside the text.
    tokenizer : the model's.
    echoes : for each prompt the text that goes before its answers, empty unless `echo`.
    """

    def __init__(
        self, head: AnswerHead, body: CompletionRequest, tokenizer: Tokenizer, echoes: Sequence[str]
    ) -> None:
        self._fields = head.fields("text_completion")
        self._has_logprobs = body.logprobs is not None
        self._has_token_ids = bool(body.return_token_ids)
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._template = ChunkTemplate(self._fields, has_usage=body.includes_usage)
        self._started: set[int] = set()

    def events(self, delta: ChoiceDelta, extras: Extras) -> bytes:
        choice, text = delta.choice, delta.text
        is_first = choice.index not in self._started
        if is_first:
            self._started.add(choice.index)
            text = self._echoes[choice.prompt_index] + text
        parts = [b'{"index":%d,"text":' % choice.index, orjson.dumps(text), b',"logprobs":']
        parts.append(orjson.dumps(self._logprobs(delta.tokens)))
        if self._has_token_ids:
            parts += (b',"token_ids":', orjson.dumps(delta.token_ids))
            if is_first:
                parts += (b',"prompt_token_ids":', orjson.dumps(choice.request.prompt_token_ids))
        return self._template.chunk(b"".join(parts) + choice_end(delta), extras)

    def usage_event(self, extras: Extras) -> bytes:
        return event({**self._fields, "choices": [], **extras.fields()})

    def response(self, choices: Sequence[ChoiceDelta], extras: Extras) -> dict[str, Any]:
        return {**self._fields, "choices": [self._whole(choice) for choice in choices], **extras.fields()}

    def _whole(self, finished: ChoiceDelta) -> dict[str, Any]:
        choice = finished.choice
        result: dict[str, Any] = {
            "index": choice.index,
            "text": self._echoes[choice.prompt_index] + finished.text,
            "logprobs": self._logprobs(finished.tokens),
            "finish_reason": finished.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._has_token_ids:
            result["token_ids"] = choice.token_ids
            result["prompt_token_ids"] = list(choice.request.prompt_token_ids)
        return result

    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any] | None:
        return _json_logprobs(tokens, self._tokenizer) if self._has_logprobs else None


def _json_logprobs(tokens: Sequence[ShownToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the `logprobs` object of a text completion."""
    return {
        "tokens": [_token_name(token.token_id, tokenizer) for token in tokens],
        "token_logprobs": [max(token.known_logprobs.logprob, LOWEST_LOGPROB) for token in tokens],
        "top_logprobs": [_top_logprobs(token.known_logprobs, tokenizer) for token in tokens],
        "text_offset": [token.text_offset for token in tokens],
    }


def _top_logprobs(values: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """Return values by name: the sampled token's own first, and of others of one name the likelier's."""
    top = {_token_name(values.token_id, tokenizer): values.logprob}
    for token_id, logprob in zip(values.top_token_ids, values.top_logprobs, strict=True):
        top.setdefault(_token_name(token_id, tokenizer), logprob)  # the most likely comes first
    return {name: max(logprob, LOWEST_LOGPROB) for name, logprob in top.items()}


def _token_name(token_id: int, tokenizer: Tokenizer) -> str:
    """Return a token's text; of one that is no whole characters its bytes, as OpenAI names it."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + data.decode("ascii", errors="backslashreplace")
