"""What the endpoints that embed texts have in common: fields, checks, and the way to the vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
from msgspec import UNSET, Struct, UnsetType
from numpy.typing import NDArray
from starlette.requests import Request as HttpRequest

from onbeat.core.errors import InvalidRequest, OnbeatError, PromptTooLong
from onbeat.core.request import Request, SamplingParams, WholeRequest
from onbeat.server.answer import cancelled_on_disconnect, note_choices
from onbeat.server.answer_report import SLOReport, slo_report, worst_report
from onbeat.server.choices import Choice, TextOptions
from onbeat.server.errors import error_reply
from onbeat.server.fair_threads import Turns
from onbeat.server.generation import MOST_EMBEDDED
from onbeat.server.generation_request import EngineFields
from onbeat.server.middleware import HttpContext, context_of
from onbeat.server.objectives import RequestObjectives, request_objectives
from onbeat.server.prompts import EncodeOptions, PromptInput
from onbeat.server.server_config import MAX_INPUTS
from onbeat.server.services import Services
from onbeat.text.embedding import vector_of

_NO_SAMPLING = SamplingParams(max_tokens=1)


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class TextsAnswer(Struct):
    """What answers about texts have in common."""

    id: str
    model: str
    usage: EmbeddingUsage
    slo: SLOReport | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """Texts that have become vectors."""

    choices: Sequence[Choice]
    """One for each text, with its embedding."""
    usage: EmbeddingUsage
    slo: SLOReport | UnsetType
    """How the objectives were kept, by the worst text; unset without any."""

    def vectors(
        self, *, dimensions: int | None = None, normalize: bool = True
    ) -> Iterator[NDArray[np.float32]]:
        """Yield the embeddings, cut to their first numbers and of length 1 where that is wanted."""
        return (vector_of(choice.embedding, dimensions, normalize=normalize) for choice in self.choices)


def check_texts(texts: Sequence[PromptInput], param: str) -> None:
    """Refuse more texts than one request may hold, and empty ones.

    Raises
    ------
    InvalidRequest : there are too many, or one is empty.
    """
    if len(texts) > MAX_INPUTS:
        raise InvalidRequest(
            f"{param} holds {len(texts)} texts; at most {MAX_INPUTS} are taken. Send several requests",
            param=param,
            code="invalid_value",
        )
    for index, text in enumerate(texts):
        if not text:
            raise InvalidRequest(
                f"{param}[{index}] is empty; send some text", param=param, code="invalid_value"
            )


async def embed(
    services: Services,
    http: HttpRequest,
    body: EngineFields,
    texts: Sequence[PromptInput],
    options: EncodeOptions,
    names: Sequence[str] = (),
) -> Embedded:
    """Return the embeddings of texts, all of which are requests of the engine of their own.

    Parameters
    ----------
    http : whose answer it is; a client that leaves aborts what still runs.
    texts : in their order.
    options : how they become tokens.
    names : of the texts, where not all are of one field.

    Raises
    ------
    InvalidRequest, PromptTooLong : a text is empty, does not fit, or holds unknown tokens.
    RequestRejected, EngineDead, EngineError : as the engine does.
    ClientGone : nobody waits for the answer any more.
    """
    if not services.info.embeds:
        raise InvalidRequest(
            "this server makes no embeddings; serve the model with --backend native, cuda or torch, or with "
            "--backend vllm -- --convert embed"
        )
    body.check(services.config, services.info)
    context = context_of(http.scope)
    objectives = request_objectives(body, http.headers, context, services.config.slo)
    if objectives.job is not None:
        raise InvalidRequest(
            "slo.job is for calls that generate text; leave it out here, and state slo.e2e_ms",
            param="slo.job",
            code="invalid_value",
        )
    choices: list[Choice] = []
    try:
        with services.lifecycle.generation():
            async with cancelled_on_disconnect(http.receive):
                prompts = await services.encoder.encode_all(texts, options, context.caller)
                _check_lengths(prompts, services.info.max_model_len, options, names)
                if context.allowance is not None:
                    await context.allowance.take_answers(sum(map(len, prompts)))
                turns = Turns()
                for request in _requests(body, prompts, objectives, services, context):
                    index = len(choices)
                    choices.append(
                        Choice(index=index, prompt_index=index, request=request, is_streamed=False)
                    )
                    await turns.rest()
                async with aclosing(services.generator.run(choices, TextOptions())) as deltas:
                    async for _ in deltas:
                        await turns.rest()
    except OnbeatError as error:
        if isinstance(error, PromptTooLong) and error.param == "prompt":  # the engine's, which knows no field
            error.param = options.param
        context.error_code = error_reply(error).code
        raise
    finally:
        if choices:
            note_choices(choices, context)
    reports = list[SLOReport]()
    for choice in choices:
        reports += filter(None, [slo_report(choice, services.config.slo.mode)])
        await turns.rest()
    num_tokens = sum(map(len, prompts))
    return Embedded(
        choices=choices,
        usage=EmbeddingUsage(num_tokens, num_tokens),
        slo=worst_report(reports) or UNSET,
    )


def encode_options(
    body: EngineFields, max_model_len: int, *, param: str, special: bool = True
) -> EncodeOptions:
    """Return how texts become tokens.

    Parameters
    ----------
    param : the field that errors name.
    special : whether the model's own start and end tokens are added, unless the body says.

    Raises
    ------
    InvalidRequest : truncation leaves nothing of them, or more than fits.
    """
    asked = body.truncate_prompt_tokens
    if (asked or 0) > max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {asked}; this model takes at most {max_model_len} tokens. Please "
            "request a smaller truncation size. -1 keeps what fits",
            param="truncate_prompt_tokens",
        )
    # there is no answer to leave room for
    return body.encode_options(max_model_len + 1, param=param, special=special)


def _check_lengths(
    prompts: Sequence[list[int]], max_model_len: int, options: EncodeOptions, names: Sequence[str]
) -> None:
    """Refuse texts that do not fit the context, before any of them is computed."""
    for index, token_ids in enumerate(prompts):
        if len(token_ids) > max_model_len:
            name = names[index] if names else f"{options.param}[{index}]"
            raise PromptTooLong(
                f"{name} has {len(token_ids)} tokens; this model takes at most {max_model_len}. "
                "Please reduce the length of the input prompt, or set truncate_prompt_tokens to -1 to keep "
                "what fits",
                param=name.partition("[")[0],
            )


def _requests(
    body: EngineFields,
    prompts: Sequence[list[int]],
    objectives: RequestObjectives,
    services: Services,
    context: HttpContext,
) -> Iterator[Request]:
    """Yield the engine's requests, one for each text."""
    whole, of_request = None, objectives.of_request
    if len(prompts) > 1:
        num_at_once = min(len(prompts), MOST_EMBEDDED)
        whole = WholeRequest(context.completion_id, num_at_once, sum(map(len, prompts)))
    for index, token_ids in enumerate(prompts):
        yield Request(
            request_id=context.completion_id if whole is None else f"{context.completion_id}-{index}",
            prompt_token_ids=tuple(token_ids),
            sampling=_NO_SAMPLING,
            pooling=services.info.pooling,
            arrival=context.arrival,
            caller=context.caller,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            adapter=services.adapters.get(body.model or ""),
            whole=whole,
            **of_request,
        )
