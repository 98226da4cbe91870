"""What the scheduler's process tells the API servers: what verdicts and gauges need, and no answer carries.

Messages are msgpack over ZeroMQ, from one publisher a rank to each API server. A publisher never waits: what
a subscriber is too slow for is lost to it.

That a request is refused comes with its answer, too. vLLM carries a text to the client, in the message of an
error, or as the stop reason of a choice that was aborted: a mark, and a `Refusal` in JSON. 429 is a refusal
for what is predicted: that the request would be late (`slo_unattainable`), or would wait for too long
(`server_overloaded`). 504 is of one that waited in vain, 400 of one with wrong objectives. 503 is vLLM's own,
for an engine that is not there: gateways take a server out that says it.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from onbeat.core.errors import ConfigError, InvalidRequest, RequestRejected, SLOUnattainable
from onbeat.core.request import RequestOutput
from onbeat.core.slo import Fate
from onbeat.server.errors import HasObjectives, unattainable

_MARK = "onbeat refused it: "
_LONGEST_TEXT = 2**14
LATE: Literal["slo_unattainable"] = "slo_unattainable"
TOO_LONG: Literal["server_overloaded"] = "server_overloaded"
VAIN: Literal["deadline_exceeded"] = "deadline_exceeded"
WRONG: Literal["invalid_value"] = "invalid_value"


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request is not served."""

    code: Literal["slo_unattainable", "server_overloaded", "deadline_exceeded", "invalid_value"]
    """As clients get it."""
    reason: str = ""
    """A sentence for the caller."""
    predicted_ttft: float | None = None
    """Seconds; None where nobody knows."""
    retry_after: float | None = None
    """Seconds after which it is predicted to fit; None where nobody knows."""

    @property
    def counted_as(self) -> str:
        """The reason, as metrics count it (`metrics.tracker.REFUSALS`)."""
        return "queue_too_long" if self.code == TOO_LONG else self.code

    def text(self) -> str:
        """Return the text that vLLM is to carry to the client."""
        return _MARK + msgspec.json.encode(self).decode()

    def error(self, request: HasObjectives) -> RequestRejected:
        """Return the error that its client gets, the same as from our own server."""
        if self.code == WRONG:
            return InvalidRequest(self.reason, param="slo", code=WRONG)
        error = SLOUnattainable(
            self.reason,
            predicted_ttft=math.inf if self.predicted_ttft is None else self.predicted_ttft,
            # None is of objectives that not even an idle engine would keep.
            retry_after=self.retry_after if self.code == LATE else self.retry_after or 0.0,
            code=self.code,
        )
        return unattainable(error, request)


def refusal_by(error: SLOUnattainable | InvalidRequest) -> Refusal:
    """Return the refusal that an error of the scheduler's is."""
    if isinstance(error, InvalidRequest):
        return Refusal(code=WRONG, reason=str(error))
    return Refusal(
        code=TOO_LONG if error.code == TOO_LONG else LATE,
        reason=str(error),
        predicted_ttft=error.predicted_ttft,
        retry_after=error.retry_after,
    )


def refusal_after(output: RequestOutput) -> Refusal:
    """Return the refusal that the last output of a request is which waited in vain."""
    return Refusal(
        code=VAIN if output.fate is Fate.EXPIRED else TOO_LONG,
        reason=output.error or "",
        predicted_ttft=output.predicted_ttft,
        retry_after=output.retry_after,
    )


def refusal_in(content: object) -> Refusal | None:
    """Return the refusal that one of the texts of an answer carries; None if none does."""
    try:
        for text in _texts(content):
            if (at := text.find(_MARK, 0, _LONGEST_TEXT)) >= 0:
                details, _ = json.JSONDecoder().raw_decode(text, at + len(_MARK))
                return msgspec.convert(details, Refusal)
    except (ValueError, RecursionError):
        pass
    return None


def _texts(content: object) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for each in content.values() if isinstance(content, dict) else content:
            yield from _texts(each)


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
