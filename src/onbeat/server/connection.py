"""One client's connection: what it may send before its request is complete, and how long that may take.

uvicorn parses requests with httptools, which knows no bounds. These hold before a request is looked at, its
key included. No time runs out while an answer is under way. Offers of another protocol (`Upgrade: h2c`, which
Java's client and `curl --http2` make) are passed over: httptools alone would not read such a request's body.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Collection, Coroutine
from typing import Any, NamedTuple

from httptools import HttpParserError, HttpParserUpgrade
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from onbeat.server.errors import RETRY_AFTER_SECONDS, error_body
from onbeat.server.server_config import ConnectionLimits

logger = logging.getLogger("onbeat.server")

LINGER_SECONDS = 1.0
"""How long what a refused client still sends is thrown away: closing at once would lose the answer."""


_KNOCK_SECONDS = 0.02
"""How soon it is looked again whether a client that sends nothing more is still there."""
_STILL_THERE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""What any client of HTTP/1.1 passes over, asked for or not."""


class Closing(NamedTuple):
    """Why a connection is closed before its request is complete."""

    status: int
    reason: str
    """A word for the metrics, and the code of the answer's body."""
    message: str


MALFORMED = Closing(400, "malformed_request", "the request is not valid HTTP/1.1; the connection is closed")
HEAD_TOO_LARGE = Closing(431, "headers_too_large", "the request line and headers are too large; send less")
SLOW_HEAD = Closing(408, "slow_headers", "the request's headers did not come in time; send them at once")
SLOW_BODY = Closing(408, "slow_body", "the request's body came too slowly; send it in one go")
TOO_MANY = Closing(
    503, "too_many_connections", "the server has as many connections as it may; try again later"
)
NO_ROOM = Closing(
    503,
    "no_room_for_body",
    "the server holds as much of incomplete requests as it may, and this one has been under way for longest; "
    "try again later, and send the body in one go",
)

_REFUSAL = "onbeat.refusal"
"""Where the state of a request that broke off holds why."""


def refusal_of(scope: Scope) -> Closing | None:
    """Return what a request's client got from the connection, in place of what the application says."""
    refusal: Closing | None = scope.get("state", {}).get(_REFUSAL)
    return refusal


FLOW = "onbeat.flow"
"""Where the state of a request holds what says whether its client reads: uvicorn's `FlowControl`."""


class _HeadTooLarge(Exception):
    """Stops the parser."""


