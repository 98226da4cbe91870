"""An answer of vLLM's on its way to the client: refusals become 429, 504 or 400, its end has the verdict.

The head of an answer waits until it has begun, that is, until there is a token or an end: what comes before
that may still turn out to be a refusal, which needs a status of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from onbeat.server.errors import IGNORED_FIELDS_HEADER, error_response, predicted_ttft_header
from onbeat.vllm.telemetry import Refusal, refusal_in
from onbeat.vllm.verdicts import OpenRequest

logger = logging.getLogger("onbeat.vllm")

DONE = b"[DONE]"
TOLD_SECONDS = 0.1
"""How long an answer that looks refused, and does not say why, waits for the word of the scheduler."""
MOST_HELD_BYTES = 2**20
"""Of a stream that has not begun; one that brings more is let through."""
_KEPT = (b"access-control-", b"vary", b"x-request-id")
"""Of the head of a refused answer: what lets browsers read it, and whoever searches logs find it."""
_ENDS = ("completed", "incomplete", "cancelled", "failed")
"""Of the Responses API: how a response ended; others go on."""
_BROKEN_OFF = ("abort", "error", "cancelled", "failed", None)
"""Ends of a choice that is not whole, in the words of any API."""


@dataclass(slots=True)
class Told:
    """What one event, or a whole answer, says."""

    delivered: list[int] = field(default_factory=list)
    """Choices that got tokens, by index."""
    finished: dict[int, str] = field(default_factory=dict)
    """Choice -> `stop`, or `abort` where it is not whole."""
    is_error: bool = False
    is_usage: bool = False
    """Whether it stands behind all choices."""

    @property
    def has_begun(self) -> bool:
        """Whether it shows that the answer is no refusal."""
        return bool(self.delivered) and not self.is_error and "abort" not in self.finished.values()

    def finish(self, index: int, reason: str | None) -> None:
        """Note why a choice has ended."""
        self.finished[index] = "abort" if reason in _BROKEN_OFF else "stop"


def read_answer(content: Mapping[str, Any], *, is_event: bool) -> Told:
    """Return what an event of a stream or a whole answer says, of any of the APIs."""
    told, kind = Told(), str(content.get("type"))
    if content.get("error") or kind == "error":
        told.is_error = True
    elif "choices" in content:
        told.is_usage = not content["choices"]
        for choice in content["choices"]:
            index = int(choice.get("index", 0))
            if "role" not in (choice.get("delta") or ()):  # the first event of a chat names the role
                told.delivered.append(index)
            if choice.get("finish_reason") is not None:
                told.finish(index, choice["finish_reason"])
    elif is_event:
        _read_event(told, kind, content)
    elif "status" in content:
        told.delivered = [0] if content.get("output") or content["status"] not in _ENDS else []
        if content["status"] in _ENDS:
            told.finish(0, content["status"])
    else:
        told.delivered = [0]
        told.finish(0, content.get("stop_reason"))
    return told


def _read_event(told: Told, kind: str, content: Mapping[str, Any]) -> None:
    """Take an event of the Responses API, or of Anthropic's."""
    if kind == "message_delta":
        told.finish(0, content["delta"].get("stop_reason"))
    elif kind.endswith("delta"):
        told.delivered.append(0)
    elif kind == "message_stop":
        told.is_usage = True
    elif kind.removeprefix("response.") in _ENDS:
        told.finish(0, content["response"]["status"])


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
        self._scope, self._receive, self._send = scope, receive, send
        self._told_seconds = told_seconds
        self._start: Message | None = None
        self._is_stream = self._has_started = self._has_begun = False
        self.is_refused = False
        self._rest = b""
        """Of a whole answer, or of an event that is not whole."""
        self._out = bytearray()
        """What is for the client; it waits until the answer has begun."""
        self._pending = b""
        """The newest event that may take the verdict; others may follow that take it better."""

    async def send(self, message: Message) -> None:
        """Take a message of vLLM's."""
        if message["type"] == "http.response.start":
            self._start = message
            kind = Headers(raw=message.get("headers", [])).get("content-type", "")
            self._is_stream = kind.startswith("text/event-stream") and message["status"] == 200
            return
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        body, has_more = bytes(message.get("body", b"")), message.get("more_body", False)
        if self.is_refused:
            if has_more and body and DONE not in body:
                raise OSError("the request was refused: nobody reads its other choices")
            return
        take = self._take_stream if self._is_stream else self._take_whole
        if (refusal := await take(body, has_more=has_more)) is not None:
            await self._refuse(refusal)
        elif not has_more or (
            self._is_stream and (self._has_begun or len(self._out) + len(self._rest) > MOST_HELD_BYTES)
        ):
            await self._release(has_more=has_more)

    async def rescue(self) -> bool:
        """Answer a refused request whose answer broke off before it began; say whether it has an answer.

        vLLM's Responses API breaks off so, as it has no event for such an error.
        """
        if not (self.is_refused or self._has_started):
            refusal = await self._request.refusal_told(self._told_seconds)
            if refusal is not None:
                await self._refuse(refusal)
        return self.is_refused

    async def _take_whole(self, body: bytes, *, has_more: bool) -> Refusal | None:
        self._rest += body
        if has_more:
            return None
        self._out += self._rest
        content, told = self._read(self._rest)
        if content is None or told is None:
            return None
        told.is_error |= self._start is not None and self._start["status"] >= 400
        if not told.has_begun and (refusal := await self._refusal(content)) is not None:
            return refusal
        self._count(told)
        if told.finished and not told.is_error and (verdict := self._request.verdict()) is not None:
            self._out = bytearray(orjson.dumps({**content, "slo": verdict}))
        return None

    async def _take_stream(self, body: bytes, *, has_more: bool) -> Refusal | None:
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            if (refusal := await self._take_event(event + b"\n\n")) is not None:
                return refusal
        if not has_more:
            if not self._has_begun and (refusal := await self._refusal(None)) is not None:
                return refusal
            self._out += self._flushed(is_last=True) + self._rest
        return None

    async def _take_event(self, event: bytes) -> Refusal | None:
        """Take an event of a stream; return the refusal that it turns out to be."""
        data = _data_of(event)
        content, told = self._read(data)
        if content is None or told is None:  # a comment, the last word, or what nobody knows
            self._out += (self._flushed(is_last=data == DONE) if data else b"") + event
            self._has_begun |= data not in (b"", DONE)
            return None
        if not (self._has_begun or told.has_begun) and (told.is_error or told.finished):
            if (refusal := await self._refusal(content)) is not None:
                return refusal
            self._has_begun = True
        self._has_begun |= told.has_begun
        self._count(told)
        self._out += self._flushed(is_last=False)
        if told.finished or told.is_usage:
            self._pending = event
        else:
            self._out += event
        return None

    def _read(self, data: bytes) -> tuple[dict[str, Any] | None, Told | None]:
        """Return the object in some data, and what it says; None where vLLM's words are not those we know."""
        try:
            content = orjson.loads(data)
        except orjson.JSONDecodeError:
            return None, None
        try:
            return content, read_answer(content, is_event=self._is_stream)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None, None

    def _count(self, told: Told) -> None:
        """Count what the client gets."""
        now = time.monotonic()
        for index in told.delivered:
            self._request.deliver(index, now)
        for index, reason in told.finished.items():
            self._request.finish(index, reason)

    def _flushed(self, *, is_last: bool) -> bytes:
        """Return the event that waited; if nothing follows, with the verdict."""
        event, self._pending = self._pending, b""
        if event and is_last and (verdict := self._request.verdict()) is not None:
            content = orjson.loads(_data_of(event))
            (content.get("response") or content)["slo"] = verdict
            lines = [line for line in event.splitlines() if line and not line.startswith(b"data:")]
            return b"\n".join([*lines, b"data: " + orjson.dumps(content)]) + b"\n\n"
        return event

    async def _refusal(self, content: Mapping[str, Any] | None) -> Refusal | None:
        """Return why a request was refused whose answer looks so."""
        return refusal_in(content) or await self._request.refusal_told(self._told_seconds)

    async def _refuse(self, refusal: Refusal) -> None:
        self._request.refusal, self.is_refused = refusal, True
        request = self._request.request
        response = error_response(refusal.error(request.objectives), request.path)
        self._name_ignored(response.headers)
        start: Message = self._start or {}
        kept = [each for each in start.get("headers", []) if each[0].lower().startswith(_KEPT)]
        response.raw_headers.extend(kept)
        await response(self._scope, self._receive, self._send)

    async def _release(self, *, has_more: bool) -> None:
        """Send what is for the client; the head before the first of it."""
        out, self._out = bytes(self._out), bytearray()
        start, self._start = self._start, None
        if start is not None:
            self._has_started = True
            headers = MutableHeaders(raw=list(start.get("headers", [])))
            if not has_more and "content-length" in headers:
                headers["content-length"] = str(len(out))
            for name, value in predicted_ttft_header(self._request.predicted_ttft).items():
                headers[name] = value
            self._name_ignored(headers)
            await self._send({**start, "headers": headers.raw})
        if out or not has_more:
            await self._send({"type": "http.response.body", "body": out, "more_body": has_more})

    def _name_ignored(self, headers: MutableHeaders) -> None:
        if self._ignored:
            headers[IGNORED_FIELDS_HEADER] = ", ".join(self._ignored)


def _data_of(event: bytes) -> bytes:
    """Return the data of an event; empty for a comment."""
    return b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
