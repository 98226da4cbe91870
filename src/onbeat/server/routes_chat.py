"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from onbeat.server.answer import AnswerResponse, Job
from onbeat.server.answer_head import AnswerOptions
from onbeat.server.body import parse_body, read_json_object
from onbeat.server.fields import asks_not_to_think
from onbeat.server.format_chat import ChatFormat
from onbeat.server.generation import TextOptions
from onbeat.server.messages import template_messages
from onbeat.server.middleware import HttpContext, context_of
from onbeat.server.objectives import request_objectives
from onbeat.server.prompts import EncodeOptions, chat_prompt, fit_max_tokens, truncation
from onbeat.server.protocol_chat import ChatCompletionRequest, RenderedChat, check_chat
from onbeat.server.sampling_fields import SamplingFields, check_common, sampling_params
from onbeat.server.services import Services, make_choices


async def answer_chat(request: Request, services: Services) -> AnswerResponse:
    """Check a chat completion and return the response that generates it.

    Raises
    ------
    RequestRejected : the request cannot be served as it stands.
    """
    services.lifecycle.check_open()
    raw = await read_json_object(request)
    arrival = time.monotonic()
    context = context_of(request.scope)
    body = parse_body(ChatCompletionRequest, raw, context)
    model = services.check_model(body.model)
    check_common(body, services.config, services.info)
    check_chat(body, services.config)
    objectives = request_objectives(body, request.headers, context.key_digest, services.config.slo)
    prompt = await _encode(body, await render_chat(body, raw, services, context), services)
    max_tokens = fit_max_tokens(
        len(prompt),
        asked=body.asked_max_tokens,
        default=services.info.max_model_len,
        max_model_len=services.info.max_model_len,
        param="messages",
    )
    sampling = sampling_params(
        body,
        services.tokenizer,
        vocab_size=services.info.vocab_size,
        max_tokens=max_tokens,
        num_logprobs=body.num_logprobs,
    )
    head = services.new_head("chatcmpl", model)
    options = AnswerOptions(
        include_usage=body.includes_usage, logprobs=bool(body.logprobs), token_ids=bool(body.return_token_ids)
    )
    job = Job(
        completion_id=head.completion_id,
        arrival=arrival,
        choices=make_choices(
            body,
            [prompt],
            [sampling],
            completion_id=head.completion_id,
            arrival=arrival,
            objectives=objectives,
        ),
        text_options=text_options(body),
        answer_format=ChatFormat(head, options, services.tokenizer, services.config.response_role),
        stream=bool(body.stream),
        include_usage=body.includes_usage,
        continuous_usage=body.has_continuous_usage,
        slo_mode=services.config.slo.mode,
    )
    return AnswerResponse(job, services.generator, services.lifecycle)


async def render_chat(
    body: RenderedChat, raw: Mapping[str, Any], services: Services, context: HttpContext
) -> str:
    """Return a chat as the text that the model completes.

    Parameters
    ----------
    body : the checked body.
    raw : the same as it came, with the fields that ask for nothing.
    services : has the template.
    context : gets the names of the fields of messages that are ignored.

    Raises
    ------
    RequestRejected : there is no template, or the messages are not what it takes.
    """
    messages = template_messages(body.messages or [], context)
    no_thinking = {"enable_thinking": False} if asks_not_to_think(raw) else {}
    return await chat_prompt(
        services.encoder,
        services.chat_template,
        messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        variables={**no_thinking, **(body.chat_template_kwargs or {})},
    )


async def _encode(body: ChatCompletionRequest, text: str, services: Services) -> list[int]:
    """Return the prompt's token ids. The template writes special tokens itself, so none are added."""
    truncate_to = truncation(
        body.truncate_prompt_tokens,
        max_model_len=services.info.max_model_len,
        max_tokens=body.asked_max_tokens,
    )
    options = EncodeOptions(
        add_special_tokens=bool(body.add_special_tokens), truncate_to=truncate_to, param="messages"
    )
    return await services.encoder.encode(text, options)


def text_options(body: SamplingFields) -> TextOptions:
    """Return how the caller wants its text."""
    return TextOptions(
        stop=body.stop_strings,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
    )
