"""onbeat's objectives in front of vLLM's API: `vllm serve --middleware onbeat.vllm.SLOMiddleware`.

vLLM makes one for its application, and runs it outside of its own check of API keys. Nothing of vLLM is
imported: what is needed of it hangs at the application's state.

An answer of vLLM's on its way to the client: refusals become 429, 504 or 400, its end has the verdict.

The head of an answer waits until it has begun, that is, until there is a token or an end: what comes before
that may still turn out to be a refusal, which needs a status of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onbeat.core.errors import OnbeatError
from onbeat.server.body import receive_body
from onbeat.server.errors import IGNORED_FIELDS_HEADER, ClientGone, error_response, predicted_ttft_header
from onbeat.server.slo_defaults import key_digest
from onbeat.vllm.objectives import ROUTES, KnownCaller, log_as_vllm_does, read_config, read_request
from onbeat.vllm.telemetry import Refusal, Subscriber, refusal_in
from onbeat.vllm.verdicts import ClientRequest, OpenRequests

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
class EventContent:
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


def read_answer(content: Mapping[str, Any], *, is_event: bool) -> EventContent:
    """Return what an event of a stream or a whole answer says, of any of the APIs."""
    told, kind = EventContent(), str(content.get("type"))
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


def _read_event(told: EventContent, kind: str, content: Mapping[str, Any]) -> None:
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
        request: ClientRequest,
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

    def _read(self, data: bytes) -> tuple[dict[str, Any] | None, EventContent | None]:
        """Return the object in some data, and what it says; None where vLLM's words are not those we know."""
        try:
            content = orjson.loads(data)
        except orjson.JSONDecodeError:
            return None, None
        try:
            return content, read_answer(content, is_event=self._is_stream)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None, None

    def _count(self, told: EventContent) -> None:
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


logger = logging.getLogger("onbeat.vllm")

METRICS = "/metrics"
_CORS = {
    "allow_origins": "allowed_origins",
    "allow_credentials": "allow_credentials",
    "allow_methods": "allowed_methods",
    "allow_headers": "allowed_headers",
}
"""Settings of Starlette's CORS -> those of vLLM's server, whose own CORS never sees what we refuse."""


class SLOMiddleware:
    """Reads objectives, refuses with 429, 503 and 504, judges answers, and adds onbeat's metrics to vLLM's.

    Parameters
    ----------
    app : vLLM's application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._shared: _Shared | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            shared = self._shared_of(scope)
            try:
                await self._app(scope, receive, send)
            finally:
                shared.close()
            return
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] == "http" and scope["method"] == "POST" and path in ROUTES:
            await self._shared_of(scope).serve(self._app, path, scope, receive, send)
        elif scope["type"] == "http" and scope["method"] == "GET" and path.rstrip("/") == METRICS:
            self._shared_of(scope).requests.count_late()
            await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _shared_of(self, scope: Scope) -> _Shared:
        """Return what is made once the application has its state.

        Raises
        ------
        ConfigError : the configuration is wrong; the start of the server fails with it.
        """
        if self._shared is None:
            self._shared = _Shared(scope["app"].state)
        return self._shared


class _Shared:
    """What all requests share.

    Parameters
    ----------
    state : of vLLM's application: `vllm_config` and `args`.
    """

    def __init__(self, state: Any) -> None:
        log_as_vllm_does()
        vllm_config, args = getattr(state, "vllm_config", None), getattr(state, "args", None)
        self._config, self._defaults = read_config(
            getattr(vllm_config, "additional_config", None), os.environ
        )
        self._cors = {name: getattr(args, own) for name, own in _CORS.items() if hasattr(args, own)}
        self._asks_for_keys = bool(getattr(args, "api_key", None) or os.environ.get("VLLM_API_KEY"))
        self.requests = OpenRequests(self._defaults.mode)
        self._subscriber: Subscriber | None = None
        self._hearing: asyncio.Task[None] | None = None
        if self._config.telemetry is None:
            logger.warning(
                "no telemetry address is set, which `onbeat vllm serve` does: verdicts lack the predicted "
                "TTFT, and /metrics the step times"
            )
        else:
            parallel = getattr(vllm_config, "parallel_config", None)
            num_ranks = int(getattr(parallel, "data_parallel_size", 1) or 1)
            self._subscriber = Subscriber(self._config.telemetry, num_ranks)
            self._hearing = asyncio.get_running_loop().create_task(self._hear(self._subscriber))

    def close(self) -> None:
        """Stop hearing the scheduler."""
        if self._hearing is not None:
            self._hearing.cancel()
        if self._subscriber is not None:
            self._subscriber.close()

    async def _hear(self, subscriber: Subscriber) -> None:
        while True:
            self.requests.take(await subscriber.receive())

    async def serve(self, app: ASGIApp, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Let vLLM answer a request that it can be held to."""
        headers = Headers(scope=scope)
        caller = self._caller(headers)
        try:
            raw = bytes(await receive_body(headers, receive, self._config.max_body_bytes))
            request = read_request(path, raw, headers, caller, self._defaults, slo_id=uuid.uuid4().hex)
        except OnbeatError as error:
            response = error_response(error, path)
            await CORSMiddleware(response, **self._cors)(scope, receive, send)
            return
        except ClientGone:
            return
        if request is None:
            await app(scope, _replayed(raw, receive), send)
            return
        opened = self.requests.open(request)
        told_seconds = 0.0 if self._subscriber is None else TOLD_SECONDS
        relay = AnswerRelay(
            opened, scope, receive, send, ignored=caller.ignored_fields, told_seconds=told_seconds
        )
        try:
            scope = _with_length(scope, len(request.body))
            await app(scope, _replayed(request.body, receive), relay.send)
        except Exception:
            if not await relay.rescue():
                raise
        finally:
            self.requests.close(opened)

    def _caller(self, headers: Headers) -> KnownCaller:
        """Return whose key a request carries. Whether the key is good, vLLM decides."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            return KnownCaller()
        digest = key_digest(key.strip())
        is_known = self._asks_for_keys or digest in self._defaults.keys
        return KnownCaller(digest if is_known else None)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body at once, and then what the client sends."""
    is_given = False

    async def receive_replayed() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_replayed


def _with_length(scope: Scope, num_bytes: int) -> Scope:
    """Return the scope of a request whose body has another length, in one piece."""
    kept = [
        (name, value)
        for name, value in scope["headers"]
        if name.lower() not in (b"content-length", b"transfer-encoding")
    ]
    return {**scope, "headers": [*kept, (b"content-length", str(num_bytes).encode())]}
