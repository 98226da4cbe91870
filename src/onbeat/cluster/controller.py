"""Carries out what a fleet decides, and tells it what happens."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from onbeat.cluster.clock_offset import by_our_clock, by_their_clock
from onbeat.cluster.config import TRANSPORTS
from onbeat.cluster.launcher import Launcher, ReplicaSpec
from onbeat.cluster.life import SILENT_SECONDS, STEP_LIMITS, SUSPENDED_SECONDS, Life
from onbeat.cluster.listener import Listener
from onbeat.cluster.live_moves import LiveMoves
from onbeat.cluster.open_request import OpenRequest
from onbeat.cluster.rolling_restart import restart_all
from onbeat.cluster.wire import Wire
from onbeat.core.errors import ConfigError, EngineDead, OnbeatError
from onbeat.core.fleet import DRAIN_SECONDS, ReplicaId
from onbeat.core.hang import find_hang
from onbeat.core.protocols import EngineInfo, EnginePulse
from onbeat.engine.messages import (
    AbortRequests,
    AddRequest,
    Died,
    FromEngine,
    Heartbeat,
    Leaving,
    MoveAnswer,
    OpenKV,
    Progress,
    Ready,
    Shutdown,
    StartFailed,
    Stepped,
    ToEngine,
)
from onbeat.engine.process import BuildEngine, EngineLink
from onbeat.engine.rejection import Rejected
from onbeat.scheduler.cluster.events import (
    DrainAsked,
    FleetAction,
    FleetEvent,
    Joined,
    Lost,
    MoveStep,
    Refuse,
    Reported,
    Rescale,
    ScaleAsked,
    ScalingAsked,
    Send,
    Start,
    Stop,
    Tick,
    Withdraw,
)
from onbeat.scheduler.cluster.fleet import Fleet

logger = logging.getLogger("onbeat.cluster")

LOOK_SECONDS = 0.1
"""How often the replicas are looked at, and what is due is done."""
LAST_WORDS_SECONDS = 0.5
"""How long the last message of a process that ended before it was ready may still be on its way."""
STOP_SECONDS = 5.0
"""How long a process that is told to end may take before it is killed."""
FIRST_START_SECONDS = 5.0
"""What a start is expected to take before there was one."""
GROUP_SIGNAL_SECONDS = 0.5
"""Who ends a service signals all of its processes: so long the server's own may still be on its way."""

START_TIMEOUT_SECONDS = 600.0
"""A replica that is not placed, or says nothing, for so long while it starts is given up."""

MakeBuild = Callable[[ReplicaId, int], BuildEngine]
"""From a replica and the number of lives that it had to what makes its engine, in its process."""


