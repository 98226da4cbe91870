"""POST /v1/chat/completions: its body, its answers, and the way from one to the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Annotated, Any

import orjson
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from onbeat.core.errors import InvalidRequest
from onbeat.core.protocols import EngineInfo, Tokenizer
from onbeat.core.request import Request as EngineRequest
from onbeat.server.answer import AnswerResponse, cancelled_on_disconnect
from onbeat.server.answer_format import (
    CACHED_TOKENS,
    LOWEST_LOGPROB,
    AnswerHead,
    ChunkTemplate,
    Extras,
    WholeChoice,
    WholePart,
    choice_end,
    chunks_failed,
    new_head,
    whole_answer,
)
from onbeat.server.answer_models import ChatCompletion
from onbeat.server.body import WHOLE, Flag, read_body
from onbeat.server.chat_messages import ChatMessages, echoed_text
from onbeat.server.chat_parts import event_delta, finish_reason, whole_message
from onbeat.server.chat_prompt import KVTransferParams, continued_text, render_chat
from onbeat.server.choices import ChoiceDelta, ShownToken, TextOptions
from onbeat.server.engine_requests import engine_requests
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
from onbeat.server.prompt_scores import PromptLogprobsWriter
from onbeat.server.prompts import PromptInput, check_token_ids
from onbeat.server.reply import PromptEnd, ReplyPlan, plan_reply
from onbeat.server.reply_fields import ThinkingFields, ToolFields, unread_variables
from onbeat.server.server_config import ServerConfig
from onbeat.server.services import Services
from onbeat.server.structured import grammar_of


class ChatCompletionRequest(ToolFields, ThinkingFields, GenerationRequest):
    """OpenAI's chat completion, with vLLM's extra fields."""

    prompt_field = "messages"
    default_add_special_tokens = False
    """The template writes them itself."""

    messages: ChatMessages
    max_completion_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    """Goes before the deprecated `max_tokens`."""
    logprobs: Flag | None = None
    top_logprobs: Annotated[int, Field(ge=-1), WHOLE] | None = None
    echo: Flag | None = None
    """Put the last message before the answer, if it has the answer's role."""
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    """Go on writing the last message instead of answering it."""
    kv_transfer_params: KVTransferParams | None = None
    include_reasoning: Flag | None = None
    """False leaves reasoning out of the answer, not out of its tokens."""

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def forwarded_ids(self) -> list[int] | None:
        """The prompt as somebody has tokenized it already; None where the template makes it."""
        return None if self.kv_transfer_params is None else self.kv_transfer_params.prompt_token_ids

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def continues_prompt(self) -> bool:
        return bool(self.continue_final_message)


def _check_chat(body: ChatCompletionRequest, config: ServerConfig, info: EngineInfo) -> None:
    """Check the fields that only chat has.

    Raises
    ------
    InvalidRequest : values contradict each other or exceed this server's caps.
    """
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest(
            "top_logprobs is given without logprobs; set logprobs to true or leave it out",
            param="top_logprobs",
        )
    check_num_logprobs(body.top_logprobs, "top_logprobs", config, info)
    if body.forwarded_ids is not None and body.continue_final_message:
        raise InvalidRequest(
            "kv_transfer_params.prompt_token_ids are the whole prompt, so no message is continued; leave "
            "continue_final_message out",
            param="continue_final_message",
        )


def chat_routes(services: Services) -> APIRouter:
    """Return the route of chat completions."""
    router = APIRouter()
    writers, role = ChatWriters(services.tokenizer), services.config.response_role

    @router.post("/v1/chat/completions", **generation_route(ChatCompletionRequest, ChatCompletion))
    async def chat_completions(request: Request) -> Response:
        """Answer a chat."""
        services.lifecycle.check_open()
        body = as_server_has_it(await read_body(request, ChatCompletionRequest), services.config)
        head = new_head("chatcmpl", services.check_model(body.model))
        requests, options = await chat_requests(body, request, head, services)
        return AnswerResponse(body, requests, options, ChatFormat(head, body, writers, role), services)

    return router


