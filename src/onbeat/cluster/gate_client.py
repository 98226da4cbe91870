"""A fleet as a gate sees it whose keeper is another process, on this machine or behind a relay.

The relay passes on what the gates of this machine and a keeper on another one say to each other.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from onbeat.cluster import gate_messages as messages
from onbeat.cluster.clock_offset import clock_id
from onbeat.cluster.front_ends import FrontEnds
from onbeat.cluster.gate import Gate
from onbeat.cluster.gate_host import gates_endpoint
from onbeat.cluster.lease import LeaseRecord
from onbeat.cluster.local_wire import LocalLine, LocalWire
from onbeat.cluster.streams import not_resumed
from onbeat.cluster.wire import Line, shared_keys
from onbeat.core.errors import ConfigError, OnbeatError
from onbeat.core.fleet import ReplicaId, ReplicaView
from onbeat.core.protocols import Delivery, EngineInfo, StepObserver
from onbeat.core.request import Request, RequestOutput
from onbeat.engine.link import CurveKeys
from onbeat.engine.messages import AbortRequests, Fetched, Rejected
from onbeat.metrics.merge import Snapshot
from onbeat.metrics.slo_counts import EndedRequest
from onbeat.version import __version__

_CREEP = 5e-6
"""Seconds by which two clocks may part from one status to the next, 0.1 s later: what a quartz gives."""


class GateClient:
    """Asks a keeper for what clients ask for.

    Parameters
    ----------
    endpoint : of the keeper's wire.
    name : of this gate, which no other has.

    Attributes
    ----------
    info : what is served, once it is connected.
    told : what another keeper is told again, by the number of what is open: verbs and their arguments.
    """

    info: EngineInfo

    def __init__(self, endpoint: str, name: str) -> None:
        self.gate = Gate(self)
        self._clock, self._offset = clock_id(), 0.0
        self._is_known = False
        """Whether the keeper that there is has answered; what is asked for before, it is told then."""
        self._status: messages.Status
        self._has_status = asyncio.Event()
        self._numbers = count()
        self._wishes: dict[int, tuple[messages.Wish, asyncio.Future[Any]]] = {}
        self._asked: dict[str, messages.Ask] = {}
        self.told: dict[int, list[tuple[str, dict[str, Any]]]] = {}
        decode = messages.decode_to_gate
        self._line = LocalLine(
            endpoint, name.encode(), lambda told: self._on_message(decode(told)), self._introduce
        )

    async def connect(self) -> None:
        """Wait until the keeper has said what is served, and how its fleet stands.

        Raises
        ------
        ConfigError : it is of another version of onbeat.
        """
        await self._has_status.wait()
        about = await self.wish("about")
        if about["version"] != __version__:
            raise ConfigError(
                f"the keeper runs onbeat {about['version'][:40]}, this machine {__version__}; install the "
                "same on all machines"
            )
        self.info = msgspec.convert(about["info"], EngineInfo)

    def say_serving(self) -> None:
        """Tell the keeper that clients can connect."""
        self._line.send(messages.Serving())

    def say_counts(self, counts: Snapshot, ended: dict[str, list[EndedRequest]], num_open: int) -> None:
        """Tell the keeper what is counted here, and how many are open; to be called every second."""
        self._line.send(messages.by_keepers_clock(messages.Counted(counts, ended, num_open), self._offset))

    def close(self) -> None:
        """Let go of the keeper, which aborts what is still open."""
        self._line.close()

    def _on_message(self, message: messages.ToGate) -> None:
        now = time.monotonic()
        match message:
            case messages.Delivered():
                messages.by_gates_clock(message, self._offset)
                self._note(message.now, message.outputs)
                self.gate.deliver(message.now, message.outputs, message.replica)
            case messages.Status():
                self._hear_status(message, now)
            case Rejected():
                self._refuse(message.request_id, message.error())
            case messages.Greet():
                self._introduce()
            case messages.Granted(number, error, answer):
                _, wish = self._wishes.pop(number, (None, None))  # None: it was told again
                if wish is not None and not wish.cancelled():
                    if error is None:
                        wish.set_result(answer)
                    else:
                        wish.set_exception(error.error())

    def _introduce(self) -> None:
        """Begin with a keeper; what was said before is for another one, and is said again."""
        self._is_known = False
        adapters = self._status.adapters if self._has_status.is_set() else None
        self._line.send(messages.Open(adapters))

    def _hear_status(self, status: messages.Status, now: float) -> None:
        # by another clock, and a fraction of 1 ms on its way
        late = now - status.made
        offset = min(self._offset + _CREEP, late) if self._is_known else late
        self._offset = 0.0 if status.clock == self._clock else offset
        messages.by_gates_clock(status, self._offset)
        self._status = status
        self.gate.hear(status.made - status.way, now)
        self._has_status.set()
        if not self._is_known:
            self._begin_again()

    def _note(self, now: float, outputs: list[RequestOutput]) -> None:
        """Note how far requests are, so that another keeper can be asked for the rest."""
        for output in outputs:
            if (asked := self._asked.get(output.request_id)) is None:
                continue
            if output.finish_reason is not None:
                del self._asked[output.request_id]
            elif output.new_token_ids:
                asked.token_ids += output.new_token_ids
                asked.first_token_time = asked.first_token_time or now

    def _refuse(self, request_id: str, error: OnbeatError) -> None:
        self._asked.pop(request_id, None)
        self.gate.refuse(request_id, error)

    def _begin_again(self) -> None:
        """Tell another keeper what is open."""
        self._is_known = True
        pending = [wish for wish, _ in self._wishes.values()]
        again = [
            messages.Wish(next(self._numbers), *each, is_again=True)
            for told in self.told.values()
            for each in told
        ]
        for wish in again + pending:
            self._say(wish)
        for request_id, asked in list(self._asked.items()):
            if asked.token_ids and not asked.request.resumes:
                self._refuse(request_id, not_resumed())
            else:
                self._say(asked)
        self._say(messages.Told())

    def _say(self, message: messages.ToKeeper) -> None:
        if self._is_known:
            self._line.send(messages.by_keepers_clock(message, self._offset))

    # --- what its gate asks for, see `Keeper` -------------------------------------------------------------

    hashed_block_size = property(attrgetter("_status.hashed_block_size"))

    def ask(self, request: Request, block_hashes: Sequence[bytes]) -> None:
        asked = self._asked[request.request_id] = messages.Ask(request, list(block_hashes))
        self._say(asked)

    def abort(self, request_id: str) -> None:
        self._asked.pop(request_id, None)
        self._say(AbortRequests([request_id]))

    def fetched(self, num_tokens: Mapping[str, int]) -> None:
        self._say(Fetched(dict(num_tokens)))

    # --- what the server sees of the engine, see `EngineClient` -------------------------------------------

    is_alive = property(attrgetter("_status.is_alive"))
    pulse = property(attrgetter("_status.pulse"))

    def add_observer(self, observer: StepObserver) -> None:
        """Let one more object see what steps deliver here."""
        self.gate.observers.append(observer)

    def generate(self, request: Request) -> AsyncGenerator[Delivery, None]:
        return self.gate.generate(request)

    # --- what it shows of the fleet and asks of it, see `FleetView` ---------------------------------------

    num_waiting = property(attrgetter("_status.num_waiting"))
    is_ready = property(attrgetter("_status.is_ready"))
    seconds_to_ready = property(attrgetter("_status.seconds_to_ready"))
    scaling = property(attrgetter("_status.scaling"))
    adapters = property(attrgetter("_status.adapters"))

    def replicas(self) -> Sequence[ReplicaView]:
        return self._status.replicas

    async def wish(self, verb: str, **arguments: Any) -> Any:
        """Have the keeper do something; return its answer.

        Raises
        ------
        OnbeatError : as the keeper does.
        """
        number = next(self._numbers)
        wish = messages.Wish(number, verb, arguments)
        self._wishes[number] = wish, asyncio.get_running_loop().create_future()
        self._say(wish)
        return await self._wishes[number][1]  # in no name of this frame: its error refers to the frame

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> None:
        await self.wish("load_adapter", name=name, path=path, in_place=in_place)

    async def unload_adapter(self, name: str) -> None:
        await self.wish("unload_adapter", name=name)

    async def drain(self, replica: ReplicaId, *, seconds: float, restarts: bool) -> None:
        await self.wish("drain", replica=replica, seconds=seconds, restarts=restarts)

    async def scale(self, num_replicas: int) -> None:
        await self.wish("scale", num_replicas=num_replicas)

    async def autoscale(self, least: int, most: int) -> None:
        await self.wish("autoscale", least=least, most=most)

    async def restart(self, *, keeper: bool = False) -> None:
        await self.wish("restart", keeper=keeper)

    def expect_end(self) -> None:
        """Nothing depends on it: the keeper ends when it is told itself."""


logger = logging.getLogger("onbeat.cluster")

SILENT_SECONDS = 5.0
"""With a keeper that says nothing for so long a new connection is made: it speaks ten times a second."""


class GateRelay:
    """Takes the place of a keeper for the gates of a machine that has none.

    A gate begins again with each keeper, and with each connection to one. So nothing is lost, and nothing
    comes twice, whatever was on its way when one broke.

    Parameters
    ----------
    folder : for the socket; nobody but this user can enter it.
    front_ends : hear of their signs of life.
    secret : that all machines of the fleet know.
    """

    def __init__(self, folder: Path, front_ends: FrontEnds, secret: str) -> None:
        self._front_ends = front_ends
        public, own = shared_keys(secret, "gate")
        self._keys = CurveKeys(public, own, server=shared_keys(secret, "keeper")[0])
        self._lines: dict[bytes, Line] = {}
        self._address, self._heard = "", 0.0
        self._wire = LocalWire(
            gates_endpoint(folder),
            lambda name, message: self._on_message(name, messages.decode_to_keeper(message)),
            self._lose,
        )

    def follow(self, found: LeaseRecord) -> None:
        """Connect the gates with a keeper, if they are not; to be called every few seconds."""
        now = time.monotonic()
        if found.address == self._address and (not self._lines or now - self._heard < SILENT_SECONDS):
            return
        logger.info("the keeper on %s decides, at %s", found.holder, found.address or "no address yet")
        self._address, self._heard = found.address, now
        for line in self._lines.values():
            line.close(0)
        self._lines.clear()
        for name in self._wire.writers:
            self._wire.send(name, messages.Greet())

    def _on_message(self, name: bytes, message: messages.ToKeeper) -> None:
        self._front_ends.hear(name.decode())
        match message:
            case messages.Serving():
                self._front_ends.on_serving(name.decode())
            case messages.Open():
                self._connect(name)
        if (line := self._lines.get(name)) is not None:
            line.send(message)

    def _connect(self, name: bytes) -> None:
        if (line := self._lines.pop(name, None)) is not None:
            line.close(0)
        if self._address:
            self._lines[name] = Line(
                self._address,
                b"%b/%b" % (name, secrets.token_hex(4).encode()),  # another for each connection
                partial(self._pass_on, name),
                self._keys,
            )

    def _pass_on(self, name: bytes, message: bytes) -> None:
        self._heard = time.monotonic()
        self._wire.send(name, msgspec.Raw(message))

    def _lose(self, name: bytes) -> None:
        if (line := self._lines.pop(name, None)) is not None:
            line.send(messages.Left())
            line.close()

    def close(self) -> None:
        """Pass on nothing more."""
        for name in list(self._lines):
            self._lose(name)
        self._wire.close()
