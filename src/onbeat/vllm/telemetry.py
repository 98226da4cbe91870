"""What the scheduler's process tells the API servers: what verdicts and gauges need, and no answer carries.

Messages are msgpack over ZeroMQ, from one publisher a rank to each API server. A publisher never waits: what
a subscriber is too slow for is lost to it.
"""

from __future__ import annotations

import logging
import re

import msgspec
import zmq
import zmq.asyncio

from onbeat.core.errors import ConfigError
from onbeat.vllm.refusals import Refusal

logger = logging.getLogger("onbeat.vllm")

_WAITING_MESSAGES = 2**13
"""What a slow subscriber may leave waiting; the rest is lost to it."""
_LARGEST_MESSAGE = 2**16
_TCP = re.compile(r"(tcp://.+:)([0-9]{1,5})", re.ASCII)


class RequestNews(msgspec.Struct, tag=True, omit_defaults=True, frozen=True, kw_only=True):
    """What has become of one request."""

    slo_id: str
    """By which the middleware knows it."""
    predicted_ttft: float | None = None
    """Seconds from its arrival; None where nobody predicts."""
    is_relegated: bool = False
    """Whether it is served as best effort from now on."""
    refusal: Refusal | None = None
    """Why it is not served."""


class StepTimes(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What the last steps of a rank took together, seconds."""

    rank: int
    predicted: float
    measured: float


Message = RequestNews | StepTimes


def rank_address(address: str, rank: int) -> str:
    """Return where the scheduler of a data-parallel rank publishes: a port, or a path, for each.

    Raises
    ------
    ConfigError : the address has no port to count from.
    """
    if rank == 0:
        return address
    if not address.startswith("tcp://"):
        return f"{address}.{rank}"
    if not (found := _TCP.fullmatch(address)) or int(found[2]) + rank > 65535:
        raise ConfigError(f"telemetry is {address!r}; {rank + 1} ranks need that many ports from its own on")
    return f"{found[1]}{int(found[2]) + rank}"


class Publisher:
    """Sends messages to whoever listens.

    Parameters
    ----------
    address : where to bind; see `rank_address`.

    Raises
    ------
    ConfigError : nothing can be bound there.
    """

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, _WAITING_MESSAGES)
        self._has_failed = False
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(
                f"telemetry cannot be published at {address} ({error}); choose another address"
            ) from error

    def send(self, message: Message) -> None:
        """Send a message; it neither waits nor raises, and what cannot be sent is lost."""
        try:
            self._socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
        except (zmq.ZMQError, TypeError, ValueError, OverflowError) as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("telemetry: a message was not sent (said once): %s", error)

    def close(self) -> None:
        """Stop."""
        self._socket.close()


class Subscriber:
    """Hears the publishers of all ranks, in a running event loop.

    Parameters
    ----------
    address : of rank 0; whoever is to publish need not be there yet.
    num_ranks : schedulers that there are.

    Raises
    ------
    ConfigError : it is no address.
    """

    def __init__(self, address: str, num_ranks: int = 1) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
        self._socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, _WAITING_MESSAGES)
        self._socket.set(zmq.MAXMSGSIZE, _LARGEST_MESSAGE)
        self._socket.subscribe(b"")
        try:
            for rank in range(num_ranks):
                self._socket.connect(rank_address(address, rank))
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"telemetry: {address!r} is no address of ZeroMQ ({error})") from error

    async def receive(self) -> Message:
        """Return the next message; what is none is passed over."""
        while True:
            raw = await self._socket.recv()
            try:
                return self._decoder.decode(raw)
            except msgspec.MsgspecError:
                continue

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
