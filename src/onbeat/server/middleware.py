"""What happens to every HTTP request, and what is known of it, as plain ASGI: no task, no copy per message.

From the outside in: `RootPath`, Starlette's CORS, `RequestLog` (id, access log, counters, last resort for
bugs), `Checks` (host, path, key), `RateLimits`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onbeat.core.errors import InvalidRequest, RequestRejected
from onbeat.core.request import Grammar
from onbeat.jobs.call import JobCall
from onbeat.server import errors
from onbeat.server.connection import refusal_of
from onbeat.server.paths import OPEN_PATHS
from onbeat.server.server_config import MAX_QUOTED
from onbeat.server.shared import Desk
from onbeat.server.slo_defaults import key_digest

logger = logging.getLogger("onbeat.server")

_REQUEST_ID = "x-request-id"
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_UNFIT = re.compile(r"[^A-Za-z0-9._:/+=@$\[\]-]")
_ROUTINE = frozenset(
    ("/health", "/ping", "/ready", "/load", "/metrics", "/state", "/tokenize", "/detokenize")
)
"""Paths asked every few seconds, or hundreds of times by one load test that fits its prompts' lengths."""
_PORT = re.compile(r":[0-9]*$")
_OURS = re.compile(r"[^.]*|.*\.localhost|[0-9.]+|[0-9a-f.:]*:[0-9a-f.:]*")
"""Hosts that no name of a stranger is: without a dot, below `localhost`, or an address."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

DOCS_FILES = "/docs/static"


_CONTEXT = "onbeat"


@dataclass(slots=True)
class HttpContext:
    """One HTTP request, from its first byte to the end of the answer. Times are of the monotonic clock."""

    request_id: str
    """The caller's `x-request-id`, or one of ours."""
    endpoint: str
    """The route, or `unmatched`: a name from a small set, fit for a metric label."""
    address: str = ""
    """Of the client; empty where its connection has none."""
    started: float = field(default_factory=time.monotonic)
    key_digest: str | None = None
    """SHA-256 of the API key that let it in, hexadecimal; None where none was asked for."""
    desk: Desk | None = None
    """Where what it takes of its key's limits is counted; None of keys without limits."""
    number: int = 0
    """Of the request there."""
    status: int = 0
    num_body_bytes: int = 0
    """Of what has been read of it: nothing in it takes more than in proportion."""
    arrival: float = math.nan
    """When its whole body had come."""
    completion_id: str = ""
    """The id of the answer (`chatcmpl-...`), if one was asked for; the engine's request ids start with it."""
    grammar: Grammar | None = None
    """What the answer must match."""
    job: JobCall | None = None
    """Of which job it is a call; None of none."""
    num_prompt_tokens: int = 0
    """0 where no answer was begun."""
    num_output_tokens: int = 0
    ttft: float | None = None
    """Seconds from arrival to the first delivery of any choice."""
    finish: str | None = None
    """Finish reasons of the choices, comma separated."""
    error_code: str | None = None
    ignored_fields: list[str] = field(default_factory=list)
    """Paths of fields that nobody knows and the answer does not depend on, and headers without effect."""
    work: asyncio.Task[None] | None = None
    """What goes on behind the answer: the request ends with it."""

    @property
    def caller(self) -> str:
        """Who asks, as far as it can be known and not merely claimed: a key, else an address."""
        return self.key_digest or self.address

    @property
    def elapsed(self) -> float:
        """Seconds since the request's first byte."""
        return time.monotonic() - self.started

    def at_end(self, call: Callable[[], None]) -> None:
        """Call something once the request has ended: now, or when its work has."""
        if self.work is None:
            call()
        else:
            self.work.add_done_callback(lambda _: call())


def context_of(scope: Scope) -> HttpContext:
    """Return the context that the outermost middleware attached."""
    context = scope[_CONTEXT]
    assert isinstance(context, HttpContext)
    return context


