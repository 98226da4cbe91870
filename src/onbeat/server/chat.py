"""POST /v1/chat/completions: its body, its answers, and the way from one to the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from onbeat.core.errors import InvalidRequest
from onbeat.core.protocols import Tokenizer
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
from onbeat.server.chat_prompt import ChatMessages, render_chat
from onbeat.server.config import ServerConfig
from onbeat.server.generation import ChoiceDelta, ShownToken
from onbeat.server.generation_request import (
    GenerationRequest,
    check_common,
    encode_options,
    engine_requests,
)
from onbeat.server.middleware import context_of
from onbeat.server.objectives import request_objectives
from onbeat.server.openapi import ChatCompletion, generation_route
from onbeat.server.services import Services


class ChatCompletionRequest(GenerationRequest):
    """OpenAI's chat completion, with vLLM's extra fields."""

    prompt_field = "messages"
    default_add_special_tokens = False
    """The template writes them itself."""

    messages: ChatMessages
    max_completion_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    """Goes before the deprecated `max_tokens`."""
    logprobs: Flag | None = None
    top_logprobs: Annotated[int, Field(ge=0), WHOLE] | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    """Go on writing the last message instead of answering it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template."""

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def continues_prompt(self) -> bool:
        return bool(self.continue_final_message)


def _check_chat(body: ChatCompletionRequest, config: ServerConfig) -> None:
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
    if (body.top_logprobs or 0) > config.max_logprobs:
        raise InvalidRequest(
            f"top_logprobs is {body.top_logprobs}; this server allows at most {config.max_logprobs}",
            param="top_logprobs",
        )


def chat_routes(services: Services) -> APIRouter:
    """Return the route of chat completions."""
    router = APIRouter()
    config, tokenizer = services.config, services.tokenizer

    @router.post("/v1/chat/completions", **generation_route(ChatCompletionRequest, ChatCompletion))
    async def chat_completions(request: Request) -> Response:
        """Answer a chat."""
        services.lifecycle.check_open()
        context, info = context_of(request.scope), services.info
        body = await read_body(request, ChatCompletionRequest)
        head = new_head("chatcmpl", services.check_model(body.model))
        context.completion_id = head.completion_id
        check_common(body, config, info)
        _check_chat(body, config)
        objectives = request_objectives(body, request.headers, context, config.slo)
        encoder, caller = services.encoder, context.caller
        async with cancelled_on_disconnect(request.receive):
            text = await render_chat(body, encoder, services.chat_template, caller)
            prompt = await encoder.encode(text, encode_options(body, info.max_model_len), caller)
        requests = engine_requests(body, [prompt], objectives, info, tokenizer.eos_token_ids, context)
        return AnswerResponse(
            body, requests, ChatFormat(head, body, tokenizer, config.response_role), services
        )

    return router


class ChatFormat:
    """Writes chat completions and their chunks."""

    def __init__(
        self, head: AnswerHead, body: ChatCompletionRequest, tokenizer: Tokenizer, role: str
    ) -> None:
        self._head = head
        self._has_logprobs = bool(body.logprobs)
        self._has_token_ids = bool(body.return_token_ids)
        self._tokenizer = tokenizer
        self._role = role
        self._chunk_fields = head.fields("chat.completion.chunk")
        self._template = ChunkTemplate(self._chunk_fields, has_usage=body.includes_usage)
        self._started: set[int] = set()

    def events(self, delta: ChoiceDelta, extras: Extras) -> bytes:
        index = delta.choice.index
        if index in self._started:
            return self._template.chunk(self._choice(delta), extras)
        self._started.add(index)
        start = self._start(delta, extras.usage)
        if not delta.text and delta.finish_reason is None:
            return start
        return start + self._template.chunk(self._choice(delta), extras)

    def usage_event(self, extras: Extras) -> bytes:
        return event({**self._chunk_fields, "choices": [], **extras.fields()})

    def response(self, choices: Sequence[ChoiceDelta], extras: Extras) -> dict[str, Any]:
        answer = {
            **self._head.fields("chat.completion"),
            "choices": [self._whole(choice) for choice in choices],
        }
        if self._has_token_ids:
            answer["prompt_token_ids"] = list(choices[0].choice.request.prompt_token_ids)
        return answer | extras.fields()

    def _start(self, delta: ChoiceDelta, usage: dict[str, Any] | None) -> bytes:
        """Return the chunk that names the role of a choice."""
        choice = {
            "index": delta.choice.index,
            "delta": {"role": self._role, "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if usage is not None:
            usage = {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        ids = delta.choice.request.prompt_token_ids if self._has_token_ids else None
        return self._template.chunk(orjson.dumps(choice), Extras(usage=usage, prompt_token_ids=ids))

    def _choice(self, delta: ChoiceDelta) -> bytes:
        content = b'{"content":' + orjson.dumps(delta.text) + b"}" if delta.text else b"{}"
        parts = [b'{"index":%d,"delta":' % delta.choice.index, content, b',"logprobs":']
        if self._has_logprobs and delta.tokens:
            parts.append(orjson.dumps(_logprobs(delta.tokens, self._tokenizer)))
        else:
            parts.append(b"null")
        if self._has_token_ids:
            parts += (b',"token_ids":', orjson.dumps(delta.token_ids))
        return b"".join(parts) + choice_end(delta)

    def _whole(self, finished: ChoiceDelta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": finished.choice.index,
            # no null `refusal`: clients send the message back, and some make a field of their own out of it
            "message": {"role": self._role, "content": finished.text},
            "logprobs": _logprobs(finished.tokens, self._tokenizer) if self._has_logprobs else None,
            "finish_reason": finished.finish_reason,
            "stop_reason": finished.choice.stop_reason,
        }
        if self._has_token_ids:
            choice["token_ids"] = finished.choice.token_ids
        return choice


def _logprobs(tokens: Sequence[ShownToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice."""
    return {"content": [_entry(token, tokenizer) for token in tokens], "refusal": None}


def _entry(token: ShownToken, tokenizer: Tokenizer) -> dict[str, Any]:
    values = token.known_logprobs
    top = zip(values.top_token_ids, values.top_logprobs, strict=True)
    return {
        **_json_token(values.token_id, values.logprob, tokenizer),
        "top_logprobs": [_json_token(token_id, logprob, tokenizer) for token_id, logprob in top],
    }


def _json_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": max(logprob, LOWEST_LOGPROB),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
