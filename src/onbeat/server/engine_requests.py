"""The engine's requests, one for each choice, made of a checked body."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest

from onbeat.core.errors import PromptTooLong, counted
from onbeat.core.protocols import EngineInfo
from onbeat.core.request import Request, SamplingParams, WholeRequest
from onbeat.core.tokenizer import Tokenizer
from onbeat.server.answer import cancelled_on_disconnect
from onbeat.server.fair_threads import Turns
from onbeat.server.generation_request import GenerationRequest
from onbeat.server.middleware import context_of
from onbeat.server.objectives import request_objectives
from onbeat.server.prompts import PromptInput
from onbeat.server.services import Services

_SEED_MASK = 2**63 - 1
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "min_tokens"),
)
"""Fields of a body that are those of `SamplingParams`, and win over the model's defaults."""


async def encoded(
    body: GenerationRequest, texts: Sequence[PromptInput], http: HttpRequest, services: Services
) -> list[list[int]]:
    """Return the tokens of a body's prompts.

    Raises
    ------
    OnbeatError : one is refused (`PromptEncoder.encode_all`).
    ClientGone : the caller has left.
    """
    options = body.prompt_options(services.info.limits.max_model_len)
    async with cancelled_on_disconnect(http.receive):
        return await services.encoder.encode_all(texts, options, context_of(http.scope).caller)


async def engine_requests(
    body: GenerationRequest, texts: Sequence[PromptInput], http: HttpRequest, services: Services
) -> list[Request]:
    """Return `n` requests for each prompt, one for each choice of the answer.

    Parameters
    ----------
    body : what the caller wants.
    texts : its prompts.
    http : whose headers may hold objectives. Its context says when it arrived, what its answer must match,
        and the answer's id, with which the requests' ids start; it gets the job.
    services : of the server.

    Raises
    ------
    InvalidRequest : values contradict each other, or leave no token to sample.
    PromptTooLong : a prompt leaves no room for the answer.
    ClientGone : the caller has left.
    """
    context, info, tokenizer = context_of(http.scope), services.info, services.tokenizer
    objectives = request_objectives(body, http.headers, context, services.config.slo)
    context.job = objectives.job
    prompts = await encoded(body, texts, http, services)
    requests, turns = list[Request](), Turns()
    adapter = services.adapters.get(body.model or "")
    num_choices = len(prompts) * body.num_choices
    num_prompt_tokens = body.num_choices * sum(map(len, prompts))
    num_scores = num_alternatives(body.num_prompt_logprobs, info)
    whole = WholeRequest(context.completion_id, num_choices, num_prompt_tokens) if num_choices > 1 else None
    of_request, bad_words = objectives.of_request, _spellings(body.bad_words or (), tokenizer)
    for token_ids in prompts:
        sampling = _sampling_params(body, len(token_ids), info, tokenizer, bad_words)
        if context.grammar is not None:
            sampling = replace(sampling, grammar=context.grammar)
        prompt_token_ids = tuple(token_ids)
        for choice in range(body.num_choices):
            # choice i of seed s is choice 0 of seed s + i
            seed = (sampling.seed + choice) & _SEED_MASK
            number = "" if whole is None else f"-{len(requests)}"
            request = Request(
                request_id=context.completion_id + number,
                prompt_token_ids=prompt_token_ids,
                sampling=replace(sampling, seed=seed) if choice else sampling,
                arrival=context.arrival,
                caller=context.caller,
                priority=body.priority or 0,
                # of one choice: all of them have the same prompt, but those of a stream do not wait for it
                num_prompt_logprobs=num_scores if body.stream or not choice else None,
                cache_salt=body.cache_salt,
                adapter=adapter,
                whole=whole,
                **of_request,
            )
            requests.append(request)
            await turns.rest()
    return requests


def _sampling_params(
    body: GenerationRequest,
    num_prompt_tokens: int,
    info: EngineInfo,
    tokenizer: Tokenizer,
    bad_words: tuple[tuple[int, ...], ...],
) -> SamplingParams:
    """Return how the first choice for a prompt is sampled."""
    chosen: dict[str, Any] = dict(info.sampling_defaults)
    most = chosen.pop("max_tokens", None)
    chosen |= {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    max_tokens = fit_max_tokens(
        num_prompt_tokens,
        asked=1 if body.asked_max_tokens == 0 else body.asked_max_tokens,
        default=most if body.default_max_tokens is None else body.default_max_tokens,
        max_model_len=info.limits.max_model_len,
        param=body.prompt_field,
    )
    seed = secrets.randbits(63) if body.seed is None else body.seed & _SEED_MASK
    stops = dict.fromkeys(body.stop_token_ids or ())
    if not body.ignore_eos:
        stops |= dict.fromkeys(tokenizer.eos_token_ids)
    sampling = SamplingParams(
        **{**chosen, "top_k": max(chosen.get("top_k", 0), 0)},
        logit_bias=tuple((body.logit_bias or {}).items()),
        allowed_token_ids=tuple(dict.fromkeys(body.allowed_token_ids or ())),
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=tuple(stops),
        num_logprobs=num_alternatives(body.num_logprobs, info),
        logprob_token_ids=tuple(dict.fromkeys(body.logprob_token_ids or ())),
        bad_words=bad_words,
    )
    info.check_sampling(sampling)
    return sampling


def num_alternatives(asked: int | None, info: EngineInfo) -> int | None:
    """Return how many alternatives of a token are reported; -1 asks for the whole vocabulary."""
    return info.vocab_size if asked == -1 else asked


def _spellings(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of words that must not come, at a text's start and behind a space, as vLLM has it."""
    spelt: list[tuple[int, ...]] = []
    for word in words:
        plain, spaced = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
        )
        spelt.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:  # else it begins with a space of its own
            spelt.append(spaced)
    return tuple(spelt)


def fit_max_tokens(
    num_prompt_tokens: int, *, asked: int | None, default: int | None, max_model_len: int, param: str
) -> int:
    """Return how many output tokens a request may have.

    Parameters
    ----------
    num_prompt_tokens : tokens of the prompt.
    asked : the caller's limit, which must fit beside the prompt.
    default : the limit without one, cut to what fits; None is all that fits.
    max_model_len : most tokens of prompt and output.
    param : the prompt's field, for errors.

    Raises
    ------
    PromptTooLong : the prompt leaves no room, or less than was asked for.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise PromptTooLong(
            f"the prompt has {counted(num_prompt_tokens, 'token')}; this model takes at most {max_model_len} "
            "with the answer. Shorten it",
            param=param,
        )
    if asked is not None and asked > room:
        raise PromptTooLong(
            f"the prompt has {counted(num_prompt_tokens, 'token')} and the answer up to {asked}; this model "
            f"takes at most {max_model_len} together. Shorten the prompt or ask for at most {room}",
            param=param,
        )
    return min(room if default is None else default, room) if asked is None else asked
