"""An answer of vLLM's on its way to the client: refusals become 429, 503 or 504, its end has the verdict.

The head of an answer waits until it has begun, that is, until there is a token or an end: what comes before
that may still turn out to be a refusal, which needs a status of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from onbeat.server.errors import IGNORED_FIELDS_HEADER, error_response, predicted_ttft_header
from onbeat.vllm.refusals import Refusal, refusal_in
from onbeat.vllm.requests import MESSAGES, RESPONSES
from onbeat.vllm.verdicts import OpenRequest

DONE = b"[DONE]"


@dataclass(slots=True)
class Told:
    """What one event, or a whole answer, says."""

    deliveries: list[int] = field(default_factory=list)
    """Choices that got tokens, by index."""
    finished: dict[int, str] = field(default_factory=dict)
    """Choice -> its finish reason, in OpenAI's words."""
    refusal: Refusal | None = None
    is_error: bool = False
    has_begun: bool = False
    """Whether the answer has begun, so that it is no refusal any more."""
    takes_verdict: bool = False
    """Whether the verdict may be added to it, if nothing follows that takes it better."""
    is_end: bool = False
    """Whether it ends the answer, so that nothing follows that takes the verdict."""
    usage: Mapping[str, Any] | None = None


NOTHING = Told()


class EventSplitter:
    """Cuts a stream of server-sent events into events, however it is cut into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that are complete now, each with the empty line that ends it."""
        start = max(len(self._rest) - 3, 0)
        self._rest += data
        events: list[bytes] = []
        begin = 0
        while (end := _event_end(self._rest, max(start, begin))) > 0:
            events.append(bytes(self._rest[begin:end]))
            begin = start = end
        del self._rest[:begin]
        return events

    def rest(self) -> bytes:
        """Return what is left behind the last whole event."""
        rest, self._rest = bytes(self._rest), bytearray()
        return rest


def _event_end(data: bytearray, start: int) -> int:
    """Return where an event ends that begins at or before `start`; 0 if none does."""
    plain, with_returns = data.find(b"\n\n", start), data.find(b"\r\n\r\n", start)
    ends = [at + size for at, size in ((plain, 2), (with_returns, 4)) if at >= 0]
    return min(ends, default=0)


def data_of(event: bytes) -> bytes:
    """Return the data of an event; empty for a comment."""
    return b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))


def with_verdict(event: bytes, verdict: Mapping[str, Any], path: str) -> bytes:
    """Return an event with the object `slo` in it."""
    lines = [line for line in event.splitlines() if line and not line.startswith(b"data:")]
    data = orjson.dumps(_put(orjson.loads(data_of(event)), verdict, path))
    return b"\n".join([*lines, b"data: " + data]) + b"\n\n"


def whole_with_verdict(body: Mapping[str, Any], verdict: Mapping[str, Any]) -> bytes:
    """Return a whole answer with the object `slo` in it."""
    return orjson.dumps({**body, "slo": verdict})


def _put(data: dict[str, Any], verdict: Mapping[str, Any], path: str) -> dict[str, Any]:
    if path == RESPONSES and isinstance(data.get("response"), dict):
        data["response"]["slo"] = verdict
    else:
        data["slo"] = verdict
    return data


def read_event(path: str, data: bytes) -> Told:
    """Return what the data of an event says; what is no JSON object is some part of an answer."""
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError:
        return Told(has_begun=True)
    if not isinstance(content, dict):
        return Told(has_begun=True)
    if content.get("error") or content.get("type") == "error":
        return _error(content)
    return _EVENTS.get(path, _openai_event)(content)


def read_whole(path: str, body: Mapping[str, Any]) -> Told:
    """Return what a whole answer says, errors included."""
    if body.get("error") or body.get("type") == "error":
        return _error(body)
    told = Told(usage=_mapping(body, "usage"), takes_verdict=True, has_begun=True)
    if path == RESPONSES:
        told.finished[0] = _RESPONSE_ENDS.get(str(body.get("status")), "")
        if not told.finished[0]:
            told.finished, told.takes_verdict = {}, False  # it goes on in the background
        told.has_begun = bool(body.get("output")) or not told.finished
    elif path == MESSAGES:
        told.finished[0] = _anthropic_end(body.get("stop_reason"))
    else:
        _take_choices(told, body, delta=None)
    return told


def _error(content: Mapping[str, Any]) -> Told:
    error = content.get("error", content)
    message = error.get("message") if isinstance(error, dict) else error
    return Told(is_error=True, refusal=refusal_in(message))


def _openai_event(content: dict[str, Any]) -> Told:
    told = Told(usage=_mapping(content, "usage"), takes_verdict=not content.get("choices"))
    _take_choices(told, content, delta="delta")
    return told


def _take_choices(told: Told, content: Mapping[str, Any], *, delta: str | None) -> None:
    choices = content.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        if not isinstance(choice, dict):
            continue
        index, end = choice.get("index"), choice.get("finish_reason")
        index = index if isinstance(index, int) else 0
        if end == "abort" and (refusal := refusal_in(choice.get("stop_reason"))) is not None:
            told.refusal = refusal
        if end is not None:
            told.finished[index] = str(end)
            told.takes_verdict = told.has_begun = True
        news = choice.get(delta) if delta is not None else None
        # the first event of a chat names the role, before there is any token
        if not isinstance(news, dict) or news.keys() - {"role", "content"} or "role" not in news:
            told.deliveries.append(index)
            told.has_begun = True
        elif news.get("content"):
            told.has_begun = True