@dataclass(slots=True)
class RootPath:
    """Takes the prefix off a path under which a proxy shows the server, whether or not the proxy has done so.

    Parameters
    ----------
    app : the next application.
    prefix : such as `/llm`.
    """

    app: ASGIApp
    prefix: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{self.prefix}/"):
            scope["path"] = scope["path"].removeprefix(self.prefix)
        if scope.get("path") == "/docs":
            scope["root_path"] = self.prefix  # of the files that the page loads
        await self.app(scope, receive, send)


@dataclass(slots=True)
class RequestLog:
    """Names a request, measures it, and answers 500 where nothing else did.

    Parameters
    ----------
    app : the next application.
    endpoints : known paths; others are counted as `unmatched`, so that a scan cannot fill the metrics.
    on_done : called with each finished request (metrics).
    log_requests : whether to log a line for each.
    """

    app: ASGIApp
    endpoints: frozenset[str]
    on_done: Callable[[HttpContext], None]
    log_requests: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        address, _ = scope.get("client") or ("", 0)
        given = Headers(scope=scope).get(_REQUEST_ID, "")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        context = HttpContext(request_id, self._endpoint(scope["path"]), address)
        scope[_CONTEXT] = context

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[_REQUEST_ID] = context.request_id
                if context.ignored_fields:
                    names = [_UNFIT.sub("?", name[:100]) for name in context.ignored_fields]
                    headers[errors.IGNORED_FIELDS_HEADER] = ", ".join(names)
                if not headers.get("content-type", "").startswith("text/event-stream"):
                    headers["openai-processing-ms"] = str(round(context.elapsed * 1000))
            await send(message)

        try:
            await self.app(scope, receive, send_named)
        except errors.ClientGone:
            context.finish = "client_gone"  # while its request was still coming
        except Exception as error:
            logger.exception("%s %s failed", context.request_id, context.endpoint)
            if context.status == 0:
                await errors.error_response(error, scope["path"])(scope, receive, send_named)
            else:
                raise  # half an answer is out: only closing the connection tells the client
        finally:
            context.at_end(partial(self._finish, scope, context))

    def _endpoint(self, path: str) -> str:
        if path.startswith("/v1/models/"):
            return "/v1/models/{model}"
        if path.startswith("/v1/responses/") and path not in self.endpoints:
            kept = f"/v1/responses/{{response_id}}/{path.rpartition('/')[2]}"
            return kept if kept in self.endpoints else "/v1/responses/{response_id}"
        if path.startswith("/docs/"):  # scripts and styles of the page
            return "/docs"
        return path if path in self.endpoints else "unmatched"

    def _finish(self, scope: Scope, context: HttpContext) -> None:
        if (refusal := refusal_of(scope)) is not None:
            context.status, context.error_code, context.finish = refusal.status, refusal.reason, None
        elif context.status == 0:
            context.status = errors.CLIENT_GONE
        self.on_done(context)
        if self.log_requests:
            is_routine = context.endpoint in _ROUTINE and context.status < 400
            logger.log(
                logging.DEBUG if is_routine else logging.INFO, "%s", _access_line(scope["method"], context)
            )


def _access_line(method: str, context: HttpContext) -> str:
    parts = [f"{context.request_id} {method} {context.endpoint} {context.status}"]
    if context.num_prompt_tokens:
        parts.append(f"id={context.completion_id}")
        parts.append(f"prompt_tokens={context.num_prompt_tokens} output_tokens={context.num_output_tokens}")
    if context.ttft is not None:
        parts.append(f"ttft_ms={context.ttft * 1000:.1f}")
    parts.append(f"e2e_ms={context.elapsed * 1000:.1f}")
    if context.finish is not None:
        parts.append(f"finish={context.finish}")
    if context.error_code is not None:
        parts.append(f"error={context.error_code}")
    return " ".join(parts)


