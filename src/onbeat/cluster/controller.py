"""Carries out what a fleet decides, and tells it what happens.

Moves between live replicas: the names and clocks of the two, and whose tokens count.
LoRA adapters: all that are loaded are on every ready replica.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from onbeat.cluster.clock_offset import by_our_clock, by_their_clock
from onbeat.cluster.launcher import Launcher
from onbeat.cluster.life import Life, other_blocks, other_files, other_version
from onbeat.cluster.processes import START_TIMEOUT_SECONDS, MakeBuild, Processes, end_tasks
from onbeat.cluster.streams import OpenRequest, Origin, Streams
from onbeat.cluster.wire import Wire
from onbeat.core.errors import ConfigError, EngineDead, InvalidRequest
from onbeat.core.fleet import DRAIN_SECONDS, ReplicaId
from onbeat.core.handover import Detached, MoveTask, MoveVerb, TaskAnswer
from onbeat.core.protocols import EngineInfo, EnginePulse
from onbeat.core.request import Adapter, Request
from onbeat.engine import messages
from onbeat.engine.kv_access import KVSource
from onbeat.engine.messages import AdapterAnswer, LoadAdapter
from onbeat.scheduler.cluster import events
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.membership import ReplicaState
from onbeat.scheduler.cluster.moves import MoveExecutor, OpenMove

logger = logging.getLogger("onbeat.cluster")


class FleetAdapters:
    """Has replicas load adapters, and knows which there are.

    An engine has room for so many adapters, and a step may be of all that it has. So no adapter leaves an
    engine, and none takes its place, while a request still has it.

    Parameters
    ----------
    send : sends a replica a message.
    lives : the present life of each replica.
    requests : those that are open.
    changed : is set whenever a replica got ready or was lost, and here when one has answered.

    Attributes
    ----------
    by_name : those that requests may ask for.
    """

    def __init__(
        self,
        send: Callable[[ReplicaId, LoadAdapter], None],
        lives: Mapping[ReplicaId, Life],
        requests: Mapping[str, OpenRequest],
        changed: asyncio.Event,
    ) -> None:
        self.by_name: dict[str, Adapter] = {}
        self._send, self._lives, self._requests, self._changed = send, lives, requests, changed
        self._last_number, self._is_restored = 0, False
        self._one_by_one = asyncio.Lock()

    def introduce(self, life: Life) -> None:
        """Have a replica that got ready load all there are, before its first request."""
        needed = self._needed()
        for adapter in needed:
            self._send(life.replica, LoadAdapter(adapter, [each.number for each in needed]))

    def restore(self, by_name: dict[str, Adapter]) -> None:
        """Have what requests may ask for since a keeper before this one; of what gates say the newest counts.

        Replicas that knew no keeper before have yet to load it, and others may have let go of it.
        """
        known = self.by_name if self._is_restored else {}
        newer = {
            name for name, each in by_name.items() if name not in known or each.number > known[name].number
        }
        self.by_name, self._is_restored = known | {name: by_name[name] for name in newer}, True
        self._last_number = max([self._last_number, *(each.number for each in by_name.values())])
        for life in self._lives.values():
            if newer and life.info is not None:
                self.introduce(life)

    def hear(self, life: Life, answer: AdapterAnswer) -> None:
        """Take what a replica says of an adapter."""
        life.adapters[answer.number] = answer.error
        if answer.error is not None:
            logger.warning("%s: %s", life.replica, answer.error)
        self._changed.set()

    async def load(self, name: str, path: str, *, most: int, in_place: bool = False) -> None:
        """Load an adapter on every ready replica; see `FleetView.load_adapter`.

        Parameters
        ----------
        most : adapters that an engine has room for.
        """
        async with self._one_by_one:
            if name in self.by_name and not in_place:
                raise InvalidRequest(
                    f"the LoRA adapter {name!r} is loaded already; unload it first, or send load_inplace",
                    param="lora_name",
                )
            needed = self._needed(without=name)
            if len(needed) >= most:
                told = ", ".join(sorted({each.name for each in needed}))
                raise InvalidRequest(
                    f"there is room for {most} LoRA adapters, and {told} are loaded or still have running "
                    "requests; unload one first, or start the server with a larger --max-loras",
                    param="lora_name",
                    code="too_many_adapters",
                )
            self._last_number += 1
            adapter = Adapter(name, path, self._last_number)
            asked = [life for life in self._lives.values() if life.info is not None]
            for life in asked:
                self._send(life.replica, LoadAdapter(adapter, [each.number for each in needed]))
            if errors := await self._answers(adapter.number, asked):
                raise InvalidRequest(errors[0], param="lora_path", code="adapter_not_loaded")
            self._take(adapter, asked)

    async def _answers(self, number: int, asked: list[Life]) -> list[str]:
        """Wait until replicas have answered, or are lost; return what went wrong."""
        while any(self._lives.get(life.replica) is life and number not in life.adapters for life in asked):
            self._changed.clear()
            await self._changed.wait()
        return [error for life in asked if (error := life.adapters.get(number)) is not None]

    def _take(self, adapter: Adapter, asked: list[Life]) -> None:
        """Let requests ask for an adapter; replicas that got ready while it was loaded get it, too."""
        self.by_name[adapter.name] = adapter
        for life in self._lives.values():
            if life.info is not None and life not in asked:
                self.introduce(life)

    def _needed(self, *, without: str | None = None) -> list[Adapter]:
        """Return the adapters that requests have or may ask for.

        Parameters
        ----------
        without : name of one that no further request asks for.
        """
        named = [each for each in self.by_name.values() if each.name != without]
        running = [each.request.adapter for each in self._requests.values()]
        return list(dict.fromkeys((*named, *filter(None, running))))


_Move = OpenMove[OpenRequest, KVSource]


class LiveMoves(MoveExecutor[OpenRequest, KVSource]):
    """The moves under way between live replicas.

    Parameters
    ----------
    replicas : who sends messages, and whose streams hear and count what becomes of moves.
    """

    def __init__(self, replicas: FleetController) -> None:
        super().__init__()
        self._replicas, self._streams = replicas, replicas.streams

    def on_answer(self, replica: ReplicaId, answer: TaskAnswer[KVSource]) -> None:
        """Take what a replica says of a step."""
        move = self.moves.get(answer.move)
        if move is None:
            return
        if not answer.ok:
            logger.info(
                "%s: %s of %s failed: %s", replica, answer.verb, move.name, answer.why or "it has ended"
            )
        self._streams.counts.num_moved_bytes += answer.num_bytes
        if answer.detached is not None:
            answer.detached = _shifted(answer.detached, self._replicas.clock_offset(replica))
        super().on_answer(replica, answer)

    def tell(self, event: events.Answered) -> None:
        """Tell the fleet what happened."""
        self._replicas.tell(event)

    def num_tokens_in(self, replica: ReplicaId, num_blocks: int) -> int:
        """Return the tokens of a request that holds so many of a replica's blocks."""
        limits = self._replicas.lives[replica].limits
        return limits.windows.num_token_blocks(num_blocks) * limits.block_size

    def send(self, replica: ReplicaId, task: MoveTask[KVSource]) -> None:
        """Send a task to a replica."""
        self._replicas.send(replica, messages.AskMove(task))

    def whereabouts(self, request: OpenRequest) -> tuple[ReplicaId, str]:
        """Return the replica that has a request, and its name there."""
        assert request.replica is not None
        return request.replica, request.name

    def adoption(
        self,
        move_id: str,  # noqa: ARG002
        move: _Move,
        destination: ReplicaId,
    ) -> tuple[Request, Detached] | None:
        """Return a request under another name, by the destination's clock."""
        detached, open_request = move.detached, move.request
        assert detached is not None
        if list(detached.output_token_ids) != open_request.token_ids:
            logger.error("%s left %s with other tokens than it delivered", move.name, move.source)
            return None
        offset = self._replicas.clock_offset(destination)
        request = by_their_clock(open_request.next_name(), offset)
        return detached.moved(request), _shifted(detached, -offset)

    def hand_over(self, move: _Move, destination: ReplicaId) -> None:
        """Take a request's tokens from its destination."""
        open_request = move.request
        open_request.move_to(destination, move.adopted)
        self._streams.on_moved(open_request, Origin(move.source, move.name, move.why))


