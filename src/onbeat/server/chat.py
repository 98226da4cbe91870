"""POST /v1/chat/completions: its body, its answers, and the way from one to the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from onbeat.core.errors import InvalidRequest
from onbeat.core.protocols import EngineInfo
from onbeat.core.request import Request as EngineRequest
from onbeat.server.answer import AnswerResponse, cancelled_on_disconnect
from onbeat.server.answer_report import SLOReport, Usage
from onbeat.server.chat_prompt import continued_text, render_chat
from onbeat.server.choices import Choice, ChoiceDelta, ShownToken, TextOptions
from onbeat.server.engine_requests import encoded, engine_requests
from onbeat.server.errors import ErrorBody, ErrorReply
from onbeat.server.fields import WHOLE, Flag
from onbeat.server.generation_request import GenerationRequest, check_num_logprobs, read_request
from onbeat.server.logprobs import ChatLogprobs, LogprobWriter, PromptLogprobs, chat_logprobs
from onbeat.server.middleware import context_of
from onbeat.server.openapi import Routes
from onbeat.server.pen import DONE, AnswerHead, Extras, Head, Part, WholeChoice
from onbeat.server.pieces import list_of, written
from onbeat.server.reply import ReplyPlan, plan_reply
from onbeat.server.reply_fields import ChatFields, ChatMessages, ToolUse
from onbeat.server.server_config import ServerConfig
from onbeat.server.services import Services
from onbeat.server.structured import grammar_of
from onbeat.text.reply.calls import CallStart, CallText, ContentText, ReasoningText


class AnsweredFunction(Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: Annotated[str, Meta(description="JSON as the model wrote it; cut off where the answer was")]


class AnsweredCall(Struct, kw_only=True):
    index: Annotated[int, Meta(description="In streams: which call grows")] | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: AnsweredFunction


class Delta(Struct):
    """What a chunk adds to a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(Head, kw_only=True):
    """An event of a stream."""

    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    slo: SLOReport | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class AnswerMessage(Struct):
    role: str
    # no null `refusal`: clients send the message back, and some make a field of their own out of it
    content: Annotated[str | None, Meta(description="Null beside calls without text")]
    reasoning: Annotated[str, Meta(description="What the model thought before")] | UnsetType = UNSET
    reasoning_content: Annotated[str, Meta(description="The same, by its older name")] | UnsetType = UNSET
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    token_ids: list[int] | UnsetType = UNSET
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None


class ChatCompletion(Head, kw_only=True):
    choices: list[ChatChoice]
    usage: Usage | UnsetType | None = UNSET
    slo: SLOReport | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | None = None


class ChatCompletionRequest(ChatFields, GenerationRequest):
    """OpenAI's chat completion, with vLLM's extra fields."""

    prompt_field = "messages"
    default_add_special_tokens = False
    """The template writes them itself."""

    messages: ChatMessages
    max_completion_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    """Goes before the deprecated `max_tokens`."""
    logprobs: Flag | None = None
    top_logprobs: Annotated[int, Field(ge=-1), WHOLE] | None = None
    include_reasoning: Flag | None = None
    """False leaves reasoning out of the answer, not out of its tokens."""

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def continues_prompt(self) -> bool:
        return bool(self.continue_final_message)

    def check(self, config: ServerConfig, info: EngineInfo) -> None:
        super().check(config, info)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(
                "top_logprobs is given without logprobs; set logprobs to true or leave it out",
                param="top_logprobs",
            )
        check_num_logprobs(self.top_logprobs, "top_logprobs", config, info)


