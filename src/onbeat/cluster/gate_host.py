"""The keeper's side of gates that are processes of their own: what they ask for, and what they are told."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from onbeat.cluster import gate_messages as messages
from onbeat.cluster.client import FleetClient
from onbeat.cluster.front_ends import FrontEnds
from onbeat.cluster.wire import Wire
from onbeat.core.errors import OnbeatError
from onbeat.core.request import RequestOutput
from onbeat.engine.messages import AbortRequests, Fetched, Rejected
from onbeat.metrics.merge import Others
from onbeat.metrics.slo_counts import EndedRequest

logger = logging.getLogger("onbeat.cluster")

FLEET_VERBS = ("load_adapter", "unload_adapter", "drain", "scale", "autoscale", "restart")
"""The methods of `FleetView` that gates may ask for."""
STATUS_SECONDS = 0.1
"""How often gates are told how the fleet stands."""


class GateDesk(Protocol):
    """Answers what a gate asks for beside requests, and what a fleet does."""

    async def answer(self, verb: str, arguments: dict[str, Any]) -> Any:
        """Do something, and return what the gate reads.

        Raises
        ------
        OnbeatError : which the gate raises.
        """

    def close(self) -> None:
        """Hear that the gate is gone."""


class RemoteGate:
    """A `GatePort` to another process.

    Parameters
    ----------
    send : sends it a message; one that is gone gets none.
    desk : answers its wishes.

    Attributes
    ----------
    requests : the ids of those that it asked for, which have not ended.
    num_open : those whose ends it has yet to count.
    way : seconds that the last message of a replica was on its way here.
    """

    def __init__(self, send: Callable[[messages.ToGate], object], desk: GateDesk) -> None:
        self._send, self.desk = send, desk
        self.requests: set[str] = set()
        self.num_open = 0
        self.way = 0.0

    def deliver(self, now: float, outputs: list[RequestOutput], replica: int) -> None:
        self._send(messages.Delivered(now, outputs, replica))
        self.requests.difference_update(
            output.request_id for output in outputs if output.finish_reason is not None
        )

    def refuse(self, request_id: str, error: OnbeatError) -> None:
        self._send(Rejected.by(request_id, error))
        self.requests.discard(request_id)

    def hear(self, made: float, now: float) -> None:
        self.way = max(now - made, 0.0)


class GateHost:
    """Lets gates ask a fleet, and aborts what those had asked for that have died.

    Parameters
    ----------
    client : of the fleet, started.
    folder : for the socket; nobody but this user can enter it.
    front_ends : hear of their signs of life.
    counts : of other processes, as metrics show them.
    on_ended : is called with judged requests that have ended, by class.
    make_desk : makes what answers the other wishes of a new gate.

    Attributes
    ----------
    endpoint : what gates connect to.
    """

    def __init__(
        self,
        client: FleetClient,
        folder: Path,
        front_ends: FrontEnds,
        counts: Others,
        *,
        on_ended: Callable[[str, list[EndedRequest]], None],
        make_desk: Callable[[], GateDesk],
    ) -> None:
        self._client, self._front_ends, self._counts, self._on_ended = client, front_ends, counts, on_ended
        self._make_desk = make_desk
        self._gates: dict[bytes, RemoteGate] = {}
        self._greeted: set[bytes] = set()
        self._ends: dict[bytes, int] = {}
        """Descriptors by which the ends of their processes are seen."""
        self._wire = Wire(
            f"ipc://{folder}/gates",
            decode=messages.decode_to_keeper,
            knows=lambda _: True,
            on_message=self._on_message,
            on_junk=lambda name, why: self._lose(name, why),
        )
        self.endpoint = self._wire.endpoint
        self._wishes: set[asyncio.Task[None]] = set()
        self._telling = asyncio.create_task(self._tell_status(), name="onbeat-gates")

    async def close(self) -> None:
        """Hear of gates no more."""
        for task in (self._telling, *self._wishes):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        for name in list(self._ends):
            self._lose(name, "the keeper ends")
        self._wire.close()

    def _on_message(self, name: bytes, message: messages.ToKeeper) -> None:
        if isinstance(message, messages.Open):
            self._greet(name, message)
            return
        if (gate := self._gates.get(name)) is None:
            if name not in self._greeted:  # another keeper had it; or it is gone, and hears nothing
                self._greeted.add(name)
                self._wire.send(name, messages.Greet())
            return
        match message:
            case messages.Ask(request, block_hashes):
                gate.requests.add(request.request_id)
                gate.num_open += 1
                self._client.ask(message.rest, block_hashes, gate)
            case AbortRequests(request_ids):
                for request_id in gate.requests.intersection(request_ids):
                    self._abort(gate, request_id)
            case Fetched(num_tokens):
                own = gate.requests & num_tokens.keys()
                self._client.fetched({request_id: num_tokens[request_id] for request_id in own})
            case _:
                self._on_other(name, gate, message)

    def _on_other(
        self, name: bytes, gate: RemoteGate, message: messages.Wish | messages.Serving | messages.Counted
    ) -> None:
        match message:
            case messages.Wish():
                task = asyncio.create_task(self._grant(name, gate, message))
                self._wishes.add(task)
                task.add_done_callback(self._wishes.discard)
            case messages.Serving():
                self._front_ends.on_serving(name.decode())
            case messages.Counted(counts, ended, num_open):
                gate.num_open = num_open
                self._front_ends.hear(name.decode())
                self._counts.hear(name.decode(), counts)
                for request_class, requests in ended.items():
                    self._on_ended(request_class, requests)

    def _abort(self, gate: RemoteGate, request_id: str) -> None:
        gate.requests.discard(request_id)
        self._client.abort(request_id)

    def _greet(self, name: bytes, message: messages.Open) -> None:
        if message.adapters is not None:
            self._client.controller.adapters.restore(message.adapters)
        self._gates[name] = gate = RemoteGate(
            lambda message: self._wire.send(name, message), self._make_desk()
        )
        self._client.streams.gates.append(gate)
        self._wire.send(name, self._status(gate))
        try:
            self._ends[name] = end = os.pidfd_open(message.process_id)
        except ProcessLookupError:
            self._lose(name, "its process has ended")
            return
        asyncio.get_running_loop().add_reader(end, self._lose, name, "its process has ended")

    def _lose(self, name: bytes, why: str) -> None:
        """Abort what a gate had asked for, whatever becomes of its process."""
        if (end := self._ends.pop(name, None)) is not None:
            asyncio.get_running_loop().remove_reader(end)
            os.close(end)
        if (gate := self._gates.pop(name, None)) is None:
            return
        self._client.streams.gates.remove(gate)
        self._counts.end(name.decode(), gate.num_open)
        gate.desk.close()
        logger.info("%s is gone (%s), and with it %d requests", name.decode(), why, len(gate.requests))
        for request_id in list(gate.requests):
            self._abort(gate, request_id)

    async def _grant(self, name: bytes, gate: RemoteGate, wish: messages.Wish) -> None:
        error = answer = None
        try:
            if wish.verb in FLEET_VERBS:
                await getattr(self._client, wish.verb)(**wish.arguments)
            else:
                answer = await gate.desk.answer(wish.verb, wish.arguments)
        except OnbeatError as refusal:
            error = Rejected.by("", refusal)
        if self._gates.get(name) is gate:
            if wish.verb in FLEET_VERBS:
                self._wire.send(name, self._status(gate))
            self._wire.send(name, messages.Granted(wish.number, error, answer))

    async def _tell_status(self) -> None:
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            for name, gate in self._gates.items():
                self._wire.send(name, self._status(gate))

    def _status(self, gate: RemoteGate) -> messages.Status:
        client = self._client
        return messages.Status(
            is_alive=client.is_alive,
            pulse=client.pulse,
            num_waiting=client.num_waiting,
            is_ready=client.is_ready,
            seconds_to_ready=client.seconds_to_ready,
            scaling=client.scaling,
            adapters=dict(client.adapters),
            replicas=list(client.replicas()),
            hashed_block_size=client.hashed_block_size,
            way=gate.way,
            made=time.monotonic(),
        )
