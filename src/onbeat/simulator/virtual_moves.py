"""Moves between virtual replicas: when their steps are done, and what copies take from steps.

The KV of a virtual replica, as the agent of its moves sees it: nothing but time and reservations.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Generic, NamedTuple, TypeVar

from onbeat.core.fleet import ReplicaId, replica_id, replica_number
from onbeat.core.handover import Detached, MoveTask, MoveVerb
from onbeat.core.request import Request
from onbeat.scheduler.cluster.events import Answered, MoveStep
from onbeat.scheduler.cluster.moves import MoveExecutor, OpenMove
from onbeat.scheduler.replica.move_agent import Departure, MoveAgent
from onbeat.simulator.fleet_loop import COPY, HEAR, MOVE, FleetLoop
from onbeat.simulator.simulation_config import KVLink, ReplicaKind, SimulationConfig
from onbeat.simulator.virtual_clients import OfferedRequest

K = TypeVar("K", bound=Hashable)
"""Whatever names a transfer."""

_Port = tuple[str, int]
"""One direction of a replica's link."""


@dataclass(slots=True)
class _Flow:
    """A transfer under way."""

    ports: tuple[_Port, _Port]
    """That it leaves by, and that it comes in by."""
    num_left: float
    """Bytes."""
    rate: float = 0.0
    """Bytes per second."""
    end: float = inf
    """At this rate."""


class Links(Generic[K]):
    """Each replica has one link, which takes `bandwidth` out and `bandwidth` in at the same time.

    Transfers share what they have in common so that none can have more without one that has no more than it
    having less (max-min fairness): what flows of equal round-trip times get of a network in the long run, and
    what simulators of networks compute.

    Parameters
    ----------
    bandwidth : bytes per second, in either direction.
    """

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._flows: dict[K, _Flow] = {}
        self._now = 0.0
        self.next_time = inf
        """When the next transfer ends, if none begins before."""
        self.num_bytes_moved = 0.0
        """By transfers that have ended, been dropped or are under way, up to the last call."""

    def begin(self, key: K, source: int, destination: int, num_bytes: float, now: float) -> None:
        """Begin a transfer; `end` will name its key."""
        assert key not in self._flows, f"{key} is under way"
        self._advance(now)
        self._flows[key] = _Flow((("out", source), ("in", destination)), num_bytes)
        self._share()

    def end(self, now: float) -> list[K]:
        """Return the transfers that have ended by now, in the order in which they began."""
        if now < self.next_time:
            return []
        ended = [key for key, flow in self._flows.items() if flow.end <= now]
        self._advance(now)
        for key in ended:
            del self._flows[key]
        self._share()
        return ended

    def drop(self, key: K, now: float) -> None:
        """Let a transfer end before its last byte; one that is not under way is ignored."""
        if key in self._flows:
            self._advance(now)
            del self._flows[key]
            self._share()

    def _advance(self, now: float) -> None:
        """Count the bytes that have gone since the last call."""
        for flow in self._flows.values():
            num_bytes = flow.num_left if flow.end <= now else flow.rate * (now - self._now)
            flow.num_left -= num_bytes
            self.num_bytes_moved += num_bytes
        self._now = now

    def _share(self) -> None:
        """Give each transfer its rate: the fullest link is shared first, then what is left of the others."""
        free = {port: self._bandwidth for flow in self._flows.values() for port in flow.ports}
        waiting = dict(self._flows)
        while waiting:
            users = Counter(port for flow in waiting.values() for port in flow.ports)
            share, fullest = min((free[port] / count, port) for port, count in users.items())
            for key in [key for key, flow in waiting.items() if fullest in flow.ports]:
                flow = waiting.pop(key)
                flow.rate = share
                for port in flow.ports:
                    free[port] = max(free[port] - share, 0.0)
                flow.end = self._now + flow.num_left / share
        self.next_time = min((flow.end for flow in self._flows.values()), default=inf)


class VirtualSource(NamedTuple):
    """Blocks that a virtual replica lends."""

    replica: int
    block_ids: tuple[int, ...]
    is_last: bool = False
    """Whether a state goes with them, of a model that keeps one."""


@dataclass(slots=True)
class _Copy:
    source: int
    destination: int
    num_bytes: float
    pull: Future[int] = field(default_factory=Future)
    is_given_up: bool = False
    """Whether the reservation is to be given back at its end."""


