"""Who may connect to a fleet whose replicas are on other machines: those whose keys it was told."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import parse_monitor_message

logger = logging.getLogger("onbeat.cluster")

_DOMAIN = "fleet"
_HANDSHAKE_MS = 10_000
_QUIET_SECONDS = 60.0
"""Strangers are told of once in so long: who knocks often fills no log."""
_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Doorkeeper:
    """Encrypts what comes over a listening socket, and turns strangers away before they say a word.

    Parameters
    ----------
    context : of the socket; it has no other doorkeeper.
    socket : not bound yet.

    Attributes
    ----------
    public_key : what whoever connects must know of this side (CurveZMQ, in Z85).
    num_strangers : connections that were turned away, those aside that do not even speak ZeroMQ.
    """

    def __init__(self, context: zmq.Context[Any], socket: zmq.Socket[bytes]) -> None:
        self.public_key, secret_key = zmq.curve_keypair()
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
        self._socket = socket
        self._monitor = socket.get_monitor_socket(_FAILURES)
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._monitor.fd)
        self._loop.add_reader(self._fd, self._read_monitor)
        self._read_monitor()  # the descriptor tells of nothing before somebody has looked

    def admit(self, public_key: bytes) -> None:
        """Let the holder of a key connect."""
        self._admitted.add(public_key)

    def expel(self, public_key: bytes) -> None:
        """Let the holder of a key connect no more; what is connected stays so."""
        self._admitted.discard(public_key)

    def callback(self, _domain: str, key: bytes) -> bool:
        """Answer the authenticator whether a key is one that was admitted."""
        return key in self._admitted

    def _read_monitor(self) -> None:
        while True:
            try:
                parse_monitor_message(self._monitor.recv_multipart(flags=zmq.NOBLOCK))
            except zmq.Again:
                return
            self.num_strangers += 1
            now = time.monotonic()
            if now - self._last_told >= _QUIET_SECONDS:
                self._last_told = now
                logger.warning(
                    "something that is no replica of this fleet has connected, %d times so far, and was "
                    "turned away",
                    self.num_strangers,
                )

    def close(self) -> None:
        """Let go of the socket; call it before the socket is closed."""
        self._loop.remove_reader(self._fd)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._authenticator.stop()
