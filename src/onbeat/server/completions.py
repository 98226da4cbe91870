"""POST /v1/completions: its body, its answers, and the way from one to the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Annotated, Any

from msgspec import UNSET, Raw, Struct, UnsetType
from pydantic import Field, PlainValidator, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from onbeat.core.errors import InvalidRequest, counted, quoted
from onbeat.core.protocols import EngineInfo
from onbeat.core.request import TokenLogprobs
from onbeat.server.answer import AnswerResponse, cancelled_on_disconnect
from onbeat.server.answer_report import SLOReport, Usage
from onbeat.server.choices import Choice, ChoiceDelta, ShownToken
from onbeat.server.engine_requests import engine_requests
from onbeat.server.errors import ErrorBody, ErrorReply, unsupported
from onbeat.server.fields import WHOLE, Flag
from onbeat.server.generation_request import GenerationRequest, check_num_logprobs, read_request
from onbeat.server.logprobs import (
    CompletionLogprobs,
    Echo,
    LogprobWriter,
    PromptLogprobs,
    joined,
    text_logprobs,
    token_offsets,
)
from onbeat.server.middleware import context_of
from onbeat.server.openapi import Routes
from onbeat.server.pen import DONE, AnswerHead, Extras, Head, WholeChoice
from onbeat.server.pieces import Piece, encode, json_inside, list_of, written
from onbeat.server.prompts import TOKEN_ID_SCHEMA, PromptInput
from onbeat.server.server_config import ServerConfig
from onbeat.server.services import Services
from onbeat.server.structured import grammar_of

TOKEN_IDS_SCHEMA = {"type": "array", "items": TOKEN_ID_SCHEMA, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        TOKEN_IDS_SCHEMA,
        {"type": "array", "items": TOKEN_IDS_SCHEMA, "minItems": 1},
    ]
}


def checked_prompts(value: Any, field: str = "prompt") -> list[PromptInput]:
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
        raise ValueError(f"{field} is empty; send text or token ids")
    raise ValueError(
        f"{field} is {quoted(value)}; it must be a string, an array of strings, token ids, or an array of "
        "token id arrays"
    )


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class Completion(Head, kw_only=True):
    """A text completion, whole or an event of its stream."""

    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    slo: SLOReport | UnsetType = UNSET


class CompletionRequest(GenerationRequest):
    """OpenAI's text completion, with vLLM's extra fields."""

    default_max_tokens = 16
    """OpenAI's."""

    prompt: Annotated[list[PromptInput], PlainValidator(checked_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    echo: Flag | None = None
    """Put the prompt before the answer."""
    max_tokens: Annotated[int, Field(ge=0), WHOLE] | None = None
    """0 asks for the prompt alone, with `echo`."""
    logprobs: Annotated[int, Field(ge=-1), WHOLE] | None = None
    best_of: Annotated[int, WHOLE] | None = None
    """Ranks nothing where it equals `n`, and is refused otherwise."""

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        known = [number for number in asked if number is not None]
        return -1 if -1 in known else max(known, default=None)

    @property
    def continues_prompt(self) -> bool:
        return True

    @property
    def num_prompts(self) -> int:
        return len(self.prompt)

    def check(self, config: ServerConfig, info: EngineInfo) -> None:
        super().check(config, info)
        if self.best_of not in {None, 1, self.n}:
            raise unsupported("best_of is not supported here; leave it out", "best_of")
        num_choices = self.num_prompts * self.num_choices
        if num_choices > config.max_choices:
            raise InvalidRequest(
                f"{counted(self.num_prompts, 'prompt')} with n = {self.num_choices} make {num_choices} "
                f"choices; this server allows at most {config.max_choices} in one request",
                param="prompt",
            )
        check_num_logprobs(self.logprobs, "logprobs", config, info)
        if self.max_tokens == 0 and (not self.echo or self.logprob_token_ids):
            raise InvalidRequest(
                "max_tokens is 0, which asks for no answer; ask for at least 1, or send echo, without "
                "logprob_token_ids, to have the prompt alone",
                param="max_tokens",
            )


def completion_routes(services: Services) -> Routes:
    """Return the route of text completions."""
    router = Routes()

    @router.post("/v1/completions", **router.generating(CompletionRequest, Completion, Completion))
    async def completions(request: Request) -> Response:
        """Go on writing a text."""
        context = context_of(request.scope)
        body, head = await read_request(request, CompletionRequest, services, "cmpl")
        body.check(services.config, services.info)
        async with cancelled_on_disconnect(request.receive):
            await services.grammars.take(grammar_of(body), context)
        requests = await engine_requests(body, body.prompt, request, services)
        prompts = [each.prompt_token_ids for each in requests[:: body.num_choices]]
        echoes = [Echo("")] * len(prompts)
        if body.echo:
            echo = partial(_echo, body, services)
            async with cancelled_on_disconnect(request.receive):
                echoes = await services.encoder.off_loop(
                    context.caller, sum(map(len, prompts)), lambda: list(map(echo, body.prompt, prompts))
                )
        writer = services.logprobs[bool(body.return_tokens_as_token_ids)]
        pen = CompletionPen(head, body, writer, echoes)
        text_options = replace(body.text_options, text_starts=tuple(len(echo.text) for echo in echoes))
        return AnswerResponse(body, requests, text_options, pen, services)

    return router


def _echo(body: CompletionRequest, services: Services, prompt: PromptInput, token_ids: Sequence[int]) -> Echo:
    """Return the prompt that the model sees: what truncation left of it."""
    tokenizer, most = services.tokenizer, body.prompt_options(services.info.limits.max_model_len).truncate_to
    may_be_cut = most is not None and len(token_ids) >= most
    if isinstance(prompt, str) and not may_be_cut:
        text = prompt
    else:  # of token ids, special ones too: the caller wrote them
        text = tokenizer.decode(token_ids, skip_special_tokens=isinstance(prompt, str))
    has_offsets = body.logprobs is not None
    return Echo(text, token_ids, token_offsets(token_ids, text, tokenizer) if has_offsets else ())


class CompletionPen:
    """Writes text completions and their chunks.

    Parameters
    ----------
    head : what all chunks share.
    body : says what the caller wants beside the text.
    writer : of log-probabilities.
    echoes : for each prompt what goes before its answers, empty unless `echo`.
    """

    end_mark = DONE

    def __init__(
        self, head: AnswerHead, body: CompletionRequest, writer: LogprobWriter, echoes: Sequence[Echo]
    ) -> None:
        self._has_logprobs = body.logprobs is not None
        self._has_token_ids = bool(body.return_token_ids)
        self._has_usage = body.includes_usage
        self._writer = writer
        self._asks_prompt_logprobs = body.prompt_logprobs is not None
        self._echoes = echoes if body.echo else None
        self._answer = Completion(*head.fields("text_completion"), choices=[])
        self._started: set[int] = set()
        self._prompt_json: dict[int, Any] = {}

    def columns(self, tokens: Sequence[ShownToken]) -> Sequence[bytes]:
        if not self._has_logprobs:
            return ()
        known = [token.known_logprobs for token in tokens]
        return self._writer.text_columns(known, [token.text_offset for token in tokens])

    def events(self, delta: ChoiceDelta, extras: Extras) -> Iterator[Struct]:
        choice, columns = delta.choice, self.columns(delta.tokens)
        told = CompletionChoice(choice.index, delta.text)
        if self._has_token_ids:
            told.token_ids = delta.token_ids
        if choice.index not in self._started:
            self._started.add(choice.index)
            if self._echoes is not None:
                told.text = self._echoes[choice.prompt_index].text + delta.text
                columns = joined(*self._echo_columns(choice.prompt_index, choice.prompt_logprobs), columns)
            if self._has_token_ids:
                told.prompt_token_ids = self._prompt_token_ids(choice)
        told.logprobs = text_logprobs(columns)
        if delta.finish_reason is not None:
            told.finish_reason, told.stop_reason = delta.finish_reason, choice.stop_reason
        yield self._with(extras, [told])

    def end(self, extras: Extras) -> Iterator[Struct]:
        if self._has_usage:
            yield self._with(extras, [])

    def failed(self, reply: ErrorReply) -> Iterator[Struct]:
        yield ErrorBody(reply.error)

    def whole(self, choices: Sequence[WholeChoice], extras: Extras) -> Completion:
        # the first choice of a prompt has what is known of it
        firsts = (each.choice for each in choices if each.choice.prompt_logprobs is not None)
        scores = {choice.prompt_index: choice.prompt_logprobs for choice in firsts}
        wholes = (self._whole(each, scores.get(each.choice.prompt_index)) for each in choices)
        return self._with(extras, list_of(chain.from_iterable(wholes)))

    def _with(self, extras: Extras, choices: list[CompletionChoice]) -> Completion:
        answer = self._answer
        answer.choices, answer.usage, answer.slo = choices, extras.usage, extras.slo
        return answer

    def _whole(
        self, finished: WholeChoice, scores: list[TokenLogprobs] | None
    ) -> Iterator[CompletionChoice | None]:
        """Yield a choice, and None while its echo is written."""
        choice, has_ids, before = finished.choice, self._has_token_ids, list[Sequence[Piece]]()
        for part in self._echo_columns(choice.prompt_index, scores):
            before.append(part)
            yield None
        echo = "" if self._echoes is None else self._echoes[choice.prompt_index].text
        yield CompletionChoice(
            choice.index,
            written(b'"', json_inside(echo), finished.text, b'"'),
            text_logprobs(joined(*before, finished.columns) if before else finished.columns),
            choice.token_ids if has_ids else None,
            self._prompt_token_ids(choice) if has_ids else None,
            self._writer.of_prompt(scores if self._asks_prompt_logprobs else None),
            finished.finish_reason,
            choice.stop_reason,
        )

    def _echo_columns(
        self, prompt_index: int, scores: list[TokenLogprobs] | None
    ) -> Iterator[Sequence[bytes]]:
        """Yield what goes before the columns of an answer, in parts."""
        if self._echoes is not None and self._has_logprobs:
            assert scores is not None, "they were asked for, and came with the first token"
            yield from self._writer.echo_columns(self._echoes[prompt_index], scores)

    def _prompt_token_ids(self, choice: Choice) -> Any:
        """Return the tokens of a choice's prompt, which it shares with others."""
        known = self._prompt_json.get(choice.prompt_index)
        if known is None:
            known = Raw(encode(choice.request.prompt_token_ids))
            self._prompt_json[choice.prompt_index] = known
        return known