def _anthropic_event(content: dict[str, Any]) -> Told:
    match content.get("type"):
        case "content_block_delta":
            return Told(deliveries=[0], has_begun=True)
        case "message_delta":
            delta = _mapping(content, "delta") or {}
            return Told(
                finished={0: _anthropic_end(delta.get("stop_reason"))},
                takes_verdict=True,
                is_end=True,
                has_begun=True,
                usage=_mapping(content, "usage"),
            )
    return NOTHING


def _anthropic_end(reason: object) -> str:
    """Return a stop reason in OpenAI's words; vLLM has none for what was aborted."""
    return "abort" if reason is None else "length" if reason == "max_tokens" else "stop"


_RESPONSE_ENDS = {"completed": "stop", "incomplete": "length", "cancelled": "abort", "failed": "error"}


def _responses_event(content: dict[str, Any]) -> Told:
    kind = str(content.get("type"))
    if kind.endswith(".delta"):
        return Told(deliveries=[0], has_begun=True)
    status = kind.removeprefix("response.")
    if status not in _RESPONSE_ENDS:
        return NOTHING
    response = _mapping(content, "response") or {}
    error = _mapping(response, "error") or {}
    return Told(
        finished={0: _RESPONSE_ENDS.get(str(response.get("status")), _RESPONSE_ENDS[status])},
        refusal=refusal_in(error.get("message")),
        takes_verdict=True,
        is_end=True,
        has_begun=True,
        is_error=status == "failed",
        usage=_mapping(response, "usage"),
    )


