"""The one socket by which a server reaches all replicas: they connect to it, each under a name of its own.

Where replicas are on other machines, those connect whose keys it was told.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85

from onbeat.core.errors import ConfigError
from onbeat.engine.link import CurveKeys
from onbeat.engine.messages import encode

logger = logging.getLogger("onbeat.cluster")

_DOMAIN = "fleet"
_HANDSHAKE_MS = 10_000
_QUIET_SECONDS = 60.0
"""Strangers are told of once in so long: who knocks often fills no log."""


class AccessControl:
    """Encrypts what comes over a listening socket, and turns strangers away before they say a word.

    Parameters
    ----------
    context : of the socket; it has no other access control.
    socket : not bound yet.
    keys : public and secret one of this side; None makes new ones.

    Attributes
    ----------
    public_key : what whoever connects must know of this side (CurveZMQ, in Z85).
    num_strangers : keys that were turned away, those aside that do not even speak CurveZMQ.
    """

    def __init__(
        self, context: zmq.Context[Any], socket: zmq.Socket[bytes], keys: tuple[bytes, bytes] | None = None
    ) -> None:
        self.public_key, secret_key = keys or zmq.curve_keypair()
        self.num_strangers = 0
        self._admitted: set[bytes] = set()
        self._last_told = -_QUIET_SECONDS
        socket.curve_publickey, socket.curve_secretkey = self.public_key, secret_key
        socket.curve_server = True
        socket.zap_domain = _DOMAIN.encode()
        socket.handshake_ivl = _HANDSHAKE_MS
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.configure_curve_callback(_DOMAIN, self)
        self._authenticator.start()

    def admit(self, public_key: bytes) -> None:
        """Let the holder of a key connect."""
        self._admitted.add(public_key)

    def expel(self, public_key: bytes) -> None:
        """Let the holder of a key connect no more; what is connected stays so."""
        self._admitted.discard(public_key)

    def callback(self, _domain: str, key: bytes) -> bool:
        """Answer the authenticator whether a key is one that was admitted."""
        if key in self._admitted:
            return True
        self.num_strangers += 1
        now = time.monotonic()
        if now - self._last_told >= _QUIET_SECONDS:
            self._last_told = now
            logger.warning(
                "turned away a connection that is not of this fleet (%d so far); keep others off this port",
                self.num_strangers,
            )
        return False

    def close(self) -> None:
        """Let nobody else in."""
        self._authenticator.stop()


def shared_keys(secret: str, whose: str) -> tuple[bytes, bytes]:
    """Return the public and the secret key that whoever knows a secret gives a side of a connection."""
    key = hashlib.scrypt(secret.encode(), salt=f"onbeat {whose}".encode(), n=2**14, r=8, p=1, dklen=32)
    secret_key = z85.encode(key)
    return zmq.curve_public(secret_key), secret_key


_TURN_SECONDS = 0.002
"""How long messages are read before others of the event loop have their turn."""
_EVENTS, _THERE_IS_ONE, _NO_WAIT = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
_FIRST = _NO_WAIT | int(zmq.SNDMORE)
"""Flags of the name before a message. pyzmq takes longer with its enumerations: `&` alone takes 2 us."""
_send: Callable[[zmq.Socket[bytes], bytes, int], object] = zmq.backend.Socket.send
"""Without the wrapper for what is not used here, a quarter of the time."""

LINGER_MS = 500
HEARTBEAT_MS = 5000
"""Another machine that says nothing for so long is asked whether it is there."""
MessageT = TypeVar("MessageT")


class Reader:
    """Reads a ZeroMQ socket from a callback of the event loop.

    An asyncio socket costs a future and a task switch for each message.

    Parameters
    ----------
    socket : connected or bound.
    take : is called with the frames of each message.
    """

    def __init__(self, socket: zmq.Socket[bytes], take: Callable[[list[bytes]], None]) -> None:
        self._socket, self._take = socket, take
        self._loop = asyncio.get_running_loop()
        self._is_open, self._is_due = True, False
        self._fd: int = socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._loop.add_reader(self._fd, self.read)

    def after_send(self) -> None:
        """Look again: sending may take note of what has come, and the descriptor then says no more of it."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self.read)

    def read(self) -> None:
        """Take the messages that are there; the descriptor tells no more of those that one leaves."""
        self._is_due, end = True, self._loop.time() + _TURN_SECONDS
        while (
            self._is_open and int(self._socket.get(_EVENTS)) & _THERE_IS_ONE
        ):  # a failed `recv` takes longer
            if self._loop.time() >= end:
                self._loop.call_soon(self.read)
                return
            frame = self._socket.recv(_NO_WAIT, copy=False)  # it knows whether more follow; else one must ask
            frames = [frame.bytes]
            while frame.more:
                frame = self._socket.recv(_NO_WAIT, copy=False)
                frames.append(frame.bytes)
            try:
                self._take(frames)
            except Exception:  # of whoever hears it; what comes after is for others, too
                logger.exception("a message cannot be handled")
        self._is_due = False

    def close(self) -> None:
        """Read no more."""
        self._is_open = False
        self._loop.remove_reader(self._fd)


