"""The routes that take a body."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from onbeat.server.openapi import (
    ChatCompletion,
    Completion,
    Detokenized,
    Tokens,
    error_answers,
    json_body,
    slo_headers,
)
from onbeat.server.protocol_chat import ChatCompletionRequest
from onbeat.server.protocol_completion import CompletionRequest
from onbeat.server.routes_chat import answer_chat
from onbeat.server.routes_completion import answer_completion
from onbeat.server.routes_tokenize import (
    DetokenizeRequest,
    TokenizeRequest,
    answer_detokenize,
    answer_tokenize,
)
from onbeat.server.services import Services

REQUEST_BODIES = (ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
"""What the routes below take."""

_STREAM: dict[str, Any] = {
    "description": "The whole answer, or with `stream` server-sent events that end with `data: [DONE]`",
    "content": {
        "text/event-stream": {
            "schema": {
                "type": "object",
                "description": "One event; `data` is a chunk as JSON, an error body, or [DONE]",
                "properties": {"data": {"type": "string"}},
                "required": ["data"],
            }
        }
    },
}


def openai_routes(services: Services) -> APIRouter:
    """Return the routes of chat, completions and the tokenizer.

    Bodies are parsed by hand: FastAPI would accept NaN and answer mistakes with its own 422.
    """
    router = APIRouter()
    generation_errors = error_answers(400, 401, 404, 413, 429, 500, 503, 504)
    tokenizer_errors = error_answers(400, 401, 404, 413)

    @router.post(
        "/v1/chat/completions",
        tags=["generation"],
        response_model=ChatCompletion,
        responses={200: _STREAM, **generation_errors},
        openapi_extra={**json_body(ChatCompletionRequest), "parameters": slo_headers()},
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a chat."""
        return await answer_chat(request, services)

    @router.post(
        "/v1/completions",
        tags=["generation"],
        response_model=Completion,
        responses={200: _STREAM, **generation_errors},
        openapi_extra={**json_body(CompletionRequest), "parameters": slo_headers()},
    )
    async def completions(request: Request) -> Response:
        """Go on writing a text."""
        return await answer_completion(request, services)

    @router.post(
        "/tokenize",
        tags=["tokenizer"],
        response_model=Tokens,
        responses=tokenizer_errors,
        openapi_extra=json_body(TokenizeRequest),
    )
    async def tokenize(request: Request) -> Response:
        """Return the tokens of a text or chat."""
        return await answer_tokenize(request, services)

    @router.post(
        "/detokenize",
        tags=["tokenizer"],
        response_model=Detokenized,
        responses=tokenizer_errors,
        openapi_extra=json_body(DetokenizeRequest),
    )
    async def detokenize(request: Request) -> Response:
        """Return the text of tokens."""
        return await answer_detokenize(request, services)

    return router