def _mapping(content: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    value = content.get(name)
    return value if isinstance(value, dict) else None


_EVENTS: Mapping[str, Callable[[dict[str, Any]], Told]] = {
    MESSAGES: _anthropic_event,
    RESPONSES: _responses_event,
}


logger = logging.getLogger("onbeat.vllm")

_KEPT = (b"access-control-", b"vary", b"x-request-id")
"""Of the head of a refused answer: what lets browsers read it, and whoever searches logs find it."""
TOLD_SECONDS = 0.1
"""How long an answer that looks refused, and does not say why, waits for the word of the scheduler."""
MOST_HELD_BYTES = 2**20
"""Of a stream that has not begun; one that brings more is let through."""


class AnswerRelay:
    """Takes vLLM's messages of one answer (`send`), and sends the client's.

    Parameters
    ----------
    request : what is answered.
    scope, send : the client's.
    ignored : headers of the request without effect.
    told_seconds : see `TOLD_SECONDS`; 0 where the scheduler tells nothing.
    """

    def __init__(
        self,
        request: OpenRequest,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        ignored: list[str],
        told_seconds: float = TOLD_SECONDS,
    ) -> None:
        self._request, self._ignored = request, ignored
        self._path = request.request.path
        self._scope, self._receive, self._send = scope, receive, send
        self._told_seconds = told_seconds
        self._start: Message | None = None
        self.status = 0
        """That the client got; 0 before."""
        self.is_refused = False
        self._take = self._take_whole
        self._body = bytearray()
        self._splitter = EventSplitter()
        self._has_begun = False
        self._out = bytearray()
        """Events for the client; they wait until the answer has begun."""
        self._pending = b""
        """The newest event that may take the verdict; others may follow that take it better."""

    async def send(self, message: Message) -> None:
        """Take a message of vLLM's."""
        if message["type"] == "http.response.start":
            self._start = message
            kind = Headers(raw=message.get("headers", [])).get("content-type", "")
            if kind.startswith("text/event-stream") and message["status"] == 200:
                self._take = self._take_stream
            return
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        try:
            await self._take(bytes(message.get("body", b"")), has_more=message.get("more_body", False))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            # vLLM's answer is worth more than what we say of it
            logger.exception("an answer of %s is not understood, and is passed on as it is", self._path)
            await self._give_up(message)

    async def rescue(self) -> bool:
        """Answer a refused request whose answer broke off before it began; say whether it has an answer.

        vLLM's Responses API breaks off so, as it has no event for such an error.
        """
        if not (self.is_refused or self.status):
            refusal = await self._request.refusal_told(self._told_seconds)
            if refusal is not None:
                await self._refuse(refusal)
        return self.is_refused

    async def _take_whole(self, body: bytes, *, has_more: bool) -> None:
        self._body += body
        if has_more:
            return
        assert self._start is not None, "a body has a head before it"
        content = _json_object(bytes(self._body))
        if content is None:
            await self._release(bytes(self._body), has_more=False)
            return
        told, status = read_whole(self._path, content), self._start["status"]
        told.is_error |= status >= 400
        if (refusal := await self._refusal(told, may_be=not told.has_begun)) is not None:
            await self._refuse(refusal)
            return
        now = time.monotonic()
        for index, reason in told.finished.items():
            self._request.deliver(index, now, max(_num_output(told), 1))
            self._request.finish(index, reason)
        verdict = self._request.verdict() if told.takes_verdict and not told.is_error else None
        out = bytes(self._body) if verdict is None else whole_with_verdict(content, verdict)
        await self._release(out, has_more=False)

    async def _take_stream(self, body: bytes, *, has_more: bool) -> None:
        for event in self._splitter.feed(body):
            if (refusal := await self._take_event(event)) is not None:
                await self._refuse(refusal)
                return
        if not has_more:
            refusal = None if self._has_begun else await self._refusal(Told(), may_be=True)
            if refusal is not None:
                await self._refuse(refusal)
                return
            self._out += self._flushed(is_last=True) + self._splitter.rest()
        if not (self._has_begun or len(self._out) > MOST_HELD_BYTES) and has_more:
            return
        out, self._out = bytes(self._out), bytearray()
        if self._start is not None:
            await self._release(out, has_more=has_more)
        elif out or not has_more:
            await self._send_body(out, has_more=has_more)

    async def _take_event(self, event: bytes) -> Refusal | None:
        """Take an event of a stream; return the refusal that it turns out to be."""
        data = data_of(event)
        if not data or data == DONE:
            self._out += self._flushed(is_last=True) + event if data else event
            return None
        told = read_event(self._path, data)
        if not self._has_begun:
            is_empty_end = bool(told.finished) and not told.deliveries and not self._request.has_delivered
            if (refusal := await self._refusal(told, may_be=is_empty_end)) is not None:
                return refusal
        now = time.monotonic()
        for index in told.deliveries:
            self._request.deliver(index, now)
        for index, reason in told.finished.items():
            self._request.finish(index, reason)
        self._has_begun |= told.has_begun
        self._out += self._flushed(is_last=False)
        if told.takes_verdict:
            self._pending = event
            self._out += self._flushed(is_last=True) if told.is_end else b""
        else:
            self._out += event
        return None

    def _flushed(self, *, is_last: bool) -> bytes:
        """Return the event that waited; if nothing follows, with the verdict."""
        event, self._pending = self._pending, b""
        if event and is_last and (verdict := self._request.verdict()) is not None:
            return with_verdict(event, verdict, self._path)
        return event

    async def _refusal(self, told: Told, *, may_be: bool) -> Refusal | None:
        """Return why a request was refused whose answer has not begun."""
        if told.refusal is not None:
            return told.refusal
        looks_so = may_be or told.is_error or "abort" in told.finished.values()
        return await self._request.refusal_told(self._told_seconds) if looks_so else self._request.refusal

    async def _refuse(self, refusal: Refusal) -> None:
        self._request.refusal = refusal
        start, self._start = self._start or {}, None
        self._take, self.is_refused = self._take_nothing, True
        response = error_response(refusal.error(self._request.request.objectives), self._path)
        self.status = response.status_code
        self._name_ignored(response.headers)
        kept = [each for each in start.get("headers", []) if each[0].lower().startswith(_KEPT)]
        response.raw_headers.extend(kept)
        await response(self._scope, self._receive, self._send)

    async def _take_nothing(self, body: bytes, *, has_more: bool) -> None:
        """Drop what vLLM still says after a refusal; choices that go on are ended, as if nobody read."""
        if has_more and body and DONE not in body:
            raise OSError("the request was refused: nobody reads its other choices")

    async def _release(self, body: bytes, *, has_more: bool) -> None:
        """Send the head, and the first of the body."""
        assert self._start is not None, "a head goes out once"
        start, self._start = self._start, None
        headers = MutableHeaders(raw=list(start.get("headers", [])))
        if not has_more and "content-length" in headers:
            headers["content-length"] = str(len(body))
        for name, value in predicted_ttft_header(self._request.predicted_ttft).items():
            headers[name] = value
        self._name_ignored(headers)
        self.status = start["status"]
        await self._send({**start, "headers": headers.raw})
        await self._send_body(body, has_more=has_more)

    def _name_ignored(self, headers: MutableHeaders) -> None:
        if self._ignored:
            headers[IGNORED_FIELDS_HEADER] = ", ".join(self._ignored)

    async def _send_body(self, body: bytes, *, has_more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": has_more})

    async def _give_up(self, message: Message) -> None:
        """Pass on what is held, and from now on everything as it comes."""
        rest = bytes(self._body) or bytes(self._out) + self._pending + self._splitter.rest()
        self._take, self._body = self._take_raw, bytearray()
        if self._start is not None:
            await self._release(rest, has_more=message.get("more_body", False))

    async def _take_raw(self, body: bytes, *, has_more: bool) -> None:
        await self._send_body(body, has_more=has_more)


def _json_object(body: bytes) -> dict[str, Any] | None:
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return content if isinstance(content, dict) else None


def _num_output(told: Told) -> int:
    """Return the output tokens of each choice of a whole answer, as far as its usage tells."""
    usage = told.usage or {}
    for name in ("completion_tokens", "output_tokens"):
        value = usage.get(name)
        if isinstance(value, int):
            return value // max(len(told.finished), 1)
    return 1