async def chat_requests(
    body: ChatCompletionRequest, request: Request, head: AnswerHead, services: Services
) -> tuple[list[EngineRequest], TextOptions]:
    """Return the engine's requests for a chat, whichever API it came by, and how their tokens become text.

    Parameters
    ----------
    body : the chat.
    request : which it came by: its headers may hold objectives.
    head : of the answer.
    services : of the server.

    Raises
    ------
    OnbeatError : the chat is refused.
    """
    config, info = services.config, services.info
    context = context_of(request.scope)
    context.completion_id = head.completion_id
    check_common(body, config, info)
    _check_chat(body, config, info)
    asked = ReplyPlan(body.text_options, grammar_of(body))
    objectives = request_objectives(body, request.headers, context, config.slo)
    context.job = objectives.job
    text = await _rendered(body, request, services)
    place = PromptEnd(text, continued_text(body))
    hides = body.include_reasoning is False
    plan = plan_reply(services.reply_style, asked, body.tool_use, place, drops_reasoning=hides)
    async with cancelled_on_disconnect(request.receive):
        await services.grammars.take(plan.constraint, context)
    prompt = await _encoded(body.forwarded_ids or text, body, request, services)
    requests = await engine_requests(body, [prompt], objectives, info, services.tokenizer, context)
    return requests, plan.options


async def chat_prompt(body: ChatCompletionRequest, request: Request, services: Services) -> list[int]:
    """Return the tokens that a chat's template makes of it.

    Raises
    ------
    OnbeatError : the chat is refused, or the template does not take it.
    ClientGone : the caller has left.
    """
    check_common(body, services.config, services.info)
    text = body.forwarded_ids or await _rendered(body, request, services)
    return await _encoded(text, body, request, services)


async def _rendered(body: ChatCompletionRequest, request: Request, services: Services) -> str:
    """Return the prompt of a chat as text: from its template, or of the tokens that came instead."""
    context, tokenizer = context_of(request.scope), services.tokenizer
    async with cancelled_on_disconnect(request.receive):
        if (token_ids := body.forwarded_ids) is not None:
            check_token_ids(token_ids, services.info.vocab_size, "kv_transfer_params.prompt_token_ids")
            decode = partial(tokenizer.decode, token_ids, skip_special_tokens=False)
            return await services.encoder.off_loop(context.caller, len(token_ids), decode)
        template, style = services.chat_template, services.reply_style
        if template is not None:
            context.ignored_fields += unread_variables(body.chat_template_kwargs, template.source)
        return await render_chat(body, services.encoder, template, style, context)


async def _encoded(
    prompt: PromptInput, body: ChatCompletionRequest, request: Request, services: Services
) -> list[int]:
    options = encode_options(body, services.info.max_model_len)
    async with cancelled_on_disconnect(request.receive):
        return await services.encoder.encode(prompt, options, context_of(request.scope).caller)


class TokenWriter:
    """Writes log-probabilities of tokens.

    Parameters
    ----------
    tokenizer : the model's.
    as_ids : whether they are named by their ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._around = lru_cache(CACHED_TOKENS)(self._spell)

    def _spell(self, token_id: int) -> tuple[bytes, bytes]:
        """Return what stands before and behind a token's log-probability."""
        data = self._tokenizer.token_bytes(token_id)
        text = f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)
        return (
            b'{"token":%b,"logprob":' % orjson.dumps(text),
            b',"bytes":%b' % orjson.dumps(list(data)),
        )

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def entry(self, token: ShownToken) -> bytes:
        """Return a token of `logprobs.content`."""
        values = token.known_logprobs
        logprobs = [max(logprob, LOWEST_LOGPROB) for logprob in (values.logprob, *values.top_logprobs)]
        numbers = json_inside(logprobs).split(b",")
        around = map(self._around, (values.token_id, *values.top_token_ids))
        own, *top = (
            before + number + behind for (before, behind), number in zip(around, numbers, strict=True)
        )
        return own + b',"top_logprobs":[' + b"},".join(top) + (b"}]}" if top else b"]}")


