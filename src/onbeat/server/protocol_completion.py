"""The body of POST /v1/completions."""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from onbeat.core.errors import InvalidRequest
from onbeat.server.config import ServerConfig
from onbeat.server.sampling_fields import SamplingFields, Whole

PromptInput = str | list[int]

_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
    ]
}


def _checked_prompts(value: Any) -> list[PromptInput]:
    """Return the prompts of a request, one or many, as text or token ids.

    Written out because a union of list types would check a prompt of 100,000 tokens four times; sets of types
    because there may be 500,000.
    """
    if isinstance(value, str):
        return [value]
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if kinds == {int}:
        return [value]
    if kinds == {str}:
        return list(value)
    if kinds == {list} and all(value) and set(map(type, chain.from_iterable(value))) == {int}:
        return list(value)
    if value == []:
        raise ValueError("prompt is empty; send text or token ids")
    raise ValueError(
        "prompt must be a string, an array of strings, token ids, or an array of token id arrays"
    )


class CompletionRequest(SamplingFields):
    """OpenAI's text completion, with vLLM's extra fields."""

    prompt: Annotated[list[PromptInput], PlainValidator(_checked_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    echo: bool | None = None
    """Put the prompt before the answer."""
    logprobs: Whole | None = Field(None, ge=0)


def check_completion(body: CompletionRequest, config: ServerConfig) -> None:
    """Check the fields that only text completions have.

    Raises
    ------
    InvalidRequest : values contradict each other or exceed this server's caps.
    """
    num_choices = len(body.prompt) * body.num_choices
    if num_choices > config.max_choices:
        raise InvalidRequest(
            f"{len(body.prompt)} prompts with n = {body.num_choices} are {num_choices} choices; this server "
            f"allows at most {config.max_choices} in one request",
            param="prompt",
        )
    if (body.logprobs or 0) > config.max_logprobs:
        raise InvalidRequest(
            f"logprobs is {body.logprobs}; this server allows at most {config.max_logprobs}",
            param="logprobs",
        )
    if body.echo and body.logprobs is not None:
        raise InvalidRequest(
            "echo with logprobs is not supported by this server (it computes none for prompts); drop one",
            param="echo",
            code="unsupported_parameter",
        )