class VirtualKV:
    """Lends the KV of a virtual replica, and takes that of others, with the verbs of its scheduler."""

    def __init__(self, number: int, moves: VirtualMoves) -> None:
        self._number, self._moves = number, moves
        self._replica = moves.loop.members[number].replica
        self._handover = handover = self._replica.scheduler.handover
        self.num_full_tokens, self.unhold = handover.num_full_tokens, handover.release_hold
        self.detach, self.reattach = handover.detach, handover.reattach

    def hold(self, request_id: str) -> VirtualSource | None:
        """Lend the full blocks of a request, for as long as it takes."""
        block_ids = self._handover.hold(request_id, inf)
        return None if block_ids is None else VirtualSource(self._number, block_ids)

    def summed(self, source: VirtualSource) -> Future[VirtualSource]:
        """Return what is lent, at once."""
        future: Future[VirtualSource] = Future()
        future.set_result(source)
        return future

    def take_departures(self) -> list[Departure[VirtualSource]]:
        """Return what became of those who were to leave since the last call."""
        return [
            Departure(
                name, out, None if out is None else VirtualSource(self._number, out.block_ids, is_last=True)
            )
            for name, out in self._handover.take_detached()
        ]

    def free(self, request_id: str) -> None:
        """Forget a request that has left, and lend its KV no longer."""
        self._replica.let_go(request_id)
        self._handover.release_hold(request_id)

    def reserve(self, move: str, num_tokens: int) -> bool:
        """Keep a slot and blocks, for as long as it takes."""
        return self._handover.reserve(move, num_tokens, inf) is not None

    def pull(self, move: str, source: VirtualSource, first_block: int) -> Future[int]:
        """Begin a copy."""
        return self._moves.copy(move, source, first_block, self._number)

    def adopt(self, move: str, request: Request, detached: Detached) -> None:  # noqa: ARG002
        """Go on with a request whose KV has come."""
        self._replica.adopt(move, self._moves.adopted[move], detached, self._moves.loop.now)

    def release(self, move: str) -> None:
        """Give a reservation back, once no copy writes there."""
        self._moves.release(move, self._number)


_NO_LINK = KVLink(bytes_per_token=1.0, bandwidth=1.0)
"""Of replicas between which nothing moves."""
_Move = OpenMove[OfferedRequest, VirtualSource]

_LETTING_GO = (MoveVerb.TAKE, MoveVerb.REATTACH, MoveVerb.UNHOLD, MoveVerb.RELEASE)
"""What ends a move, or a part of it: blocks are given back then."""


class _Task(NamedTuple):
    """A task that a replica has not taken."""

    number: int
    source: int | None
    """Of its move; None without one."""
    task: MoveTask[VirtualSource]