def chat_routes(services: Services) -> Routes:
    """Return the route of chat completions."""
    router = Routes()

    @router.post(
        "/v1/chat/completions", **router.generating(ChatCompletionRequest, ChatCompletion, ChatChunk)
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a chat."""
        body, head = await read_request(request, ChatCompletionRequest, services, "chatcmpl")
        requests, options = await chat_requests(body, request, services)
        writer = services.logprobs[bool(body.return_tokens_as_token_ids)]
        return AnswerResponse(body, requests, options, ChatPen(head, body, writer), services)

    return router


async def chat_requests(
    body: ChatCompletionRequest, request: Request, services: Services
) -> tuple[list[EngineRequest], TextOptions]:
    """Return the engine's requests for a chat, whichever API it came by, and how their tokens become text.

    Raises
    ------
    OnbeatError : the chat is refused.
    """
    body.check(services.config, services.info)
    asked = ReplyPlan(body.text_options, grammar_of(body))
    text = await render_chat(body, request, services)
    hides, continued = body.include_reasoning is False, continued_text(body)
    plan = plan_reply(services.reply_style, asked, body.tool_use, text, continued, drops_reasoning=hides)
    async with cancelled_on_disconnect(request.receive):
        await services.grammars.take(plan.constraint, context_of(request.scope))
    return await engine_requests(body, [text], request, services), plan.options


async def chat_prompt(body: ChatCompletionRequest, request: Request, services: Services) -> list[int]:
    """Return the tokens that a chat's template makes of it.

    Raises
    ------
    OnbeatError : the chat is refused, or the template does not take it.
    ClientGone : the caller has left.
    """
    body.check(services.config, services.info)
    (prompt,) = await encoded(body, [await render_chat(body, request, services)], request, services)
    return prompt


class ChatPen:
    """Writes chat completions and their chunks.

    Parameters
    ----------
    head : what all chunks share.
    body : says what the caller wants beside the text.
    writer : of log-probabilities.
    """

    end_mark = DONE

    def __init__(self, head: AnswerHead, body: ChatCompletionRequest, writer: LogprobWriter) -> None:
        self._head = head
        self._has_logprobs = bool(body.logprobs)
        self._has_token_ids = bool(body.return_token_ids)
        self._has_usage = body.includes_usage
        self._writer = writer
        self._chunk = ChatChunk(*head.fields("chat.completion.chunk"), choices=[])
        self._tool_use = body.tool_use
        self._started: set[int] = set()

    def columns(self, tokens: Sequence[ShownToken]) -> Sequence[bytes]:
        return self._writer.chat_columns(tokens) if self._has_logprobs else ()

    def events(self, delta: ChoiceDelta, extras: Extras) -> Iterator[Struct]:
        choice, chunk = delta.choice, self._chunk
        chunk.usage, chunk.slo = extras.usage, extras.slo
        if choice.index not in self._started:
            self._started.add(choice.index)
            yield self._start(choice)
            if not (delta.text or delta.events) and delta.finish_reason is None:
                return
        told = ChunkChoice(
            choice.index, _delta(delta), chat_logprobs(self.columns(delta.tokens) if delta.tokens else ())
        )
        if self._has_token_ids:
            told.token_ids = delta.token_ids
        if delta.finish_reason is not None:
            told.finish_reason = _finish_reason(delta, self._tool_use)
            told.stop_reason = choice.stop_reason
        chunk.choices = [told]
        yield chunk

    def _start(self, choice: Choice) -> ChatChunk:
        """Return the chunk that names the role of a choice."""
        told = ChunkChoice(choice.index, Delta(role="assistant", content=""))
        start = replace(self._chunk, choices=[told], slo=UNSET)
        if isinstance(start.usage, Usage):
            num_prompt = start.usage.prompt_tokens
            start.usage = replace(start.usage, completion_tokens=0, total_tokens=num_prompt)
        if self._has_token_ids:
            start.prompt_token_ids = choice.request.prompt_token_ids
        return start

    def end(self, extras: Extras) -> Iterator[Struct]:
        if self._has_usage:
            chunk = self._chunk
            chunk.choices, chunk.usage, chunk.slo = [], extras.usage, extras.slo
            yield chunk

    def failed(self, reply: ErrorReply) -> Iterator[Struct]:
        yield ErrorBody(reply.error)

    def whole(self, choices: Sequence[WholeChoice], extras: Extras) -> ChatCompletion:
        first = choices[0].choice
        answer = ChatCompletion(
            *self._head.fields("chat.completion"), choices=list_of(map(self._whole, choices))
        )
        answer.usage, answer.slo = extras.usage, extras.slo
        answer.prompt_logprobs = self._writer.of_prompt(first.prompt_logprobs)
        if self._has_token_ids:
            answer.prompt_token_ids = first.request.prompt_token_ids
        return answer

    def _whole(self, finished: WholeChoice) -> ChatChoice:
        choice = finished.choice
        return ChatChoice(
            index=choice.index,
            message=_message(finished.parts),
            logprobs=chat_logprobs(finished.columns),
            token_ids=choice.token_ids if self._has_token_ids else UNSET,
            finish_reason=_finish_reason(finished, self._tool_use),
            stop_reason=choice.stop_reason,
        )


def _finish_reason(finished: ChoiceDelta | WholeChoice, use: ToolUse | None) -> Any:
    """Return why a choice ended, in OpenAI's words, which tell a call that the model chose."""
    reason = finished.finish_reason
    has_chosen = use is not None and use.named is None and finished.choice.num_calls
    return "tool_calls" if reason == "stop" and has_chosen else reason


def _delta(delta: ChoiceDelta) -> Delta:
    """Return what a chunk adds."""
    if delta.events is None:
        return Delta(content=delta.text or UNSET)
    added, calls = Delta(), dict[int, AnsweredCall]()
    for event in delta.events:
        match event:
            case ReasoningText(text=text):
                added.reasoning = added.reasoning_content = (added.reasoning or "") + text
            case ContentText(text=text):
                added.content = (added.content or "") + text
            case CallStart(index=index, call_id=call_id, name=name):
                calls[index] = _call(call_id, name, "", index)
            case CallText(index=index, text=text):
                call = calls.setdefault(
                    index, AnsweredCall(index=index, function=AnsweredFunction(arguments=""))
                )
                call.function.arguments += text
    if calls:
        added.tool_calls = list(calls.values())
    return added


def _message(parts: Sequence[Part]) -> AnswerMessage:
    """Return the message of a whole answer."""
    calls = [part for part in parts if part.kind == "call"]
    content = [part.text for part in parts if part.kind == "content"]
    reasoning = [part.text for part in parts if part.kind == "reasoning"]
    message = AnswerMessage("assistant", None)
    if content or not calls:
        message.content = written(b'"', *content, b'"')
    if reasoning:
        message.reasoning = message.reasoning_content = written(b'"', *reasoning, b'"')
    if calls:
        begun = [(part.known_call, part.json) for part in calls]
        message.tool_calls = [_call(call.call_id, call.name, arguments) for call, arguments in begun]
    return message


def _call(call_id: str, name: str, arguments: str, index: int | UnsetType = UNSET) -> AnsweredCall:
    function = AnsweredFunction(name=name, arguments=arguments)
    return AnsweredCall(index=index, id=call_id, type="function", function=function)
