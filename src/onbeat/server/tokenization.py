"""POST /tokenize and POST /detokenize: their bodies and answers."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from onbeat.server.answer import cancelled_on_disconnect
from onbeat.server.body import read_body
from onbeat.server.chat import ChatCompletionRequest
from onbeat.server.chat_prompt import render_chat
from onbeat.server.completions import CompletionRequest
from onbeat.server.fields import WHOLE, Flag, only_one, without_effect
from onbeat.server.generation_request import GenerationRequest
from onbeat.server.middleware import context_of
from onbeat.server.openapi import Routes
from onbeat.server.pieces import PiecesResponse, encode, in_pieces, json_response, list_in_pieces
from onbeat.server.prompts import EncodingFields, TokenId, check_token_ids
from onbeat.server.reply_fields import ChatFields
from onbeat.server.services import Services

_EITHER: list[Any] = [
    {"required": [one], "properties": {one: {"type": kind}, other: {"type": "null"}}}
    for one, kind, other in (("prompt", "string", "messages"), ("messages", "array", "prompt"))
]


def _describe(schema: dict[str, Any]) -> None:
    schema["oneOf"] = _EITHER
    for name in sorted(_OF_ANSWERS):
        schema["properties"][name] = without_effect()


class TokenizeRequest(ChatFields, EncodingFields):
    """A text, or a chat, whose tokens are wanted."""

    model_config = ConfigDict(strict=True, json_schema_extra=_describe)

    model: str | None = None
    prompt: str | None = None
    max_tokens: Annotated[int, Field(ge=0), WHOLE] | None = None
    """What truncation to what fits leaves room for; so the next."""
    max_completion_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    return_token_strs: Flag | None = None


_OF_ANSWERS = ChatCompletionRequest.model_fields.keys() - TokenizeRequest.model_fields.keys()
"""What else the body of a chat may hold: it says how to answer, and changes nothing about the prompt."""


class Tokens(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Struct):
    prompt: str


class TokenizerInfo(Struct):
    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    additional_special_tokens: list[str]
    chat_template: str | None


class DetokenizeRequest(BaseModel):
    """Tokens whose text is wanted."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


def tokenizer_routes(services: Services) -> Routes:
    """Return the routes of the tokenizer."""
    router = Routes()
    encoder, tokenizer = services.encoder, services.tokenizer

    @router.post("/tokenize", **router.taking(TokenizeRequest, Tokens))
    async def tokenize(request: Request) -> Response:
        """Return the tokens of a text or chat."""
        body = await read_body(request, TokenizeRequest, unused=_OF_ANSWERS)
        caller = context_of(request.scope).caller
        services.check_model(body.model)
        only_one(body, ("prompt", "messages"), context_of(request.scope).ignored_fields)
        text = body.prompt
        kind: type[GenerationRequest] = CompletionRequest
        if text is None:
            text, kind = await render_chat(body, request, services), ChatCompletionRequest
        # as the endpoint that answers would encode it
        options = body.encode_options(
            services.info.limits.max_model_len,
            param=kind.prompt_field,
            special=kind.default_add_special_tokens,
            max_tokens=body.max_completion_tokens or body.max_tokens or kind.default_max_tokens,
        )
        async with cancelled_on_disconnect(request.receive):
            token_ids = await encoder.encode_text(text, options, caller)
            # written there, too: what a long list leaves behind takes as long to be freed
            strings = list_in_pieces(token_ids, tokenizer.token_entry) if body.return_token_strs else None
            num_tokens, most = len(token_ids), services.info.limits.max_model_len
            answer = Tokens(num_tokens, most, list_in_pieces(token_ids), strings)
            pieces = await encoder.off_loop(caller, num_tokens, lambda: list(in_pieces(answer)))
        return PiecesResponse(pieces, services.slow_readers)

    @router.post("/detokenize", **router.taking(DetokenizeRequest, Detokenized))
    async def detokenize(request: Request) -> Response:
        """Return the text of tokens, special ones included."""
        body = await read_body(request, DetokenizeRequest)
        services.check_model(body.model)
        check_token_ids(body.tokens, services.info.vocab_size, "tokens")
        async with cancelled_on_disconnect(request.receive):
            written = await encoder.off_loop(
                context_of(request.scope).caller,
                len(body.tokens),
                lambda: encode(Detokenized(tokenizer.decode(body.tokens, skip_special_tokens=False))),
            )
        return PiecesResponse([written], services.slow_readers)

    @router.get("/tokenizer_info", tags=["tokenizer"], responses=router.telling(TokenizerInfo, 401))
    async def tokenizer_info() -> Response:
        """Describe the tokenizer."""
        start, ends = tokenizer.bos_token_id, tokenizer.eos_token_ids
        info = TokenizerInfo(
            tokenizer_class=type(tokenizer).__name__,
            vocab_size=tokenizer.vocab_size,
            model_max_length=services.info.limits.max_model_len,
            bos_token=None if start is None else tokenizer.token_text(start),
            eos_token=tokenizer.token_text(ends[0]) if ends else None,
            additional_special_tokens=list(map(tokenizer.token_text, sorted(tokenizer.special_token_ids))),
            chat_template=tokenizer.chat_template,
        )
        return json_response(info)

    return router
