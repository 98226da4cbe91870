"""The fields that chat and text completions share, and how they become `SamplingParams`."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from onbeat.core.errors import InvalidRequest
from onbeat.core.protocols import EngineInfo, Tokenizer
from onbeat.core.request import SamplingParams
from onbeat.server.config import MAX_LISTED_TOKENS, MAX_STOP_STRINGS, ServerConfig
from onbeat.server.fields import quoted, with_one_unknown
from onbeat.server.objectives import ObjectiveFields

_SEED_MASK = 2**63 - 1
_INT64 = 2**63

StopString = Annotated[str, Field(min_length=1, max_length=1000)]
TokenIds = Annotated[list[int], Field(max_length=MAX_LISTED_TOKENS, fail_fast=True)]

_BIAS = {"type": "number", "minimum": -100, "maximum": 100}
_BIAS_SCHEMA = WithJsonSchema(
    {"anyOf": [{"type": "object", "additionalProperties": _BIAS}, {"type": "null"}], "default": None}
)


def _checked_bias(value: Any) -> dict[int, float] | None:
    """Return biases by token id. Written out because pydantic would report every mistake of 100,000."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"logit_bias is {quoted(value)}; it should be an object")  # noqa: TRY004 - what pydantic takes
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 20):
            raise ValueError(f"logit_bias has the key {quoted(key)}; keys are token ids")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"logit_bias[{key}] is {quoted(bias)}; it should be a number from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


def _whole(value: object) -> object:
    # above, a float may stand for an integer that it cannot hold
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


Whole = Annotated[int, BeforeValidator(_whole)]
"""An integer, which JSON may write as 5.0: some languages have no other numbers."""


class StreamOptions(BaseModel):
    """What a stream says beside its text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    """One more event at the end, with the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """Usage so far in every event (vLLM's)."""
    include_obfuscation: bool | None = None
    """OpenAI's padding against traffic analysis; accepted, never added."""

    @model_validator(mode="before")
    @classmethod
    def _has_few_unknown_fields(cls, value: Any) -> Any:
        return with_one_unknown(value, cls.model_fields)


class SamplingFields(ObjectiveFields):
    """Fields of both completion endpoints. Null means the default everywhere."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    """One of /v1/models; the served model if absent."""
    n: Whole | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Whole | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Whole | None = Field(None, ge=-1, lt=2**31)
    """-1 and 0 keep all tokens."""
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    seed: Whole | None = Field(None, ge=-_INT64, lt=_INT64)
    stop: (
        StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None
    ) = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: Whole | None = Field(None, ge=0)
    logit_bias: Annotated[dict[int, float] | None, PlainValidator(_checked_bias), _BIAS_SCHEMA] = None
    """Token id (in JSON a string) to the value added to its logit."""
    allowed_token_ids: TokenIds | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Whole | None = Field(None, ge=-1)
    """Keep only this many of the prompt's last tokens; -1 keeps what fits."""
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: Whole | None = Field(None, ge=-(2**31), lt=2**31)
    """Lower is earlier; needs the priority scheduling policy unless 0."""
    cache_salt: str | None = Field(None, min_length=1, max_length=1000)

    @field_validator("stop", mode="before")
    @classmethod
    def _has_no_empty_stop(cls, stop: object) -> object:
        """Say it once: the union's members would each complain in their own words."""
        if stop == "" or (isinstance(stop, list) and "" in stop):
            raise ValueError("stop holds an empty string, which is not allowed; leave it out")
        return stop

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        return self.includes_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


def check_common(
    fields: SamplingFields, config: ServerConfig, info: EngineInfo, *, num_prompts: int = 1
) -> None:
    """Check what no single field's type can say.

    Raises
    ------
    InvalidRequest : values contradict each other, exceed this server's caps, or name unknown tokens.
    """
    if fields.num_choices > config.max_n:
        raise InvalidRequest(f"n is {fields.n}; this server allows at most {config.max_n}", param="n")
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest(
            "stream_options is given without stream; set stream to true or leave it out",
            param="stream_options",
        )
    if fields.priority and not info.priority_scheduling:
        raise InvalidRequest(
            f"priority is {fields.priority}, which needs the priority scheduling policy; serve with "
            "--scheduling-policy priority or leave it out",
            param="priority",
        )
    if fields.truncate_prompt_tokens == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens is 0, which leaves no prompt; give a number, or -1 for what fits",
            param="truncate_prompt_tokens",
        )
    _check_lists(fields, num_prompts * fields.num_choices)
    check_token_ids(fields.stop_token_ids or (), info.vocab_size, "stop_token_ids")
    check_token_ids(fields.logit_bias or (), info.vocab_size, "logit_bias")
    check_token_ids(fields.allowed_token_ids or (), info.vocab_size, "allowed_token_ids")
    if fields.allowed_token_ids == []:
        raise InvalidRequest(
            "allowed_token_ids is empty, which allows no token; leave it out to allow all",
            param="allowed_token_ids",
        )


def _check_lists(fields: SamplingFields, num_choices: int) -> None:
    """Check how many tokens are listed for the sampling: every choice sends its lists to the engine."""
    lists = {name: getattr(fields, name) for name in ("logit_bias", "allowed_token_ids", "stop_token_ids")}
    num_listed = sum(len(listed or ()) for listed in lists.values())
    if num_listed * num_choices > MAX_LISTED_TOKENS:
        longest = max(lists, key=lambda name: len(lists[name] or ()))
        raise InvalidRequest(
            f"{longest} and the like list {num_listed} tokens for each of {num_choices} choices; together at "
            f"most {MAX_LISTED_TOKENS} are taken. List fewer, or ask for fewer choices",
            param=longest,
        )


def check_token_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    """Check that token ids are in the vocabulary."""
    low, high = min(token_ids, default=0), max(token_ids, default=0)
    if low < 0 or high >= vocab_size:
        raise InvalidRequest(
            f"{param} holds the token id {low if low < 0 else high}; this model's vocabulary is 0 to "
            f"{vocab_size - 1}",
            param=param,
        )


def sampling_params(
    fields: SamplingFields,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    max_tokens: int,
    num_logprobs: int | None,
) -> SamplingParams:
    """Return how the first choice of a request is sampled; `for_choice` gives the others.

    Raises
    ------
    InvalidRequest : values contradict each other, or leave no token to sample.
    """
    seed = secrets.randbits(63) if fields.seed is None else fields.seed & _SEED_MASK
    stops = dict.fromkeys(fields.stop_token_ids or ())
    if not fields.ignore_eos:
        stops |= dict.fromkeys(tokenizer.eos_token_ids)
    sampling = SamplingParams(
        temperature=_default(fields.temperature, 1.0),
        top_k=max(_default(fields.top_k, 0), 0),
        top_p=_default(fields.top_p, 1.0),
        min_p=_default(fields.min_p, 0.0),
        presence_penalty=_default(fields.presence_penalty, 0.0),
        frequency_penalty=_default(fields.frequency_penalty, 0.0),
        repetition_penalty=_default(fields.repetition_penalty, 1.0),
        logit_bias=tuple((fields.logit_bias or {}).items()),
        allowed_token_ids=tuple(dict.fromkeys(fields.allowed_token_ids or ())),
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=_default(fields.min_tokens, 0),
        stop_token_ids=tuple(stops),
        num_logprobs=num_logprobs,
    )
    sampling.check_vocabulary(vocab_size)
    return sampling


def seed_of_choice(seed: int, choice: int) -> int:
    """Return the seed of one of several choices of a prompt: choice i of seed s is choice 0 of s + i."""
    return (seed + choice) & _SEED_MASK


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value