class BodyRoom:
    """What the connections of a server hold, all together, of bodies that are not complete.

    Over the bound the body that began first is given up. A newcomer is not: then a few who never end would
    keep out everybody.

    Parameters
    ----------
    max_bytes : the bound.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._held: dict[BoundedConnection, int] = {}  # in the order in which their bodies began

    def take(self, connection: BoundedConnection, num_bytes: int) -> None:
        """Count what has come of a connection's body; gives up others', or this one."""
        self._held[connection] = self._held.get(connection, 0) + num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            oldest = next(iter(self._held))
            self.give_back(oldest)
            oldest.refuse(NO_ROOM)

    def give_back(self, connection: BoundedConnection) -> None:
        """Count a connection's body no more."""
        self._num_bytes -= self._held.pop(connection, 0)


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection with bounds in size, time and number.

    Parameters
    ----------
    limits : the bounds.
    bodies : the room that it shares with all others.
    on_refused : told why a connection was closed, a `Closing.reason` (metrics).
    origins : whose pages may read an answer; `*` is all.
    options : uvicorn's own.
    """

    def __init__(
        self,
        *,
        limits: ConnectionLimits,
        bodies: BodyRoom,
        on_refused: Callable[[str], None],
        origins: Collection[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._origins = origins
        self._limits = limits
        self._bodies = bodies
        self._on_refused = on_refused
        self._is_in_head = False
        self._is_in_body = False
        self._has_offer = False  # the head is of a request that offers another protocol
        self._num_loose_bytes = 0  # received since the parser last got to the end of a head, or to a body
        self._num_body_bytes = 0  # received since the body was last looked at
        self._timer: asyncio.TimerHandle | None = None
        self._refusal = MALFORMED
        self._is_refused = False  # what comes from here on is thrown away

    # --- what asyncio calls ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self.refuse(TOO_MANY)
        else:
            self._watch(self._limits.head_seconds, self._on_head_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._bodies.give_back(self)
        # uvicorn leaves the timer of a connection that was reset, and with it all that the connection holds.
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a client that has only closed its side; one that has left looks the same."""
        if self._is_in_body or not self._is_answering():
            return False  # nothing will come of it
        if self.scope["http_version"] == "1.0" and not self.cycle.response_started:
            return False  # it can be told nothing before its answer
        self.cycle.keep_alive = False
        self._knock(_KNOCK_SECONDS)
        return True  # TLS closes all the same

    def _knock(self, seconds: float) -> None:
        """Write until an answer begins, less and less often: to a client that has left nothing can be."""
        if not (self.cycle.response_started or self.transport.is_closing()):
            self.transport.write(_STILL_THERE)
            self._timer = self.loop.call_later(seconds, self._knock, 2 * seconds)

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        self._num_loose_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except HttpParserError:
            self.refuse(self._refusal)
        if self._is_refused or self.transport.is_closing():
            return
        if self._num_loose_bytes > self._limits.max_head_bytes:
            self.refuse(HEAD_TOO_LARGE)
        elif self._is_in_body:
            self._watch(self._limits.body_seconds, self._on_body_timeout)
        elif self._is_in_head or self._num_loose_bytes:
            self._watch(self._limits.head_seconds, self._on_head_timeout)

    def _feed(self, data: bytes) -> None:
        """Parse data; behind a head with an offer of another protocol go on as if it made none."""
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as offer:
            if self._has_offer and not self._is_refused:
                (end,) = offer.args
                self._feed(self._head_without_offer() + data[end:])

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    # --- what the parser calls ------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._has_offer = True, False

    def on_headers_complete(self) -> None:
        if self._is_answering():
            self._end_after_answer()
        if self._is_refused:
            return
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > self._limits.max_head_bytes:
            self._refusal = HEAD_TOO_LARGE
            raise _HeadTooLarge
        self._has_offer = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._has_offer:
            return
        super().on_headers_complete()
        self.scope["state"][FLOW] = self.flow
        if self.scope["http_version"] == "1.0":
            setattr(self.cycle, "send", _without_chunks(self.cycle))  # noqa: B010 -- a method for one answer
        self._is_in_head, self._is_in_body = False, True
        self._num_loose_bytes = self._num_body_bytes = 0
        self._unwatch()

    def on_body(self, body: bytes) -> None:
        if self._is_refused:
            return
        self._num_loose_bytes = 0
        self._num_body_bytes += len(body)
        if not self.cycle.response_complete:  # else it is thrown away
            self._bodies.take(self, len(body))
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_refused or self._has_offer:
            return
        self._is_in_body = False
        self._num_loose_bytes = 0
        self._unwatch()
        self._bodies.give_back(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._bodies.give_back(self)
        super().on_response_complete()

    # --- time -----------------------------------------------------------------------------------------

    def _watch(self, seconds: float, on_timeout: Callable[[], None]) -> None:
        """Call `on_timeout` in a while, unless it is waited for something already."""
        if self._timer is None:
            self._timer = self.loop.call_later(seconds, self._on_timer, on_timeout)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self, on_timeout: Callable[[], None]) -> None:
        self._timer = None
        if not self.transport.is_closing():
            on_timeout()

    def _on_head_timeout(self) -> None:
        if self._is_answering():
            self._watch(self._limits.head_seconds, self._on_head_timeout)
        elif self._is_in_head:
            self.refuse(SLOW_HEAD)
        else:
            self.transport.close()  # it never began to ask

    def _on_body_timeout(self) -> None:
        has_come_on = self._num_body_bytes >= self._limits.min_body_bytes
        # reading stops while we are the slower side
        if self._is_answering() or has_come_on or self.flow.read_paused:
            self._num_body_bytes = 0
            self._watch(self._limits.body_seconds, self._on_body_timeout)
        else:
            self.refuse(SLOW_BODY)

    def _is_answering(self) -> bool:
        """Whether an answer is owed to a whole request, or has begun."""
        if self._is_in_body:
            return bool(self.cycle.response_started and not self.cycle.response_complete)
        return self.cycle is not None and not self.cycle.response_complete

    # --- the end --------------------------------------------------------------------------------------

    def _end_after_answer(self) -> None:
        """Drop a request that came before the answer to the one before it, and let that answer be the last.

        uvicorn would queue it and stop reading, and so not see that the client leaves until the answer ends.
        """
        self._unwatch()
        self._is_refused = True
        self._on_refused("pipelined_request")
        self.cycle.keep_alive = False

    def refuse(self, refusal: Closing) -> None:
        """Close the connection, with words for it where no answer has begun."""
        self._unwatch()
        self._bodies.give_back(self)
        self._is_refused = True
        self._on_refused(refusal.reason)
        logger.debug("closed the connection of %s: %s", self.client, refusal.message)
        has_answered = self._is_in_body and self.cycle.response_started
        if has_answered or self._is_answering():
            self.transport.close()
            return
        if self._is_in_body:
            self._silence_application(refusal)
        origin = dict(self.headers or ()).get(b"origin", b"")  # None before the first head
        is_allowed = origin.decode("latin-1") in self._origins
        self.transport.write(_answer(refusal, b"*" if "*" in self._origins else origin * is_allowed))
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.flow.resume_reading()
        else:  # TLS, which waits for the client's farewell by itself
            self.transport.close()
        self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _silence_application(self, refusal: Closing) -> None:
        """Let the application, which may be about to answer or wait for the body, find its client gone."""
        self.scope["state"][_REFUSAL] = refusal
        self.cycle.disconnected = True
        self.cycle.waiting_for_100_continue = False
        self.cycle.message_event.set()


def _without_chunks(cycle: RequestResponseCycle) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """Return what sends an answer to a client of HTTP/1.0: one without a length ends with its connection."""
    send, has_length = cycle.send, True

    async def send_plainly(message: dict[str, Any]) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name == b"content-length" for name, _ in message["headers"])
            if not has_length:
                cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
        elif not (has_length or message.get("more_body")):
            cycle.expected_content_length = len(message.get("body", b""))  # so that uvicorn finds it whole
        await send(message)  # type: ignore[arg-type]

    return send_plainly


def _answer(refusal: Closing, origin: bytes) -> bytes:
    body = error_body(refusal.status, refusal.message, refusal.reason)
    head = STATUS_LINE[refusal.status] + b"content-type: application/json\r\nconnection: close\r\n"
    if origin:
        head += b"access-control-allow-origin: %b\r\nvary: Origin\r\n" % origin
    if refusal.status == 503:
        head += b"retry-after: %d\r\n" % RETRY_AFTER_SECONDS
    return head + b"content-length: %d\r\n\r\n" % len(body) + body
