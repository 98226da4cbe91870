"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from onbeat.core.errors import InvalidRequest
from onbeat.server.body import parse_body, read_json_object
from onbeat.server.messages import ChatMessages, template_messages
from onbeat.server.prompts import EncodeOptions, chat_prompt
from onbeat.server.sampling_fields import check_token_ids
from onbeat.server.services import Services


class TokenizeRequest(BaseModel):
    """A text, or a chat, whose tokens are wanted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: ChatMessages | None = None
    add_special_tokens: bool | None = None
    """True by default for a prompt, false for messages, whose template writes them."""
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """Tokens whose text is wanted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


async def answer_tokenize(request: Request, services: Services) -> Response:
    """Return the token ids of a text or chat."""
    body = parse_body(TokenizeRequest, await read_json_object(request))
    services.check_model(body.model)
    token_ids = await _tokenize(body, services)
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": services.info.max_model_len,
        "tokens": token_ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = await services.encoder.off_loop(
            len(token_ids), lambda: list(map(services.tokenizer.token_text, token_ids))
        )
    return Response(orjson.dumps(answer), media_type="application/json")


async def _tokenize(body: TokenizeRequest, services: Services) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    if body.prompt is not None:
        options = EncodeOptions(add_special_tokens=body.add_special_tokens is not False)
        return await services.encoder.encode_text(body.prompt, options)
    text = await chat_prompt(
        services.encoder,
        services.chat_template,
        template_messages(body.messages or []),
        add_generation_prompt=body.add_generation_prompt is not False,
    )
    options = EncodeOptions(add_special_tokens=bool(body.add_special_tokens), param="messages")
    return await services.encoder.encode(text, options)


async def answer_detokenize(request: Request, services: Services) -> Response:
    """Return the text of token ids, special tokens included."""
    body = parse_body(DetokenizeRequest, await read_json_object(request))
    services.check_model(body.model)
    check_token_ids(body.tokens, services.info.vocab_size, "tokens")
    text = await services.encoder.off_loop(
        len(body.tokens), lambda: services.tokenizer.decode(body.tokens, skip_special_tokens=False)
    )
    return Response(orjson.dumps({"prompt": text}), media_type="application/json")
