"""What the scheduler's process tells the API server, and who else listens: steps, predictions, refusals.

Messages are maps in msgpack over ZeroMQ, from one publisher for each rank to any number of subscribers. A
publisher never waits: messages that a subscriber is too slow for are lost to it. Times are seconds of the
monotonic clock, which all processes of a machine share.

`{"kind": "step", "rank", "stats", "rows", "counts", "preempted", "finished"}`
    One step that came back (`step_message`).
`{"kind": "request", "event", "request_id", "id", "now", ...}`
    What became of a request of the engine; `id` is the middleware's `slo_id`. The event `added` tells all of
    it (`added_message`), the others what they name (`request_message`): `scheduled` (`num_cached_tokens`),
    `relegated`, `preempted`, `refused` (`status`, `code`, `reason`, `predicted_ttft_ms`, `retry_after_s`, and
    what `added` tells if it was not taken before), `aborted`.
`{"kind": "hello", "rank", "header"}`
    What the publisher is, each few seconds (`hello_message`): a recorder may come at any time.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Literal

import msgspec
import zmq
import zmq.asyncio

from onbeat.core.errors import ConfigError
from onbeat.core.request import Request
from onbeat.core.step import StepStats

logger = logging.getLogger("onbeat.vllm")

Event = Literal["scheduled", "relegated", "preempted", "refused", "aborted"]

HELLO_SECONDS = 2.0
"""How often a publisher says what it is."""
SILENCE_SECONDS = 5 * HELLO_SECONDS
"""One that has said nothing for so long has ended, or hangs."""
_WAITING_MESSAGES = 2**13
"""What a slow subscriber may leave waiting, some seconds of steps; the rest is lost to it."""
_LARGEST_MESSAGE = 2**24
_LAST_WORDS_SECONDS = 1.0
"""That the end of a publisher waits for its thread."""
_TCP = re.compile(r"(tcp://.+:)([0-9]{1,5})", re.ASCII)


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
    """Sends messages to whoever listens, and says every `HELLO_SECONDS` what it is.

    A thread of its own packs and sends them, so that `send` costs the scheduler next to nothing.

    Parameters
    ----------
    address : where to bind; see `rank_address`.
    hello : what it is (`hello_message`), as is the attribute.

    Raises
    ------
    ConfigError : nothing can be bound there.
    """

    def __init__(self, address: str, hello: Mapping[str, Any]) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, _WAITING_MESSAGES)
        self._has_failed = False
        self.hello = hello
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(
                f"telemetry cannot be published at {address} ({error}); choose another address"
            ) from error
        self._messages: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="onbeat-telemetry", daemon=True)
        self._thread.start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Let a message be sent; whoever gives it must not change it any more.

        It neither waits nor raises. Where the thread cannot keep up, the message is lost.
        """
        if self._messages.qsize() < _WAITING_MESSAGES:
            self._messages.put(message)

    def close(self) -> None:
        """Stop; what has not been taken is lost."""
        self._messages.put(None)
        self._thread.join(_LAST_WORDS_SECONDS)

    def _run(self) -> None:
        try:
            next_hello = monotonic()
            while True:
                if (left := next_hello - monotonic()) <= 0:
                    self._send(self.hello)
                    next_hello = monotonic() + HELLO_SECONDS
                    continue
                try:
                    message = self._messages.get(timeout=left)
                except Empty:
                    continue
                if message is None:
                    return
                self._send(message)
        finally:
            self._socket.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
        except (zmq.ZMQError, TypeError, ValueError, OverflowError) as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("telemetry: a message was not sent (said once): %s", error)


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

    async def receive(self) -> dict[str, Any]:
        """Return the next message; what is none is passed over."""
        while True:
            raw = await self._socket.recv()
            try:
                message = msgspec.msgpack.decode(raw)
            except msgspec.MsgspecError:
                continue
            if isinstance(message, dict) and isinstance(message.get("kind"), str):
                return message

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


def step_message(  # noqa: PLR0913 -- what one message holds
    stats: StepStats,
    *,
    rank: int = 0,
    planned: float | None = None,
    rows: Sequence[tuple[str, int, int, bool]] = (),
    counts: Sequence[int] = (),
    preempted: Sequence[str] = (),
    finished: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the message of a step that came back.

    Parameters
    ----------
    stats : of the step, as metrics show it.
    planned : when it was planned; None: when it began.
    rows : (request id, tokens computed before it, new tokens, whether it samples), as vLLM ran them.
    counts : tokens that each row that samples brought.
    preempted : requests that had left the batch when it was planned, since the step before was.
    finished : request id -> `stop`, `length`, `abort` or `error`, of those that the step ended.
    """
    return {
        "kind": "step",
        "rank": rank,
        "stats": stats,
        "planned": stats.start if planned is None else planned,
        "rows": rows,
        "counts": counts,
        "preempted": preempted,
        "finished": finished or {},
    }


def stats_of(message: Mapping[str, Any]) -> StepStats:
    """Return the statistics of a `step` message.

    Raises
    ------
    msgspec.ValidationError : they are not as they should be.
    """
    return msgspec.convert(message.get("stats"), StepStats)


def added_message(
    request: Request, now: float, *, slo_id: str | None = None, predicted_ttft: float | None = None
) -> dict[str, Any]:
    """Return the message of a request that the scheduler has taken in.

    Parameters
    ----------
    request : ours of vLLM's; its `request_id` is vLLM's.
    predicted_ttft : seconds from its arrival; None where nothing predicts.
    """
    slo = request.slo
    return {
        "kind": "request",
        "event": "added",
        "request_id": request.request_id,
        "id": slo_id,
        "now": now,
        "arrival": request.arrival,
        "num_prompt_tokens": len(request.prompt_token_ids),
        "max_tokens": request.sampling.max_tokens,
        "slo": None if slo is None else [slo.ttft, slo.tbt, slo.e2e],
        "slo_class": request.slo_class,
        "weight": request.weight,
        "tenant": request.tenant,
        "shed": str(request.shed),
        "predicted_ttft_ms": None if predicted_ttft is None else predicted_ttft * 1e3,
    }


def request_message(
    event: Event, request_id: str, now: float, *, slo_id: str | None = None, **details: float | str | None
) -> dict[str, Any]:
    """Return the message of what became of a request since it was added."""
    message = {"kind": "request", "event": event, "request_id": request_id, "id": slo_id, "now": now}
    return message | details


def hello_message(header: Mapping[str, Any], *, rank: int = 0) -> dict[str, Any]:
    """Return the message that says what a publisher is.

    Parameters
    ----------
    header : `scheduler` (fields of our `SchedulerConfig`), `engine` (such as `model_name`, `device`,
        `vllm_version`), `max_in_flight_steps` and `step_time`, as a record's header has them.
    """
    return {"kind": "hello", "rank": rank, "header": dict(header)}