@dataclass(slots=True)
class Checks:
    """Lets checks look at a request before the application does; what one of them raises is the answer.

    Parameters
    ----------
    app : the next application.
    checks : in their order.
    """

    app: ASGIApp
    checks: Sequence[Callable[[Scope], None]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                for check in self.checks:
                    check(scope)
            except RequestRejected as error:
                context_of(scope).error_code = error.code
                await errors.error_response(error, scope["path"])(scope, receive, send)
                return
        await self.app(scope, receive, send)


def check_path(scope: Scope) -> None:
    """Refuse a path with control characters: a guard and a router may disagree on where it ends.

    Raises
    ------
    InvalidRequest : it has some.
    """
    if _CONTROL.search(scope["path"]):
        raise InvalidRequest(
            f"the path {scope['path'][:MAX_QUOTED]!r} holds a control character; send it without",
            code="invalid_path",
        )


def check_host(scope: Scope, *, names: frozenset[str]) -> None:
    """Refuse a request for another host than this server; see `ServerConfig.answered_hosts`.

    Parameters
    ----------
    names : further ones.

    Raises
    ------
    ApiError : it is for another (403).
    """
    name = _PORT.sub("", Headers(scope=scope).get("host", "")).strip("[]").rstrip(".").lower()
    if not (_OURS.fullmatch(name) or name in names):
        raise errors.ApiError(
            403,
            f"this server does not answer for the host {name[:MAX_QUOTED]!r}; ask for localhost, or start it "
            "with --allowed-hosts and that name (or *), or with an API key",
            code="host_not_allowed",
        )


def check_key(scope: Scope, *, keys: Sequence[str]) -> None:
    """Refuse who carries none of the keys, but on `OPEN_PATHS`, and note which key it is.

    Raises
    ------
    ApiError : there is no key, or a wrong one (401).
    """
    path = scope["path"]
    if path not in OPEN_PATHS and not path.startswith(f"{DOCS_FILES}/"):
        context_of(scope).key_digest = key_digest(bearer_key(Headers(scope=scope), keys, name="API key"))


def bearer_key(headers: Headers, keys: Sequence[str], *, name: str) -> str:
    """Return the key that a request carries.

    Parameters
    ----------
    keys : those that are good.
    name : what they are called in the error.

    Raises
    ------
    ApiError : it carries none of them (401).
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    # Anthropic's clients send `x-api-key`, and may send both: the other is then for a proxy
    for key in (bearer, headers.get("x-api-key", "")):
        given = key.encode(errors="replace")
        # every key is compared, each in constant time: the time tells nothing about them
        matches = [hmac.compare_digest(given, known.encode()) for known in keys]
        if any(matches):
            return key
    raise errors.ApiError(
        401,
        f"the {name} is missing or wrong; send it as 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


class RateLimits:
    """Refuses requests of API keys that have reached their limits. What is read (GET) is free.

    Parameters
    ----------
    app : the next application.
    keys : hashes of the API keys that have limits.
    shared : knows what they have taken.
    """

    def __init__(self, app: ASGIApp, *, keys: Collection[str], shared: Desk) -> None:
        self._app, self._keys, self._shared = app, keys, shared

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope) if scope["type"] == "http" and scope["method"] == "POST" else None
        if context is None or context.key_digest not in self._keys:
            await self._app(scope, receive, send)
            return
        key = context.key_digest or ""

        async def send_told(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(dict(await self._shared.key_headers(key)))
            await send(message)

        length = Headers(scope=scope).get("content-length", "")
        try:
            announced = int(length) if length.isdecimal() else 0
            context.number = await self._shared.begin_key(key, announced)
        except errors.ApiError as error:
            context.error_code = error.code
            await errors.error_response(error, scope["path"])(scope, receive, send_told)
            return
        context.desk = self._shared
        try:
            await self._app(scope, receive, send_told)
        finally:
            context.at_end(partial(self._end, context))

    def _end(self, context: HttpContext) -> None:
        used = context.num_prompt_tokens, context.num_output_tokens
        self._shared.end_key(context.number, context.status, *used)
