"""What chat and text completions have in common: fields, checks, and the engine's requests made of them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import ConfigDict, Field, PlainValidator, WithJsonSchema, field_validator
from starlette.requests import Request

from onbeat.core.errors import InvalidRequest, counted, first_of, quoted
from onbeat.core.protocols import EngineInfo
from onbeat.server import server_config
from onbeat.server.body import read_body
from onbeat.server.choices import TextOptions
from onbeat.server.errors import ApiError
from onbeat.server.fields import NUMBER, WHOLE, Closed, Flag
from onbeat.server.middleware import context_of
from onbeat.server.objectives import ObjectiveFields
from onbeat.server.pen import AnswerHead, new_head
from onbeat.server.prompts import EncodeOptions, EncodingFields, TokenId, check_token_ids
from onbeat.server.services import Services
from onbeat.server.structured import StructureFields

_INT64 = 2**63

StopString = Annotated[str, Field(min_length=1, max_length=1000)]
BadWord = Annotated[str, Field(min_length=1, max_length=100, pattern=r"\S")]
TokenIds = Annotated[list[TokenId], Field(max_length=server_config.MAX_LISTED_TOKENS, fail_fast=True)]

_BIAS = {"type": "number", "minimum": -100, "maximum": 100}
_BIAS_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]{1,19}$"},
                "additionalProperties": _BIAS,
            },
            {"type": "null"},
        ],
        "default": None,
    }
)


def _checked_bias(value: Any) -> dict[int, float] | None:
    """Return biases by token id. Written out because pydantic would report every mistake of 100,000."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"logit_bias is {quoted(value)}; it should be an object")  # noqa: TRY004 - what pydantic takes
    if len(value) > server_config.MAX_BIASES:
        raise ValueError(
            f"logit_bias has {len(value)} entries; at most {server_config.MAX_BIASES} are taken. Send fewer"
        )
    if keys := [key for key in value if not (key.isascii() and key.isdecimal() and len(key) < 20)]:
        raise ValueError(
            f"logit_bias has the key{'s' * (len(keys) > 1)} {first_of(keys)}; keys are token ids"
        )
    if off := {
        key: bias for key, bias in value.items() if type(bias) not in (int, float) or not -100 <= bias <= 100
    }:
        raise ValueError(
            f"logit_bias has {first_of(list(off.values()))} for {first_of(list(off))}; it takes numbers from "
            "-100 to 100"
        )
    return {int(key): float(bias) for key, bias in value.items()}


class StreamOptions(Closed):
    """What a stream says beside its text."""

    include_usage: Flag | None = None
    """One more event at the end, with the usage and no choices."""
    continuous_usage_stats: Flag | None = None
    """Usage so far in every event (vLLM's)."""
    include_obfuscation: Flag | None = None
    """OpenAI's padding against traffic analysis; accepted, never added."""


class EngineFields(ObjectiveFields, EncodingFields):
    """The fields of every body that becomes requests of the engine. Null means the default everywhere."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    """One of /v1/models; the served model if absent."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), WHOLE] | None = None
    """Lower is earlier; needs the priority scheduling policy unless 0."""
    cache_salt: str | None = Field(None, min_length=1, max_length=1000)

    def check(self, config: server_config.ServerConfig, info: EngineInfo) -> None:  # noqa: ARG002 -- others need the configuration
        """Check what no single field's type can say.

        Raises
        ------
        InvalidRequest : values contradict each other, exceed this server's caps, or name unknown tokens.
        ApiError : the model cannot do what is asked.
        """
        if self.priority and not info.priority_scheduling:
            raise InvalidRequest(
                f"priority is {self.priority}, which needs the priority scheduling policy; serve with "
                "--scheduling-policy priority or leave it out",
                param="priority",
            )


_Body = TypeVar("_Body", bound=EngineFields)


async def read_request(
    request: Request, kind: type[_Body], services: Services, prefix: str, *, joint: str = "-"
) -> tuple[_Body, AnswerHead]:
    """Return the checked body of a request, and the head of its answer.

    Parameters
    ----------
    kind : of the body.
    prefix, joint : of the answer's id.

    Raises
    ------
    OnbeatError : the server takes no more, or the body is wrong (`body.read_body`), or names another model.
    """
    services.lifecycle.check_open()
    body = await read_body(request, kind)
    if services.config.force_include_usage and isinstance(body, GenerationRequest) and body.stream:
        body.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)
    head = new_head(prefix, services.check_model(body.model), joint=joint)
    context_of(request.scope).completion_id = head.completion_id
    return body, head