class ChatWriters:
    """What writes log-probabilities in the answers of one server.

    Parameters
    ----------
    tokenizer : the model's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = TokenWriter(tokenizer)
        self.token_ids = TokenWriter(tokenizer, as_ids=True)
        self.prompts = PromptLogprobsWriter(tokenizer)


class ChatFormat:
    """Writes chat completions and their chunks."""

    def __init__(
        self, head: AnswerHead, body: ChatCompletionRequest, writers: ChatWriters, role: str
    ) -> None:
        self._head = head
        self._has_logprobs = bool(body.logprobs)
        self._has_token_ids = bool(body.return_token_ids)
        self._writer = writers.token_ids if body.return_tokens_as_token_ids else writers.tokens
        self._prompts = writers.prompts
        self._echo = echoed_text(body.messages, role) if body.echo else ""
        self._role = role
        self._template = ChunkTemplate(head.fields("chat.completion.chunk"), has_usage=body.includes_usage)
        self.end, self.failed = self._template.end, chunks_failed
        self._tool_use = body.tool_use
        self._started: set[int] = set()

    def columns(self, tokens: Sequence[ShownToken]) -> Sequence[bytes]:
        return (b",".join(map(self._writer.entry, tokens)),) if self._has_logprobs else ()

    def events(self, delta: ChoiceDelta, extras: Extras) -> bytes:
        index = delta.choice.index
        if index in self._started:
            return self._template.chunk(self._choice(delta), extras)
        self._started.add(index)
        start = self._start(delta, extras.usage)
        if not (delta.text or delta.events) and delta.finish_reason is None:
            return start
        return start + self._template.chunk(self._choice(delta), extras)

    def whole(self, choices: Sequence[WholeChoice], extras: Extras) -> Iterator[Piece]:
        if self._has_token_ids:
            extras = replace(extras, prompt_token_ids=choices[0].choice.request.prompt_token_ids)
        fields = self._head.fields("chat.completion")
        tail = self._prompts.field(choices[0].choice.prompt_logprobs)
        return whole_answer(fields, map(self._whole, choices), extras, tail)

    def _start(self, delta: ChoiceDelta, usage: dict[str, Any] | None) -> bytes:
        """Return the chunk that names the role of a choice."""
        choice = {
            "index": delta.choice.index,
            "delta": {"role": self._role, "content": self._echo},
            "logprobs": None,
            "finish_reason": None,
        }
        if usage is not None:
            usage = {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        ids = delta.choice.request.prompt_token_ids if self._has_token_ids else None
        return self._template.chunk(orjson.dumps(choice), Extras(usage=usage, prompt_token_ids=ids))

    def _choice(self, delta: ChoiceDelta) -> bytes:
        if delta.events is not None:
            content = event_delta(delta.events)
        else:
            content = b'{"content":' + orjson.dumps(delta.text) + b"}" if delta.text else b"{}"
        parts: list[Piece] = [b'{"index":%d,"delta":' % delta.choice.index, content]
        parts += _logprobs(self.columns(delta.tokens) if delta.tokens else ())
        if self._has_token_ids:
            parts += (b',"token_ids":', orjson.dumps(delta.token_ids))
        return b"".join(parts) + choice_end(delta, finish_reason(delta, self._tool_use))

    def _whole(self, finished: WholeChoice) -> Iterator[Piece]:
        # no null `refusal`: clients send the message back, and some make a field of their own out of it
        yield b'{"index":%d,"message":' % finished.choice.index
        echo = [WholePart("content", bytearray(json_inside(self._echo)))] if self._echo else []
        yield from whole_message(self._role, [*echo, *finished.parts])
        yield from _logprobs(finished.columns)
        if self._has_token_ids:
            yield b',"token_ids":'
            yield orjson.dumps(finished.choice.token_ids)
        yield choice_end(finished, finish_reason(finished, self._tool_use))


def _logprobs(columns: Sequence[Piece]) -> Iterator[Piece]:
    """Yield the field `logprobs`."""
    if not columns:
        yield b',"logprobs":null'
        return
    (content,) = columns
    yield b',"logprobs":{"content":['
    yield content
    yield b'],"refusal":null}'
