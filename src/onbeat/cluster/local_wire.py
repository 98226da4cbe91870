"""How gates and their keeper reach each other on one machine: over a socket, each message behind its length.

ZeroMQ wakes a thread for each message, which takes more of a keeper's processor time than what it decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from onbeat.engine.messages import encode

logger = logging.getLogger("onbeat.cluster")

RETRY_SECONDS = 0.02
"""After which who finds nobody connects again."""
_NUM_LENGTH = 4
"""Bytes that say how long a message is."""


def _framed(message: object) -> bytes:
    data = encode(message)
    return len(data).to_bytes(_NUM_LENGTH, "big") + data


async def _hand_on(reader: asyncio.StreamReader, take: Callable[[bytes], None]) -> None:
    """Call back with each message until the connection has ended."""
    with suppress(OSError, asyncio.IncompleteReadError):
        while True:
            length = int.from_bytes(await reader.readexactly(_NUM_LENGTH), "big")
            message = await reader.readexactly(length)
            try:
                take(message)
            except Exception:  # of whoever hears it; what comes after is for others, too
                logger.exception("a message cannot be handled")


class LocalWire:
    """Sends to others by name and hands on what they say; see `wire.Wire`, which reaches other machines.

    Parameters
    ----------
    endpoint : the path of the socket. It is made anew, in a folder that nobody but this user can enter.
    on_message : is called with the name of the sender and each message, to be decoded.
    on_lost : is called with the name of one whose connection has ended, as its process has.

    Attributes
    ----------
    writers : of those who are connected, by name.
    """

    def __init__(
        self, endpoint: str, on_message: Callable[[bytes, bytes], None], on_lost: Callable[[bytes], None]
    ) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self.writers: dict[bytes, asyncio.StreamWriter] = {}
        self._server = asyncio.ensure_future(asyncio.start_unix_server(self._hear, endpoint))

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = (await reader.readline()).rstrip()
        self.writers[name] = writer
        await _hand_on(reader, partial(self._on_message, name))
        writer.transport.abort()
        if self.writers.get(name) is writer:
            del self.writers[name]
            self._on_lost(name)

    def send(self, name: bytes, message: object) -> None:
        """Send a message; one who is not connected gets none."""
        writer = self.writers.get(name)
        if writer is not None and not writer.is_closing():  # whose end is about to be told
            writer.write(_framed(message))

    def close(self) -> None:
        """Break all connections; what was not sent is dropped."""
        self._server.add_done_callback(lambda started: started.result().close())
        for writer in self.writers.values():
            writer.transport.abort()


class LocalLine:
    """The other end of a `LocalWire`, which connects again with whoever listens there next.

    Parameters
    ----------
    endpoint : of the wire.
    name : the sender's, without white space.
    on_message : is called with each message, to be decoded.
    on_open : is called when it has connected.
    """

    def __init__(
        self, endpoint: str, name: bytes, on_message: Callable[[bytes], None], on_open: Callable[[], None]
    ) -> None:
        self._endpoint, self._name, self._on_message, self._on_open = endpoint, name, on_message, on_open
        self._writer: asyncio.StreamWriter | None = None
        self._hearing = asyncio.create_task(self._hear())

    async def _hear(self) -> None:
        while True:
            with suppress(OSError):
                reader, self._writer = await asyncio.open_unix_connection(self._endpoint)
                self._writer.write(self._name + b"\n")
                self._on_open()
                await _hand_on(reader, self._on_message)
                self._writer.close()
            await asyncio.sleep(RETRY_SECONDS)

    def send(self, message: object) -> None:
        """Send a message; nobody gets it while nobody listens."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(_framed(message))

    def close(self) -> None:
        """Break the connection once what was said last is sent, or nobody takes it."""
        self._hearing.cancel()
        if self._writer is not None:
            self._writer.close()
