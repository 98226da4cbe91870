"""The keeper's side of gates that are processes of their own: what they ask for, and what they are told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from onbeat.cluster import gate_messages as messages
from onbeat.cluster.client import FleetClient
from onbeat.cluster.clock_offset import clock_id
from onbeat.cluster.front_ends import SILENT_SECONDS, FrontEnds
from onbeat.cluster.local_wire import LocalWire
from onbeat.cluster.processes import end_tasks
from onbeat.cluster.wire import Wire, shared_keys
from onbeat.core.errors import OnbeatError
from onbeat.core.request import RequestOutput
from onbeat.engine.messages import AbortRequests, Fetched, Rejected
from onbeat.metrics.merge import Others
from onbeat.metrics.slo_counts import EndedRequest
from onbeat.version import __version__

logger = logging.getLogger("onbeat.cluster")
_Wire: TypeAlias = LocalWire | Wire[messages.ToKeeper]

FLEET_VERBS = ("load_adapter", "unload_adapter", "drain", "scale", "autoscale", "restart")
"""The methods of `FleetView` that gates may ask for."""
STATUS_SECONDS = 0.1
"""How often gates are told how the fleet stands."""


def gates_endpoint(folder: Path) -> str:
    """Return what gates of this machine connect to, in a folder that nobody but this user can enter."""
    return str(folder / "gates")


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
    name : of the gate.
    send : sends it a message; one that is gone gets none.
    desk : answers its wishes.
    is_far : whether it is on another machine.

    Attributes
    ----------
    heard : when it said anything last.
    requests : the ids of those that it asked for, which have not ended.
    num_open : those whose ends it has yet to count.
    """

    def __init__(
        self, name: str, send: Callable[[messages.ToGate], object], desk: GateDesk, *, is_far: bool
    ) -> None:
        self.name, self.send, self.desk, self.is_far = name, send, desk, is_far
        self.heard = time.monotonic()
        self.requests: set[str] = set()
        self.num_open = 0

    def deliver(self, now: float, outputs: list[RequestOutput], replica: int) -> None:
        self.send(messages.Delivered(now, outputs, replica))
        self.requests.difference_update(
            output.request_id for output in outputs if output.finish_reason is not None
        )

    def refuse(self, request_id: str, error: OnbeatError) -> None:
        self.send(Rejected.by(request_id, error))
        self.requests.discard(request_id)


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
    endpoint : what gates of this machine connect to.
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
        self._clock = clock_id()
        self._gates: dict[bytes, RemoteGate] = {}
        self.endpoint = gates_endpoint(folder)
        self._wire = LocalWire(
            self.endpoint,
            lambda name, message: self._on_message(self._wire, name, messages.decode_to_keeper(message)),
            lambda name: self._lose(name, "its process has ended"),
        )
        self._wires: list[_Wire] = [self._wire]
        self._wishes: set[asyncio.Task[None]] = set()
        self._telling = asyncio.create_task(self._tell_status(), name="onbeat-gates")

    def open_far(self, endpoint: str, secret: str) -> str:
        """Let gates of other machines ask that know a secret; return what they connect to."""
        wire = Wire(
            endpoint,
            decode=messages.decode_to_keeper,
            knows=lambda _: True,
            on_message=lambda name, message: self._on_message(wire, name, message),
            on_junk=self._lose,
            keys=shared_keys(secret, "keeper"),
        )
        self._wires.append(wire)
        assert wire.access is not None, "other machines connect by tcp"
        wire.access.admit(shared_keys(secret, "gate")[0])
        return wire.endpoint

    async def close(self) -> None:
        """Hear of gates no more."""
        await end_tasks((self._telling, *self._wishes))
        for name in list(self._gates):
            self._lose(name, "the keeper ends")
        for wire in self._wires:
            wire.close()

    def _on_message(self, wire: _Wire, name: bytes, message: messages.ToKeeper) -> None:
        if isinstance(message, messages.Open):
            self._greet(wire, name, message)
            return
        if (gate := self._gates.get(name)) is None:
            wire.send(name, messages.Greet())  # it was silent for long; or it is gone, and hears nothing
            return
        gate.heard = time.monotonic()
        match message:
            case messages.Ask(request, block_hashes):
                gate.requests.add(request.request_id)
                gate.num_open += 1
                self._client.ask(message.rest, block_hashes, gate)
            case AbortRequests(request_ids):
                self._abort(gate, gate.requests.intersection(request_ids))
            case Fetched(num_tokens):
                own = gate.requests & num_tokens.keys()
                self._client.fetched({request_id: num_tokens[request_id] for request_id in own})
            case _:
                self._on_other(name, gate, message)

    def _on_other(self, name: bytes, gate: RemoteGate, message: messages.ToKeeper) -> None:
        match message:
            case messages.Wish():
                task = asyncio.create_task(self._grant(name, gate, message))
                self._wishes.add(task)
                task.add_done_callback(self._wishes.discard)
            case messages.Serving():
                self._front_ends.on_serving(gate.name)
            case messages.Told():
                self._front_ends.on_told(gate.name)
            case messages.Left():
                self._lose(name, "its process has ended")
            case messages.Counted(counts, ended, num_open):
                gate.num_open = num_open
                self._front_ends.hear(gate.name)
                self._counts.hear(gate.name, counts)
                for request_class, requests in ended.items():
                    self._on_ended(request_class, requests)

    def _abort(self, gate: RemoteGate, request_ids: set[str]) -> None:
        for request_id in list(request_ids):
            gate.requests.discard(request_id)
            self._client.abort(request_id)

    def _greet(self, wire: _Wire, name: bytes, message: messages.Open) -> None:
        if message.adapters is not None:
            self._client.controller.adapters.restore(message.adapters)
        own = name.partition(b"/")[0].decode()
        for other in [other for other, gate in self._gates.items() if gate.name == own]:
            self._lose(other, "it has connected again", has_ended=False)
        is_far = wire is not self._wire
        send = partial(wire.send, name)
        self._gates[name] = RemoteGate(own, send, self._make_desk(), is_far=is_far)
        send(self._status())

    def _lose(self, name: bytes, why: str, *, has_ended: bool = True) -> None:
        """Abort what a gate had asked for, whatever becomes of its process."""
        if (gate := self._gates.pop(name, None)) is None:
            return
        if has_ended:  # else it goes on with what it has counted
            self._counts.end(gate.name, gate.num_open)
        gate.desk.close()
        logger.info("%s is gone (%s), and with it %d requests", gate.name, why, len(gate.requests))
        self._abort(gate, gate.requests)

    async def _grant(self, name: bytes, gate: RemoteGate, wish: messages.Wish) -> None:
        error = answer = None
        try:
            if wish.verb in FLEET_VERBS:
                await getattr(self._client, wish.verb)(**wish.arguments)
            elif wish.verb == "about":
                answer = {"version": __version__, "info": self._client.info}
            else:
                if not wish.is_again:  # what others have of a key's limits, or of a job, is to be known
                    await self._front_ends.have_told.wait()
                answer = await gate.desk.answer(wish.verb, wish.arguments)
        except OnbeatError as refusal:
            error = Rejected.by("", refusal)
        if self._gates.get(name) is gate:
            if wish.verb in FLEET_VERBS:
                gate.send(self._status())
            gate.send(messages.Granted(wish.number, error, answer))

    async def _tell_status(self) -> None:
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            status = self._status()
            for name, gate in list(self._gates.items()):
                gate.send(status)
                if gate.is_far and time.monotonic() - gate.heard > SILENT_SECONDS:
                    self._lose(name, f"it has said nothing for {SILENT_SECONDS:.0f} s", has_ended=False)

    def _status(self) -> messages.Status:
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
            way=client.gate.hand_out.way,
            made=time.monotonic(),
            clock=self._clock,
        )
