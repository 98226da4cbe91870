"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from onbeat.core.errors import InvalidRequest
from onbeat.server.body import parse_body, read_json_object
from onbeat.server.messages import ChatMessages
from onbeat.server.middleware import context_of
from onbeat.server.prompts import EncodeOptions
from onbeat.server.protocol_chat import check_rendering
from onbeat.server.routes_chat import render_chat
from onbeat.server.sampling_fields import check_token_ids
from onbeat.server.services import Services


class TokenizeRequest(BaseModel):
    """A text, or a chat, whose tokens are wanted."""

    model_config = ConfigDict(
        strict=True, json_schema_extra={"anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
    )

    model: str | None = None
    prompt: str | None = None
    messages: ChatMessages | None = None
    add_special_tokens: bool | None = None
    """True by default for a prompt, false for messages, whose template writes them."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """Tokens whose text is wanted."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


async def answer_tokenize(request: Request, services: Services) -> Response:
    """Return the token ids of a text or chat."""
    raw = await read_json_object(request)
    context = context_of(request.scope)
    body = parse_body(TokenizeRequest, raw, context)
    services.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    text = body.prompt
    if text is None:
        check_rendering(body)
        text = await render_chat(body, raw, services, context)
    token_ids = await services.encoder.encode_text(text, _encode_options(body))
    strs = None
    if body.return_token_strs:
        strs = await services.encoder.off_loop(
            len(token_ids), lambda: list(map(services.tokenizer.token_text, token_ids))
        )
    answer = {
        "count": len(token_ids),
        "max_model_len": services.info.max_model_len,
        "tokens": token_ids,
        "token_strs": strs,
    }
    return Response(orjson.dumps(answer), media_type="application/json")


def _encode_options(body: TokenizeRequest) -> EncodeOptions:
    if body.prompt is None:
        return EncodeOptions(add_special_tokens=bool(body.add_special_tokens), param="messages")
    return EncodeOptions(add_special_tokens=body.add_special_tokens is not False)


async def answer_detokenize(request: Request, services: Services) -> Response:
    """Return the text of token ids, special tokens included."""
    body = parse_body(DetokenizeRequest, await read_json_object(request), context_of(request.scope))
    services.check_model(body.model)
    check_token_ids(body.tokens, services.info.vocab_size, "tokens")
    text = await services.encoder.off_loop(
        len(body.tokens), lambda: services.tokenizer.decode(body.tokens, skip_special_tokens=False)
    )
    return Response(orjson.dumps({"prompt": text}), media_type="application/json")
