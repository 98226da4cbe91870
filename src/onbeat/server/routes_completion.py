"""POST /v1/completions."""

from __future__ import annotations

import time

from starlette.requests import Request

from onbeat.core.request import SamplingParams
from onbeat.server.answer import AnswerResponse, Job
from onbeat.server.answer_head import AnswerOptions
from onbeat.server.body import parse_body, read_json_object
from onbeat.server.format_completion import CompletionFormat
from onbeat.server.middleware import context_of
from onbeat.server.objectives import request_objectives
from onbeat.server.prompts import EncodeOptions, fit_max_tokens, truncation
from onbeat.server.protocol_completion import CompletionRequest, PromptInput, check_completion
from onbeat.server.routes_chat import text_options
from onbeat.server.sampling_fields import check_common, sampling_params
from onbeat.server.services import Services, make_choices

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


async def answer_completion(request: Request, services: Services) -> AnswerResponse:
    """Check a text completion and return the response that generates it.

    Raises
    ------
    RequestRejected : the request cannot be served as it stands.
    """
    services.lifecycle.check_open()
    raw = await read_json_object(request)
    arrival = time.monotonic()
    context = context_of(request.scope)
    # best_of = n ranks nothing
    body = parse_body(CompletionRequest, raw, context, extra_no_ops={"best_of": raw.get("n")})
    model = services.check_model(body.model)
    check_common(body, services.config, services.info, num_prompts=len(body.prompt))
    check_completion(body, services.config)
    objectives = request_objectives(body, request.headers, context.key_digest, services.config.slo)
    encode_options = _encode_options(body, services)
    prompts = await services.encoder.encode_all(body.prompt, encode_options)
    samplings = [_sampling(body, services, len(token_ids)) for token_ids in prompts]
    head = services.new_head("cmpl", model)
    options = AnswerOptions(
        include_usage=body.includes_usage,
        logprobs=body.logprobs is not None,
        token_ids=bool(body.return_token_ids),
    )
    echoes = [""] * len(prompts)
    if body.echo:
        used = list(zip(body.prompt, prompts, strict=True))
        echoes = await services.encoder.off_loop(
            sum(map(len, prompts)), lambda: [_echo(*pair, encode_options, services) for pair in used]
        )
    job = Job(
        completion_id=head.completion_id,
        arrival=arrival,
        choices=make_choices(
            body, prompts, samplings, completion_id=head.completion_id, arrival=arrival, objectives=objectives
        ),
        text_options=text_options(body),
        answer_format=CompletionFormat(head, options, services.tokenizer, echoes),
        stream=bool(body.stream),
        include_usage=body.includes_usage,
        continuous_usage=body.has_continuous_usage,
        slo_mode=services.config.slo.mode,
    )
    return AnswerResponse(job, services.generator, services.lifecycle)


def _encode_options(body: CompletionRequest, services: Services) -> EncodeOptions:
    truncate_to = truncation(
        body.truncate_prompt_tokens, max_model_len=services.info.max_model_len, max_tokens=body.max_tokens
    )
    return EncodeOptions(
        add_special_tokens=body.add_special_tokens is not False, truncate_to=truncate_to, param="prompt"
    )


def _sampling(body: CompletionRequest, services: Services, num_prompt_tokens: int) -> SamplingParams:
    max_tokens = fit_max_tokens(
        num_prompt_tokens,
        asked=body.max_tokens,
        default=DEFAULT_MAX_TOKENS,
        max_model_len=services.info.max_model_len,
        param="prompt",
    )
    return sampling_params(
        body,
        services.tokenizer,
        vocab_size=services.info.vocab_size,
        max_tokens=max_tokens,
        num_logprobs=body.logprobs,
    )


def _echo(prompt: PromptInput, token_ids: list[int], options: EncodeOptions, services: Services) -> str:
    """Return the text of the prompt that the model sees: what truncation left of it."""
    may_be_cut = options.truncate_to is not None and len(token_ids) >= options.truncate_to
    if isinstance(prompt, str) and not may_be_cut:
        return prompt
    return services.tokenizer.decode(token_ids)