class GenerationRequest(EngineFields, StructureFields):
    """The body of either completion endpoint."""

    prompt_field: ClassVar[str] = "prompt"
    """Which holds the prompt: errors name it."""
    default_max_tokens: ClassVar[int | None] = None
    """None is as many as fit."""
    default_add_special_tokens: ClassVar[bool] = True

    n: Annotated[int, Field(ge=1), WHOLE] | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False), NUMBER] | None = None
    top_p: Annotated[float, Field(gt=0, le=1), NUMBER] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31), WHOLE] | None = None
    """-1 and 0 keep all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1), NUMBER] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2), NUMBER] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), NUMBER] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100), NUMBER] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64), WHOLE] | None = None
    stop: (
        StopString
        | Annotated[list[StopString], Field(max_length=server_config.MAX_STOP_STRINGS, fail_fast=True)]
        | None
    ) = None
    bad_words: (
        Annotated[list[BadWord], Field(max_length=server_config.MAX_BAD_WORDS, fail_fast=True)] | None
    ) = None
    """Words that the answer must not contain, with and without a space before them."""
    stop_token_ids: TokenIds | None = None
    ignore_eos: Flag | None = None
    min_tokens: Annotated[int, Field(ge=0), WHOLE] | None = None
    logit_bias: Annotated[dict[int, float] | None, PlainValidator(_checked_bias), _BIAS_SCHEMA] = None
    """Token id (in JSON a string) to the value added to its logit."""
    allowed_token_ids: Annotated[TokenIds, Field(json_schema_extra={"minItems": 1})] | None = None
    prompt_logprobs: Annotated[int, Field(ge=-1), WHOLE] | None = None
    """Report each prompt token's log-probability with this many alternatives; -1 takes all tokens."""
    logprob_token_ids: Annotated[list[TokenId], Field(max_length=128, fail_fast=True)] | None = None
    """Report these tokens instead of the likeliest; needs `logprobs`."""
    return_tokens_as_token_ids: Flag | None = None
    """Name tokens `token_id:5` where log-probabilities are reported."""
    skip_special_tokens: Flag | None = None
    include_stop_str_in_output: Flag | None = None
    return_token_ids: Flag | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _has_no_empty_stop(cls, stop: object) -> object:
        """Say it once: the union's members would each complain in their own words."""
        if stop == "" or (isinstance(stop, list) and "" in stop):
            raise ValueError("stop holds an empty string, which is not allowed; leave it out")
        return stop

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def bounds_answer(self) -> bool:
        """Whether it says how long an answer may be, or that it ends nowhere else."""
        return (self.asked_max_tokens or self.default_max_tokens) is not None or bool(self.ignore_eos)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each token whose log-probabilities are wanted; None where not even its own is."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same of the prompt's tokens."""
        return self.prompt_logprobs

    @property
    def continues_prompt(self) -> bool:
        """Whether the answer goes on where the prompt ends, and is no text of its own."""
        return False

    @property
    def text_options(self) -> TextOptions:
        """How the caller wants its text."""
        return TextOptions(
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            min_tokens=self.min_tokens or 0,
            continues_prompt=self.continues_prompt,
            lists_end=bool(self.return_token_ids),
            drops_answer=self.asked_max_tokens == 0,
        )

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

    @property
    def num_prompts(self) -> int:
        return 1

    def prompt_options(self, max_model_len: int) -> EncodeOptions:
        """Return how its prompts become tokens; raise as `encode_options`."""
        asked, default = self.asked_max_tokens, self.default_max_tokens
        return self.encode_options(
            max_model_len,
            param=self.prompt_field,
            special=self.default_add_special_tokens,
            max_tokens=default if asked is None else asked,
        )

    def check(self, config: server_config.ServerConfig, info: EngineInfo) -> None:
        if not info.generates:
            raise ApiError(
                400,
                "this model was saved without its output head, so it generates no text; send texts to "
                "/v1/embeddings",
                code="no_generation",
            )
        super().check(config, info)
        if self.num_choices > config.max_n:
            raise InvalidRequest(f"n is {self.n}; this server allows at most {config.max_n}", param="n")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is given without stream; set stream to true or leave it out",
                param="stream_options",
            )
        if self.logprob_token_ids and self.num_logprobs is None:
            raise InvalidRequest(
                "logprob_token_ids is given without logprobs; send logprobs too, or leave it out",
                param="logprob_token_ids",
            )
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs is not available with stream; leave one out", param="prompt_logprobs"
            )
        check_num_logprobs(self.prompt_logprobs, "prompt_logprobs", config, info)
        self._check_lists(info.vocab_size)

    def _check_lists(self, vocab_size: int) -> None:
        """Check the tokens that are listed for the sampling: every choice sends its lists to the engine."""
        lists = {name: getattr(self, name) for name in ("logit_bias", "allowed_token_ids", "stop_token_ids")}
        num_listed = sum(len(listed or ()) for listed in lists.values())
        num_choices = self.num_prompts * self.num_choices
        if num_listed * num_choices > server_config.MAX_LISTED_TOKENS:
            longest = max(lists, key=lambda name: len(lists[name] or ()))
            raise InvalidRequest(
                f"{longest} and the like list {num_listed} tokens for {counted(num_choices, 'choice')}; of "
                f"all choices together at most {server_config.MAX_LISTED_TOKENS} are taken. List fewer, or "
                "ask for fewer choices",
                param=longest,
            )
        for name, listed in (*lists.items(), ("logprob_token_ids", self.logprob_token_ids)):
            check_token_ids(listed or (), vocab_size, name)
        if self.allowed_token_ids == []:
            raise InvalidRequest(
                "allowed_token_ids is empty, which allows no token; leave it out to allow all",
                param="allowed_token_ids",
            )


def check_num_logprobs(
    asked: int | None, param: str, config: server_config.ServerConfig, info: EngineInfo
) -> None:
    """Check a number of alternatives against the server's cap; -1 asks for the whole vocabulary.

    Raises
    ------
    InvalidRequest : it is above.
    """
    number = info.vocab_size if asked == -1 else asked or 0
    if number > config.max_logprobs >= 0:
        raise InvalidRequest(
            f"{param} is {asked}{', all tokens of the vocabulary' * (asked == -1)}; this server allows at "
            f"most {config.max_logprobs}",
            param=param,
        )