def _shifted(detached: Detached, seconds: float) -> Detached:
    """Return what is told of a request with all times so much later."""
    deadlines = detached.deadlines
    if not seconds:
        return detached
    if deadlines is not None:
        deadlines = replace(
            deadlines,
            ttft_deadline=deadlines.ttft_deadline + seconds,
            next_deadline=deadlines.next_deadline + seconds,
            first_delivery=deadlines.first_delivery + seconds,
            last_delivery=deadlines.last_delivery + seconds,
        )
    return replace(detached, scheduled_time=detached.scheduled_time + seconds, deadlines=deadlines)


LOOK_SECONDS = 0.1
"""How often the replicas are looked at, and what is due is done."""
GROUP_SIGNAL_SECONDS = 0.5
"""Who ends a service signals all of its processes: so long the server's own may still be on its way."""


class FleetController:
    """Stands between what decides about a fleet and the processes that hold its replicas.

    Parameters
    ----------
    fleet : decides.
    launcher : starts and ends processes; closed with this.
    make_build : makes the engines.
    on_progress : called with one line of text at a time while engines start.
    start_timeout : seconds after which a replica that gets no place, or says nothing, while it starts is
        given up.
    moves_kv : whether replicas copy KV from one another; else no stream moves.

    Attributes
    ----------
    streams : of the requests that have not ended.
    processes : hold the replicas.
    adapters : the LoRA adapters that they have.
    lives : the present life of each replica that has one, the ready and the starting.
    kv_key : by which replicas let one another copy KV; to be set before they start, if at all.
    is_open : whether all have been ready once; before, a start that fails ends that of all.
    is_ending : whether the server itself is about to end: then replicas that are told to do not leave before.
    """

    def __init__(
        self,
        fleet: Fleet,
        launcher: Launcher,
        make_build: MakeBuild,
        *,
        on_progress: Callable[[str], None] = lambda _: None,
        start_timeout: float = START_TIMEOUT_SECONDS,
        moves_kv: bool = True,
    ) -> None:
        self.fleet = fleet
        self.processes = Processes(launcher, make_build, on_lost=self._lose, start_timeout=start_timeout)
        self.lives = self.processes.lives
        self.is_open = False
        self.is_ending = False
        self._launcher = launcher
        self.streams = streams = Streams(self.tell)
        self._on_progress = on_progress
        self._moves_kv = moves_kv
        self.kv_key = secrets.token_bytes(32)
        self._moves = LiveMoves(self)
        self._dispatcher = events.EventDispatcher(fleet.on_event, self)
        self._open_wire: Wire[messages.FromEngine] | None = None
        self._look: asyncio.Task[None] | None = None
        self._first_info: EngineInfo | None = None
        self._round: asyncio.Task[None] | None = None
        self.on_heard: Callable[[float, float], None] = lambda _made, _now: None
        """Hears when a message of a replica was made, and when it came; there are two a second at least."""
        self.changed = asyncio.Event()
        """Set whenever a replica got ready, was lost or was told to end."""
        self.adapters = FleetAdapters(self.send, self.lives, streams.open, self.changed)

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
            decode=messages.decode_from_engine,
            knows=self.processes.by_name.__contains__,
            on_message=self._hear,
            on_junk=lambda name, why: self._lose(self.processes.by_name[name], why),
        )
        self.processes.open(self._wire)
        self._look = asyncio.create_task(self._look_after(), name="onbeat-fleet")

    async def close(self) -> None:
        """End all replicas."""
        await end_tasks(filter(None, (self._look, self._round)))
        await self.processes.close()
        await self._launcher.close()
        if self._open_wire is not None:
            self._open_wire.close()

    # --- events and actions ---------------------------------------------------------------------------

    def tell(self, event: events.FleetEvent) -> None:
        """Tell the fleet what happened, and do what it wants done."""
        self._dispatcher.dispatch(event, time.monotonic())

    def do_send(self, action: events.Send, now: float) -> None:
        """Send a request to a replica."""
        self.streams.before_send(action, now)
        life, open_request = self.lives[action.replica], self.streams.open[action.request_id]
        attempt = open_request.next_attempt(action.replica)
        if offset := self.clock_offset(action.replica):
            attempt = by_their_clock(attempt, offset)
        self.streams.on_sent(open_request)
        if not self._wire.send(life.name, messages.AddRequest(attempt, action.stops)):
            # After this round: the fleet has sent it more, perhaps, and must hear of the loss once.
            asyncio.get_running_loop().call_soon(self._lose, life, "it has no connection any more")

    def do_withdraw(self, action: events.Withdraw, now: float) -> None:  # noqa: ARG002
        """Take a request from a replica."""
        open_request = self.streams.open[action.request_id]
        open_request.replica = None
        self.send(action.replica, messages.AbortRequests([open_request.name]))

    def do_refuse(self, action: events.Refuse, now: float) -> None:  # noqa: ARG002
        """End a request."""
        self.streams.on_refused(action)

    def do_move_step(self, action: events.MoveStep, now: float) -> None:  # noqa: ARG002
        """Have a step of a move taken."""
        move = self._moves.moves.get(action.move)
        if action.verb is MoveVerb.RELEASE and move is not None:
            self.streams.counts.moves[move.why, "stayed"] += 1
        self._moves.do(action, self.streams.open.get(action.request_id))

    def do_rescale(self, action: events.Rescale, now: float) -> None:  # noqa: ARG002
        """Say that there is to be another number of replicas."""
        why = [f"{action.late_share:.1%} of the last minute's requests late or expected to be"]
        if action.planned_share is not None:
            why.insert(0, f"planned is {action.planned_share:.2f}")
        if action.share is not None:
            why.insert(0, f"the last minute's load takes {action.share:.2f} of their time")
        numbers = f"{action.num_replicas} replicas in place of {action.num_before}"
        logger.info("the fleet now wants %s, because of %s: %s", numbers, action.why, ", ".join(why))
        direction = "up" if action.num_replicas > action.num_before else "down"
        self.streams.counts.rescales[direction, action.why] += 1

    def do_start(self, action: events.Start, now: float) -> None:  # noqa: ARG002
        """Start a replica."""
        self.processes.start(action.replica, action.delay)

    def do_stop(self, action: events.Stop, now: float) -> None:  # noqa: ARG002
        """End a replica."""
        self.processes.stop(action.replica)
        self.changed.set()

    def send(self, replica: ReplicaId, message: messages.ToEngine) -> None:
        """Send a message to a replica; it is lost with the replica."""
        if (life := self.lives.get(replica)) is not None:
            self._wire.send(life.name, message)

    def clock_offset(self, replica: ReplicaId) -> float:
        """Return by how many seconds a replica's clock is behind this one's."""
        life = self.lives.get(replica)
        return 0.0 if life is None else self._launcher.clock_offset(replica, life.number)

    def _open_kv(self) -> None:
        """Let replicas copy KV from one another, once there are several."""
        ready = [life for life in self.lives.values() if life.info is not None]
        if len(ready) > 1 and self._moves_kv:
            for life in ready:
                if not life.shares_kv:
                    life.shares_kv = True
                    self._wire.send(life.name, messages.OpenKV(self.kv_key))

    # --- lives ----------------------------------------------------------------------------------------

    def _lose(self, life: Life, why: str) -> None:
        """Give a life up, whatever becomes of its process."""
        if self.lives.get(life.replica) is not life:
            return
        # Whoever waits for the first start is told by an error.
        logger.log(logging.ERROR if self.is_open else logging.DEBUG, "%s is lost: %s", life.replica, why)
        self.streams.before_loss(life.replica)
        self.streams.on_lost(life.replica)
        self.processes.kill(life)
        self.tell(events.Lost(life.replica, why, life.num_taken))
        self.changed.set()

    async def _look_after(self) -> None:
        """Do what is due, and give up who is silent."""
        self.processes.check(time.monotonic())
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            if self.fleet.next_duty <= now:
                self._tell_deliveries()
            if self.fleet.next_time <= now:
                self.tell(events.Tick())
            self.processes.check(now)

    # --- messages -------------------------------------------------------------------------------------

    def _hear(self, name: bytes, message: messages.FromEngine) -> None:
        life = self.processes.by_name[name]
        life.heard = now = time.monotonic()
        if life.place is not None and life.place.name and not life.version:
            # what it says until it has begun again is of requests of another keeper
            life.is_greeted = life.is_greeted or self._wire.send(life.name, messages.Greet())
            if not isinstance(message, messages.Hello):
                return
        if offset := self._launcher.clock_offset(life.replica, life.number):
            message = by_our_clock(message, offset, now)
        self._on_message(life, message)

    def _on_message(self, life: Life, message: messages.FromEngine) -> None:
        match message:
            case messages.Stepped(outputs):
                self.on_heard(outputs.now, life.heard)
                life.pulse = EnginePulse(outputs.now)
                if outputs.load is not None:
                    life.load = self.streams.before_report(life.replica, outputs.load)
                    self.tell(events.Reported(life.replica, life.load))
                self.streams.on_stepped(life, outputs)
            case messages.Heartbeat(pulse, num_taken):
                self.on_heard(pulse.time, life.heard)
                life.pulse, life.num_taken = pulse, num_taken
            case messages.Rejected() as rejected:
                self.streams.on_rejected(life, rejected)
            case messages.Hello() | messages.Progress() | messages.Ready() | messages.StartFailed():
                self._on_start_message(life, message)
            case messages.MoveAnswer():
                self._moves.on_answer(life.replica, message.answer)
            case messages.AdapterAnswer():
                self.adapters.hear(life, message)
            case messages.Leaving():
                asyncio.get_running_loop().call_later(GROUP_SIGNAL_SECONDS, self._let_leave, life)
            case messages.Died(text):
                life.last_words = text
                self._lose(life, text)

    def _on_start_message(
        self, life: Life, message: messages.Hello | messages.Progress | messages.Ready | messages.StartFailed
    ) -> None:
        match message:
            case messages.Hello(version):
                life.version = version
                self._may_join(life, other_version(life))
            case messages.Progress(text):
                self._on_progress(text if life.replica == "r0" else f"{life.replica}: {text}")
            case messages.Ready(info) if life.info is None and self._may_join(life, other_version(life)):
                self._first_info = first = self._first_info or info
                if self._may_join(life, other_files(life.replica, info.file_digests, first.file_digests)):
                    self._on_ready(life, message)
            case messages.StartFailed(text, is_user_error):
                error = ConfigError(text) if is_user_error else EngineDead(text)
                self.processes.fail_start(life, error)

    def _may_join(self, life: Life, why: str | None) -> bool:
        """Give a process up if there is a reason why it cannot join; return whether there is none."""
        if why is not None:
            self.processes.fail_start(life, ConfigError(why))
        return why is None

    def _on_ready(self, life: Life, message: messages.Ready) -> None:
        self.processes.on_ready(life, message.info)
        life.kv_layout = message.kv_layout
        is_first = life.replica == "r0" and not life.number  # which the server's own line says
        logger.log(logging.DEBUG if is_first else logging.INFO, "%s is ready", life.replica)
        self._open_kv()
        self.adapters.introduce(life)
        limits = life.limits
        if (difference := other_blocks(life, self.lives.values())) is not None:
            logger.warning("streams do not move to %s or from it; %s", life.replica, difference)
        may_move = limits.moves_streams and self._moves_kv and difference is None
        self.tell(events.Joined(life.replica, replace(limits, moves_streams=may_move)))
        self.changed.set()

    def check_capacity(self, num_replicas: int) -> None:
        """Raise ConfigError where a fleet of so many replicas does not fit."""
        most, limit = self._launcher.capacity()
        if num_replicas > most:
            raise ConfigError(
                f"{num_replicas} replicas do not fit: at most {most} have room here ({limit}); ask for fewer"
            )

    def ask(self, event: events.ScaleAsked | events.ScalingAsked) -> None:
        """Ask for a number of replicas, or let the fleet decide on it between two."""
        self._tell_deliveries()
        self.tell(event)

    def _tell_deliveries(self) -> None:
        """Let the fleet know how far all requests are, before it decides where they go on."""
        for replica in list(self.lives):
            self.streams.before_loss(replica)

    def restart(self) -> None:
        """Begin to start all replicas again, one after another; one such round at a time.

        Raises
        ------
        InvalidRequest : the round before is under way.
        """
        if self._round is not None and not self._round.done():
            known = (each.replica for each in self.fleet.replicas())
            coming = ", ".join(replica for replica in known if self.fleet.is_coming(replica))
            raise InvalidRequest(
                f"a restart of all replicas is under way and waits for {coming or 'the next'}; "
                "ask again once all are ready",
                code="restart_under_way",
            )
        self._round = asyncio.create_task(self._restart_each(), name="onbeat-rolling-restart")

    async def _restart_each(self) -> None:
        """Drain and start each replica that is ready; wait for each before the next.

        One that starts meanwhile is waited for, too. One that was told to end, or is scaled away while it is
        waited for, is left alone.
        """
        for replica, life in list(self.lives.items()):
            if self.lives.get(replica) is not life:
                continue  # it has been started again since
            if self.fleet.state(replica) is ReplicaState.READY:
                self.drain(replica, seconds=DRAIN_SECONDS, restarts=True)
            while self.fleet.is_coming(replica):
                self.changed.clear()
                await self.changed.wait()
            if self.fleet.state(replica) is ReplicaState.DOWN:
                logger.error("the other replicas are not started again: %s did not come back", replica)
                return

    def _let_leave(self, life: Life) -> None:
        if not self.is_ending and self.lives.get(life.replica) is life:
            logger.info("%s was told to end: it drains and is started again", life.replica)
            self.drain(life.replica, seconds=DRAIN_SECONDS, restarts=True)

    def drain(self, replica: ReplicaId, *, seconds: float, restarts: bool) -> None:
        """End a replica without loss; what runs there may take so long."""
        self.streams.before_loss(replica)
        self.tell(events.DrainAsked(replica, seconds, restarts))