class FleetController:
    """Holds the lives of all replicas.

    Parameters
    ----------
    fleet : decides.
    launcher : starts and ends processes; closed with this.
    make_build : makes the engines.
    requests : those that are open, by id.
    listener : hears what concerns them.
    on_progress : called with one line of text at a time while engines start.
    start_timeout : seconds after which a replica that says nothing while it starts is given up.
    kv_transports : by which replicas copy KV from one another, the best first; without any no stream moves.

    Attributes
    ----------
    lives : the present life of each replica that has one, the ready and the starting.
    is_open : whether all have been ready once; before, a start that fails ends that of all.
    is_ending : whether the server itself is about to end: then replicas that are told to do not leave before.
    """

    def __init__(  # noqa: PLR0913 -- who decides, who starts, and who hears of it
        self,
        fleet: Fleet,
        launcher: Launcher,
        make_build: MakeBuild,
        *,
        requests: Mapping[str, OpenRequest],
        listener: Listener,
        on_progress: Callable[[str], None],
        start_timeout: float = START_TIMEOUT_SECONDS,
        kv_transports: Sequence[str] = TRANSPORTS["auto"],
    ) -> None:
        self.fleet = fleet
        self._start_timeout = start_timeout
        self.lives: dict[ReplicaId, Life] = {}
        self.is_open = False
        self.is_ending = False
        self._launcher = launcher
        self._make_build = make_build
        self._requests = requests
        self._listener = listener
        self._on_progress = on_progress
        self._kv_transports = list(kv_transports)
        self._kv_key = secrets.token_bytes(32)
        self._moves = LiveMoves(
            self,
            requests,
            on_moved=listener.on_moved,
            on_stayed=listener.on_stayed,
            on_copied=listener.on_copied,
        )
        self._by_name: dict[bytes, Life] = {}
        self._num_lives: dict[ReplicaId, int] = {}
        self._starts: dict[ReplicaId, asyncio.Task[None]] = {}
        self._ends: dict[ReplicaId, asyncio.Task[None]] = {}
        self._events: deque[FleetEvent] = deque()
        self._is_telling = False
        self._open_wire: Wire | None = None
        self._look: asyncio.Task[None] | None = None
        self._round: asyncio.Task[None] | None = None
        self._start_seconds = FIRST_START_SECONDS
        self._first_error: OnbeatError | None = None
        self.changed = asyncio.Event()
        """Set whenever a replica got ready or was lost."""

    async def open(self, folder: Path) -> None:
        """Bind what replicas connect to, and begin to look after them.

        Parameters
        ----------
        folder : for sockets; nobody but this user can enter it.

        Raises
        ------
        ConfigError : it cannot be bound, or nothing can be started.
        """
        endpoint = await self._launcher.open(folder)
        self._wire = self._open_wire = Wire(
            endpoint,
            knows=self._by_name.__contains__,
            on_message=self._hear,
            on_junk=lambda name, why: self._lose(self._by_name[name], why),
        )
        self._launcher.watch(self._on_process_end)
        self._look = asyncio.create_task(self._look_after(), name="onbeat-fleet")

    async def close(self) -> None:
        """End all replicas."""
        for task in (self._look, self._round, *self._starts.values()):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        for life in list(self.lives.values()):
            self._end(life)
        if self._ends:
            await asyncio.wait(self._ends.values())
        await self._launcher.close()
        if self._open_wire is not None:
            self._open_wire.close()

    def raise_start_error(self) -> None:
        """Raise why a replica could not be started, if none of them is ready or will be.

        Raises
        ------
        OnbeatError : what it said.
        """
        if self._first_error is not None:
            raise self._first_error

    # --- events and actions ---------------------------------------------------------------------------

    def tell(self, event: FleetEvent) -> None:
        """Tell the fleet what happened, and do what it wants done.

        What is done may itself be an event, such as a replica that cannot be reached: it has its turn after.
        """
        self._events.append(event)
        if self._is_telling:
            return
        self._is_telling = True
        try:
            while self._events:
                for action in self.fleet.on_event(self._events.popleft(), time.monotonic()):
                    self._do(action)
        finally:
            self._is_telling = False

    def _do(self, action: FleetAction) -> None:
        match action:
            case Send(replica, request_id):
                self._listener.before_send(action)
                self._send_request(replica, self._requests[request_id], stops=action.stops)
            case Withdraw(replica, request_id):
                opened = self._requests[request_id]
                opened.replica = None
                self.send(replica, AbortRequests([opened.name]))
            case Refuse():
                self._listener.on_refused(action)
            case MoveStep():
                self._moves.do(action)
            case Rescale():
                logger.info("the fleet is to have %s", action)
                self._listener.on_rescaled(action)
            case Start(replica, delay):
                self._starts[replica] = asyncio.create_task(self._start(replica, delay))
            case Stop(replica):
                if (start := self._starts.pop(replica, None)) is not None:
                    start.cancel()
                if (life := self.lives.get(replica)) is not None:
                    self._end(life)

    def _send_request(self, replica: ReplicaId, opened: OpenRequest, *, stops: bool) -> None:
        life = self.lives[replica]
        attempt = opened.next_attempt(replica)
        if offset := self.clock_offset(replica):
            attempt = by_their_clock(attempt, offset)
        self._listener.on_sent(opened)
        if not self._wire.send(life.name, AddRequest(attempt, stops)):
            # After this round: the fleet has sent it more, perhaps, and must hear of the loss once.
            asyncio.get_running_loop().call_soon(self._lose, life, "it has no connection any more")

    def send(self, replica: ReplicaId, message: ToEngine) -> None:
        """Send a message to a replica; it is lost with the replica."""
        if (life := self.lives.get(replica)) is not None:
            self._wire.send(life.name, message)

    def block_size(self, replica: ReplicaId) -> int:
        """Return the tokens of a replica's blocks."""
        return self.lives[replica].limits.block_size

    def clock_offset(self, replica: ReplicaId) -> float:
        """Return by how many seconds a replica's clock is behind this one's."""
        life = self.lives.get(replica)
        return 0.0 if life is None else self._launcher.clock_offset(replica, life.number)

    def _open_kv(self) -> None:
        """Let replicas copy KV from one another, once there are several."""
        ready = [life for life in self.lives.values() if life.info is not None]
        if len(ready) > 1 and self._kv_transports:
            for life in ready:
                if not life.shares_kv:
                    life.shares_kv = True
                    self._wire.send(life.name, OpenKV(self._kv_key, self._kv_transports))

    # --- lives ----------------------------------------------------------------------------------------

    async def _start(self, replica: ReplicaId, delay: float) -> None:
        if (end := self._ends.get(replica)) is not None:
            await end  # two lives would need twice the memory
        await asyncio.sleep(delay)
        number = self._num_lives.get(replica, 0)
        self._num_lives[replica] = number + 1
        life = Life(replica, number, time.monotonic())
        self.lives[replica] = self._by_name[life.name] = life
        link = EngineLink(
            endpoint=self._wire.endpoint,
            identity=life.name,
            leaves_on_sigterm=True,
        )
        door = self._wire.doorkeeper
        try:
            spec = ReplicaSpec(
                replica=replica,
                life=number,
                build=self._make_build(replica, number),
                link=link,
                fleet_key=b"" if door is None else door.public_key,
                admits=partial(self._admit, life),
            )
            life.place = await self._launcher.start(spec)
            life.heard = time.monotonic()
        except asyncio.CancelledError:
            self._forget(life)
            self._launcher.kill(replica, number)
            raise
        except OnbeatError as error:
            self._fail_start(life, error)
        except Exception as error:
            self._fail_start(life, EngineDead(f"{replica} could not be started: {error}"))

    def _admit(self, life: Life, public_key: bytes) -> None:
        life.public_key = public_key
        if self._wire.doorkeeper is not None:
            self._wire.doorkeeper.admit(public_key)

    def _fail_start(self, life: Life, error: OnbeatError) -> None:
        if self._first_error is None:
            self._first_error = error
        self._lose(life, str(error))

    def _forget(self, life: Life) -> None:
        """Let nothing that a life still says count."""
        self._by_name.pop(life.name, None)
        if self._wire.doorkeeper is not None:
            self._wire.doorkeeper.expel(life.public_key)
        if self.lives.get(life.replica) is life:
            del self.lives[life.replica]

    def _lose(self, life: Life, why: str) -> None:
        """Give a life up, whatever becomes of its process."""
        if self.lives.get(life.replica) is not life:
            return
        # Whoever waits for the first start is told by an error.
        logger.log(logging.ERROR if self.is_open else logging.DEBUG, "%s is lost: %s", life.replica, why)
        self._listener.before_loss(life.replica)
        self._listener.on_lost(life.replica)
        self._forget(life)
        self._launcher.kill(life.replica, life.number)
        self.tell(Lost(life.replica, why))
        self.changed.set()

    def _end(self, life: Life) -> None:
        """Tell a process that has nothing left to do to end."""
        self._wire.send(life.name, Shutdown())
        self._forget(life)
        if life.info is None:
            self._launcher.kill(life.replica, life.number)  # it reads nothing before it is ready
        waiting = self._launcher.wait(life.replica, life.number, seconds=STOP_SECONDS)
        task = self._ends[life.replica] = asyncio.create_task(waiting)
        task.add_done_callback(lambda _: self._ends.pop(life.replica, None))

    def _on_process_end(self, replica: ReplicaId, number: int, why: str) -> None:
        life = self.lives.get(replica)
        if life is None or life.number != number:
            return
        self._wire.read()
        if life.info is None:
            # Why it could not start may still be on its way.
            asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self._lose_at_start, life, why)
        else:
            self._lose(life, life.last_words or why)

    def _lose_at_start(self, life: Life, why: str) -> None:
        if self.lives.get(life.replica) is life:
            self._fail_start(life, EngineDead(f"the engine process of {life.replica} ended at start: {why}"))

    async def _look_after(self) -> None:
        """Do what is due, and give up who is silent."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            if self.fleet.next_duty <= now:
                self._tell_deliveries()
            if self.fleet.next_time <= now:
                self.tell(Tick())
            # else this process stood still itself, and messages wait to be read
            if now - before < 5 * LOOK_SECONDS:
                for life in list(self.lives.values()):
                    self._check(life, now)
            before = now

    def _check(self, life: Life, now: float) -> None:
        """Give up a replica that is silent, or whose step does not end."""
        silence = now - life.heard
        if life.info is None:
            if life.place is not None and silence > self._start_timeout:
                why = f"{life.replica} has not got ready and has said nothing for {silence:.0f} s"
                self._fail_start(life, EngineDead(f"{why}; see its log, or give it a longer --start-timeout"))
            return
        if silence >= SUSPENDED_SECONDS and self._launcher.is_suspended(life.replica, life.number):
            why = "its process was stopped, or is out of reach,"
            self._lose(life, f"{why} and has said nothing for {silence:.1f} s")
        elif silence > SILENT_SECONDS:
            self._lose(life, f"it has said nothing for {silence:.0f} s")
        elif (hang := find_hang(life.pulse, STEP_LIMITS, now)) is not None:
            self._lose(life, hang)

    # --- messages -------------------------------------------------------------------------------------

    def _hear(self, name: bytes, message: FromEngine) -> None:
        life = self._by_name[name]
        life.heard = now = time.monotonic()
        if offset := self._launcher.clock_offset(life.replica, life.number):
            message = by_our_clock(message, offset, now)
        self._on_message(life, message)

    def _on_message(self, life: Life, message: FromEngine) -> None:
        match message:
            case Stepped(outputs):
                life.pulse = EnginePulse(outputs.now)
                if outputs.load is not None:
                    life.load = outputs.load
                    self.tell(Reported(life.replica, outputs.load))
                self._listener.on_stepped(life, outputs)
            case Heartbeat(pulse):
                life.pulse = pulse
            case Rejected() as rejected:
                self._listener.on_rejected(life, rejected)
            case Progress() | Ready() | StartFailed():
                self._on_start_message(life, message)
            case MoveAnswer():
                self._moves.on_answer(life.replica, message)
            case Leaving():
                asyncio.get_running_loop().call_later(GROUP_SIGNAL_SECONDS, self._let_leave, life)
            case Died(text):
                life.last_words = text
                self._lose(life, text)

    def _on_start_message(self, life: Life, message: Progress | Ready | StartFailed) -> None:
        match message:
            case Progress(text):
                self._on_progress(text if life.replica == "r0" else f"{life.replica}: {text}")
            case Ready(info):
                self._on_ready(life, info)
            case StartFailed(text, is_user_error):
                self._fail_start(life, ConfigError(text) if is_user_error else EngineDead(text))

    def _on_ready(self, life: Life, info: EngineInfo) -> None:
        life.info = info
        self._start_seconds = life.heard - life.started
        life.pulse = EnginePulse(life.heard)
        logger.info("%s is ready", life.replica)
        self._starts.pop(life.replica, None)
        self._open_kv()
        limits = life.limits
        may_move = limits.moves_streams and bool(self._kv_transports)
        self.tell(Joined(life.replica, replace(limits, moves_streams=may_move)))
        self.changed.set()

    def scale(self, num_replicas: int) -> None:
        """Ask for a number of replicas."""
        self._tell_deliveries()
        self.tell(ScaleAsked(num_replicas))

    def autoscale(self, least: int, most: int) -> None:
        """Let the fleet decide on the number of replicas, between two."""
        self._tell_deliveries()
        self.tell(ScalingAsked(least, most))

    def _tell_deliveries(self) -> None:
        """Let the fleet know how far all requests are, before it decides where they go on."""
        for replica in list(self.lives):
            self._listener.before_loss(replica)

    def restart(self) -> None:
        """Begin to start all replicas again, one after another; one such round at a time."""
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(restart_all(self), name="onbeat-rolling-restart")

    @property
    def endpoint(self) -> str:
        """What replicas connect to."""
        return self._wire.endpoint

    @property
    def seconds_to_ready(self) -> float:
        """Seconds until the next replica is expected to be ready, by what the last start took."""
        now = time.monotonic()
        starting = [life.started for life in self.lives.values() if life.info is None]
        return max(self._start_seconds - (now - min(starting, default=now)), 1.0)

    def _let_leave(self, life: Life) -> None:
        if not self.is_ending and self.lives.get(life.replica) is life:
            logger.info("%s was told to end: it drains and is started again", life.replica)
            self.drain(life.replica, seconds=DRAIN_SECONDS, restarts=True)

    def drain(self, replica: ReplicaId, *, seconds: float, restarts: bool) -> None:
        """End a replica without loss; what runs there may take so long."""
        self._listener.before_loss(replica)
        self.tell(DrainAsked(replica, seconds, restarts))