class VirtualMoves(MoveExecutor[OfferedRequest, VirtualSource]):
    """The moves under way between virtual replicas.

    Steps are taken as an engine takes them: while its step runs. What is asked for at an instant is done once
    the steps that end then have ended. What is lent is not written to any more, so a copy and steps of
    the same replica may run at once; the memory bandwidth that the copy takes from them is charged to the
    next step of both replicas.

    Parameters
    ----------
    loop : runs the replicas.
    kind : returns what a replica is.
    report_seconds : until an answer is heard of.
    answer : tells the fleet of answers.
    on_capacity : takes the number of a replica that has more capacity, whether it runs a step or not.

    Attributes
    ----------
    adopted : move -> its request, from when its destination is asked to go on with it.
    """

    def __init__(
        self,
        loop: FleetLoop,
        config: SimulationConfig,
        kind: Callable[[int], ReplicaKind],
        *,
        answer: Callable[[Answered, float], None],
        on_capacity: Callable[[int], None],
    ) -> None:
        super().__init__()
        link = config.kv_link or _NO_LINK
        self.loop = loop
        self._limits = limits = kind(0).scheduler
        self._bytes_per_block = limits.block_size * link.bytes_per_token / limits.num_tables
        self._state_bytes = link.state_bytes
        self._message_seconds, self._latency = config.fleet_times.report_seconds, link.latency
        self._kind = kind
        self._answer = answer
        self._on_capacity = on_capacity
        self.links: Links[str] = Links(link.bandwidth)
        self._next_copy = inf
        """When an end of a copy is in the loop."""
        self._copies: dict[str, _Copy] = {}
        """By move; those into reservations that were given up included."""
        self._tasks: deque[_Task] = deque()
        self.adopted: dict[str, OfferedRequest] = {}
        self._agents: dict[int, MoveAgent[VirtualSource]] = {}
        """Of replicas that have been asked for anything."""

    # --- what the fleet asks for ----------------------------------------------------------------------

    def ask(self, step: MoveStep, offered: OfferedRequest | None) -> None:
        """Take a step that is to be done as soon as no step of a replica is left to end at this instant.

        Parameters
        ----------
        offered : the request; None where it has ended.
        """
        self.do(step, offered)
        self.loop.at(self.loop.now, MOVE, self._take_tasks)

    def _take_tasks(self, now: float) -> None:  # noqa: ARG002
        while self._tasks:
            number, _, task = self._tasks.popleft()
            self._take(number, task)
            if task.verb in (MoveVerb.TAKE, MoveVerb.RELEASE):
                self._on_capacity(number)
        self._expect_copies()

    def leave(self, number: int) -> None:
        """Let a replica stop, which has nothing left: what it was asked to let go of, it lets go of now."""
        kept: deque[_Task] = deque()
        while self._tasks:
            waiting = self._tasks.popleft()
            # In their order: whoever copies from it is told to let go before the move is forgotten.
            if number in (waiting.number, waiting.source) and waiting.task.verb in _LETTING_GO:
                # A reservation that nobody has made is not made after.
                if waiting.task.verb is MoveVerb.RELEASE:
                    mine = (waiting.number, waiting.task.move)
                    kept = deque(each for each in kept if (each.number, each.task.move) != mine)
                self._take(waiting.number, waiting.task)
            else:
                kept.append(waiting)
        self._tasks = kept
        for move_id, move in self.moves.items():
            # A stream that was to stop, of which no answer has come.
            if replica_number(move.source) == number:
                self._take(number, MoveTask(move_id, MoveVerb.UNHOLD, move.name))
        self._agents.pop(number, None)
        self.close(number)

    def lose(self, number: int) -> None:
        """Let a replica be gone, with all that it has."""
        for move, copy in self._drop(number):
            if copy.is_given_up and copy.destination != number:
                self.release(move, copy.destination)
        self._agents.pop(number, None)
        self._expect_copies()

    def close(self, number: int | None = None) -> None:
        """End copies from or to a replica, or all, before their last byte: nobody waits for them."""
        for move, copy in self._drop(number):
            assert copy.is_given_up, "it has something left"
            self.release(move, copy.destination)
        self._expect_copies()

    def stop_after_first(self, number: int, request_id: str) -> None:
        """Let a request that is new stand still after its first token, until it is moved or put back."""
        self._agent(number).stop_after_first(request_id)

    def forget(self, number: int, request_id: str) -> None:
        """Hear of a request that is taken from its replica."""
        if number in self._agents:
            self._agents[number].forget((request_id,))

    # --- what happens ---------------------------------------------------------------------------------

    def on_first_token(self, number: int, request_id: str, *, is_finished: bool) -> None:
        """Hear that a request has had its first token from a replica, between two steps."""
        agent = self._agents.get(number)
        if agent is not None and agent.on_first_token(request_id, is_finished=is_finished):
            self.on_step_end(number)

    def on_step_end(self, number: int) -> None:
        """Take note of the requests that have left the batch of a replica."""
        agent = self._agents.get(number)
        if agent is not None:
            agent.look()

    def _end_copies(self, now: float) -> None:
        """End the copies whose last byte has gone."""
        for move in self.links.end(now):
            copy = self._copies.pop(move)
            if copy.is_given_up:
                self.release(move, copy.destination)
            else:
                copy.pull.set_result(round(copy.num_bytes))
        self._expect_copies()

    def _expect_copies(self) -> None:
        """Have the next copy end when it does, which is another time whenever one begins or ends."""
        when = self.links.next_time
        if when != self._next_copy:
            self._next_copy = when
            if when < inf:
                self.loop.at(when, COPY, self._end_copies)

    # --- one step -------------------------------------------------------------------------------------

    def _agent(self, number: int) -> MoveAgent[VirtualSource]:
        agent = self._agents.get(number)
        if agent is None:
            agent = self._agents[number] = MoveAgent(
                VirtualKV(number, self),
                answer=partial(self.on_answer, replica_id(number)),
                ring=lambda: self._agents[number].look_at_copies(),
            )
        return agent

    def _take(self, number: int, task: MoveTask[VirtualSource]) -> None:
        is_over = task.verb in (MoveVerb.TAKE, MoveVerb.RELEASE)
        offered = self.adopted.pop(task.move, None) if is_over else None
        if (member := self.loop.members.get(number)) is None:
            return
        if task.verb is not MoveVerb.RELEASE:
            self._settle(number)
        for request_id in self._agent(number).take(task):
            assert offered is not None
            member.replica.withdraw(request_id, self.loop.now)
            offered.record.replica = (offered.record.replica or "").rpartition("+")[0]
            member.call(self.loop.now)

    # --- copies: each takes memory bandwidth from the next step of both replicas ------------------------

    def copy(self, move: str, source: VirtualSource, first_block: int, destination: int) -> Future[int]:
        """Begin a copy; the future has its bytes."""
        num_bytes = (len(source.block_ids) - first_block) * self._bytes_per_block
        num_bytes += source.is_last * self._state_bytes
        copy = self._copies[move] = _Copy(source.replica, destination, num_bytes)
        self.links.begin(move, source.replica, destination, num_bytes, self.loop.now)
        for number in (source.replica, destination):
            self._settle(number)  # a run ends with its step under way: the next one takes longer
            self.loop.members[number].replica.charge(num_bytes / self._kind(number).memory_bandwidth)
        return copy.pull

    def release(self, move: str, destination: int) -> None:
        """Free what is kept for a move at its destination, once no copy writes there."""
        copy = self._copies.get(move)
        if copy is not None:
            copy.is_given_up = True
        elif (member := self.loop.members.get(destination)) is not None:
            self._settle(destination)
            member.replica.scheduler.handover.release_reservation(move)
            self._on_capacity(destination)

    def _settle(self, number: int) -> None:
        """Let a replica see what has come of its steps by now, and plan with what is about to change."""
        member, now = self.loop.members[number], self.loop.now
        member.replica.settle(now)
        member.call(now)

    def _drop(self, number: int | None) -> Iterator[tuple[str, _Copy]]:
        for move, copy in list(self._copies.items()):
            if number in (None, copy.source, copy.destination):
                self.links.drop(move, self.loop.now)
                del self._copies[move]
                yield move, copy

    # --- what its replicas are asked for --------------------------------------------------------------

    def send(self, replica: ReplicaId, task: MoveTask[VirtualSource]) -> None:
        """Let a replica take a task at the end of this instant."""
        move = self.moves.get(task.move)
        source = None if move is None else replica_number(move.source)
        self._tasks.append(_Task(replica_number(replica), source, task))

    def tell(self, event: Answered) -> None:
        """Let the fleet hear of an answer a little later."""
        delay = self._message_seconds + self._latency * (event.verb is MoveVerb.PULL)
        if not delay or (event.verb is MoveVerb.ADOPT and event.ok):
            # It may have a token before anybody could hear of this: the answer comes first.
            self._answer(event, self.loop.now)
        else:
            self.loop.at(self.loop.now + delay, HEAR, partial(self._answer, event))

    def num_tokens_in(self, replica: ReplicaId, num_blocks: int) -> int:  # noqa: ARG002 (all are alike)
        """Return the tokens of a request that holds so many blocks."""
        return self._limits.windows.num_token_blocks(num_blocks) * self._limits.block_size

    def whereabouts(self, request: OfferedRequest) -> tuple[ReplicaId, str]:
        """Return the replica that has a request, and its name."""
        return replica_id(request.place), request.request.request_id

    def adoption(
        self,
        move_id: str,
        move: _Move,
        destination: ReplicaId,  # noqa: ARG002
    ) -> tuple[Request, Detached]:
        """Return a request, under its only name."""
        assert move.detached is not None
        self.adopted[move_id] = move.request
        return move.request.request, move.detached

    def hand_over(self, move: _Move, destination: ReplicaId) -> None:
        """Note where a request is."""
        move.request.place = replica_number(destination)