class Wire(Generic[MessageT]):
    """Sends to others by name and hands on what they say.

    Parameters
    ----------
    endpoint : to bind: `ipc://...`, or `tcp://ADDRESS:*` for any port. What comes by tcp is encrypted, and
        comes from those alone that were admitted.
    decode : reads a message.
    knows : whether a name is that of somebody whose messages count; others are dropped unread.
    on_message : is called with the name of the sender.
    on_junk : is called with the name of a known sender whose message cannot be read.
    keys : see `AccessControl`.

    Attributes
    ----------
    endpoint : what they connect to.
    num_dropped : messages of unknown senders.
    access : controls connections by tcp; None where they come by files that only this user can reach.

    Raises
    ------
    ConfigError : the endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        decode: Callable[[bytes], MessageT],
        knows: Callable[[bytes], bool],
        on_message: Callable[[bytes, MessageT], None],
        on_junk: Callable[[bytes, str], None],
        keys: tuple[bytes, bytes] | None = None,
    ) -> None:
        self.num_dropped = 0
        self._decode, self._knows = decode, knows
        self._on_message = on_message
        self._on_junk = on_junk
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = socket = self._context.socket(zmq.ROUTER)
        socket.set_hwm(0)  # what nobody has read yet waits in memory; sending never waits
        socket.linger = 0
        socket.router_mandatory = True
        socket.ipv6 = "[" in endpoint
        is_local = endpoint.startswith("ipc:")
        self.access = None if is_local else AccessControl(self._context, socket, keys)
        socket.heartbeat_ivl = 0 if is_local else HEARTBEAT_MS
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._close()
            raise ConfigError(f"nobody can connect to {endpoint}: {error}") from error
        self.endpoint = socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")  # type: ignore[union-attr]
        self._reader = Reader(socket, self._take)
        self.read = self._reader.read

    def send(self, name: bytes, message: object) -> bool:
        """Send a message; return whether there is a connection that takes it."""
        data = encode(message)
        try:
            _send(self._socket, name, _FIRST)
            _send(self._socket, data, _NO_WAIT)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        finally:
            self._reader.after_send()
        return True

    def _take(self, frames: list[bytes]) -> None:
        name = frames[0]
        if not self._knows(name):
            self.num_dropped += 1
            logger.debug("a message of %r is dropped: nobody of that name is expected", name[:40])
            return
        try:
            message = self._decode(frames[-1])
        except msgspec.MsgspecError as error:
            self._on_junk(name, f"it sends what cannot be read ({error})")
            return
        self._on_message(name, message)

    def close(self) -> None:
        """Close the socket; what was not sent is dropped."""
        self._reader.close()
        self._close()

    def _close(self) -> None:
        if self.access is not None:
            self.access.close()
        self._context.destroy(linger=0)


class Line:
    """The other end of a `Wire`, for whoever connects to it from another machine.

    Parameters
    ----------
    endpoint : of the wire.
    name : the sender's.
    on_message : is called with each message, to be decoded.
    keys : of the connection; it is not made again once it breaks, for then what was on its way would be
        missing without a word.
    """

    def __init__(
        self, endpoint: str, name: bytes, on_message: Callable[[bytes], None], keys: CurveKeys
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = socket = self._context.socket(zmq.DEALER)
        socket.set_hwm(0)
        socket.linger = 0
        socket.routing_id = name
        socket.ipv6 = "[" in endpoint
        keys.put_on(socket)
        socket.reconnect_ivl = -1
        socket.connect(endpoint)
        self._reader = Reader(socket, lambda frames: on_message(frames[-1]))

    def send(self, message: object) -> None:
        """Send a message; where a connection to another machine is broken nobody gets it."""
        with suppress(zmq.Again):
            _send(self._socket, encode(message), _NO_WAIT)
            self._reader.after_send()

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Close the socket once what was said last is sent, or nobody takes it."""
        self._reader.close()
        self._context.destroy(linger=linger_ms)
