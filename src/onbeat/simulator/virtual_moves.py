"""Moves between virtual replicas: when their steps are done, and what copies take from steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from onbeat.core.fleet import ReplicaId, replica_id, replica_number
from onbeat.core.handover import Detached, MoveTask, MoveVerb
from onbeat.core.request import Request
from onbeat.scheduler.cluster.events import Answered, MoveStep
from onbeat.scheduler.cluster.move_executor import MoveExecutor, OpenMove
from onbeat.scheduler.replica.move_agent import MoveAgent
from onbeat.simulator.kv_port import Copies, VirtualKV, VirtualSource
from onbeat.simulator.simulation_config import KVLink
from onbeat.simulator.virtual_clients import OfferedRequest
from onbeat.simulator.virtual_replica import VirtualReplica

Answer = Callable[[Answered, float, float], None]
"""Takes an answer, the time, and in how many seconds it is heard of."""

_Move = OpenMove[OfferedRequest, VirtualSource]

_LETTING_GO = (MoveVerb.TAKE, MoveVerb.REATTACH, MoveVerb.UNHOLD, MoveVerb.RELEASE)
"""What ends a move, or a part of it: blocks are given back then."""


class _Task(NamedTuple):
    """A task that a replica has not taken."""

    number: int
    source: int | None
    """Of its move; None without one."""
    task: MoveTask[VirtualSource]


class VirtualMoves:
    """The moves under way between virtual replicas.

    Steps are taken as an engine takes them: while its step runs. What is asked for at an instant is done once
    the steps that end then have ended. What is lent is not written to any more, so a copy and steps of
    the same replica may run at once; the memory bandwidth that the copy takes from them is charged to the
    next step of both replicas.

    Parameters
    ----------
    replicas : those that live, by number.
    link : what lies between them.
    block_size : tokens of a KV block.
    message_seconds : until an answer is heard of.
    memory_bandwidth : returns the bytes per second that the memory of a replica's devices moves.
    answer : takes answers.
    call : takes the number of a replica that has something new to plan with.
    on_capacity : takes that of one that has more capacity, whether it runs a step or not.
    """

    def __init__(  # noqa: PLR0913 (three say whom to tell and ask)
        self,
        replicas: Mapping[int, VirtualReplica],
        link: KVLink,
        *,
        block_size: int,
        message_seconds: float,
        memory_bandwidth: Callable[[int], float],
        answer: Answer,
        call: Callable[[int], None],
        on_capacity: Callable[[int], None],
    ) -> None:
        self._replicas = replicas
        self._block_size = block_size
        self._message_seconds = message_seconds
        self._latency = link.latency
        self._answer = answer
        self._call = call
        self._on_capacity = on_capacity
        self._copies = Copies(
            replicas,
            link,
            block_size=block_size,
            memory_bandwidth=memory_bandwidth,
            call=call,
            on_capacity=on_capacity,
        )
        self.links = self._copies.links
        self._executor: MoveExecutor[OfferedRequest, VirtualSource] = MoveExecutor(self)
        self._tasks: deque[_Task] = deque()
        self._adopted: dict[str, OfferedRequest] = {}
        """Move -> its request, from when its destination is asked to go on with it."""
        self._agents: dict[int, MoveAgent[VirtualSource]] = {}
        """Of replicas that have been asked for anything."""

    # --- what the fleet asks for ----------------------------------------------------------------------

    @property
    def has_tasks(self) -> bool:
        """Whether something has been asked for that has not been done."""
        return bool(self._tasks)

    def ask(self, step: MoveStep, offered: OfferedRequest | None) -> None:
        """Take a step that is to be done as soon as no step of a replica is left to end at this instant.

        Parameters
        ----------
        offered : the request; None where it has ended.
        """
        self._executor.do(step, offered)

    def do_next(self, now: float) -> None:
        """Do what was asked for first; all steps that end at this instant have ended."""
        number, _, task = self._tasks.popleft()
        self._do(number, task, now)
        if task.verb in (MoveVerb.TAKE, MoveVerb.RELEASE):
            self._on_capacity(number)

    def why(self, move_id: str) -> str:
        """Return what a move that has not ended is for."""
        return self._executor.moves[move_id].why

    def leave(self, number: int, now: float) -> None:
        """Let a replica stop, which has nothing left: what it was asked to let go of, it lets go of now."""
        kept: deque[_Task] = deque()
        while self._tasks:
            waiting = self._tasks.popleft()
            # In their order: whoever copies from it is told to let go before the move is forgotten.
            if number in (waiting.number, waiting.source) and waiting.task.verb in _LETTING_GO:
                if (
                    waiting.task.verb is MoveVerb.RELEASE
                ):  # a reservation that nobody has made is not made after
                    mine = (waiting.number, waiting.task.move)
                    kept = deque(each for each in kept if (each.number, each.task.move) != mine)
                self._do(waiting.number, waiting.task, now)
            else:
                kept.append(waiting)
        self._tasks = kept
        for move_id, move in self._executor.moves.items():
            if (
                replica_number(move.source) == number
            ):  # a stream that was to stop, of which no answer has come
                self._do(number, MoveTask(move_id, MoveVerb.UNHOLD, move.name), now)
        self._agents.pop(number, None)
        self._copies.now = now
        self._copies.cut(number)

    def lose(self, number: int, now: float) -> None:
        """Let a replica be gone, with all that it has."""
        self._copies.now = now
        self._copies.lose(number)
        self._agents.pop(number, None)

    def close(self, now: float) -> None:
        """Cut the copies that go on once every request has ended."""
        self._copies.now = now
        self._copies.cut()

    def stop_after_first(self, number: int, request_id: str) -> None:
        """Let a request that is new stand still after its first token, until it is moved or put back."""
        self._agent(number).stop_after_first(request_id)

    def forget(self, number: int, request_id: str) -> None:
        """Hear of a request that is taken from its replica."""
        if number in self._agents:
            self._agents[number].forget((request_id,))

    # --- what happens ---------------------------------------------------------------------------------

    def on_first_token(self, number: int, request_id: str, now: float, *, is_finished: bool) -> None:
        """Hear that a request has had its first token from a replica, between two steps."""
        agent = self._agents.get(number)
        if agent is not None and agent.on_first_token(request_id, is_finished=is_finished):
            self.on_step_end(number, now)

    def on_step_end(self, number: int, now: float) -> None:
        """Take note of the requests that have left the batch of a replica."""
        agent = self._agents.get(number)
        if agent is not None:
            self._copies.now = now
            agent.look()

    def end_copies(self, now: float) -> None:
        """End the copies whose last byte has gone."""
        self._copies.now = now
        self._copies.end()

    # --- one step -------------------------------------------------------------------------------------

    def _agent(self, number: int) -> MoveAgent[VirtualSource]:
        agent = self._agents.get(number)
        if agent is None:
            agent = self._agents[number] = MoveAgent(
                VirtualKV(number, self._replicas[number], self._block_size, self._copies, self._adopted),
                answer=partial(self._executor.on_answer, replica_id(number)),
                ring=partial(self._look_at_copies, number),
            )
        return agent

    def _look_at_copies(self, number: int) -> None:
        self._agents[number].look_at_copies()

    def _do(self, number: int, task: MoveTask[VirtualSource], now: float) -> None:
        self._copies.now = now
        is_over = task.verb in (MoveVerb.TAKE, MoveVerb.RELEASE)
        offered = self._adopted.pop(task.move, None) if is_over else None
        if number not in self._replicas:
            return
        if task.verb is not MoveVerb.RELEASE:
            self._copies.settle(number)
        for request_id in self._agent(number).take(task):
            assert offered is not None
            self._replicas[number].withdraw(request_id, now)
            offered.record.replica = (offered.record.replica or "").rpartition("+")[0]
            self._call(number)

    # --- what the executor asks for, see `MoveHost` ----------------------------------------------------

    def send(self, replica: ReplicaId, task: MoveTask[VirtualSource]) -> None:
        """Let a replica take a task at the end of this instant."""
        move = self._executor.moves.get(task.move)
        source = None if move is None else replica_number(move.source)
        self._tasks.append(_Task(replica_number(replica), source, task))

    def tell(self, event: Answered) -> None:
        """Let the fleet hear of an answer a little later."""
        delay = self._message_seconds
        if event.verb is MoveVerb.PULL:
            delay += self._latency
        elif event.verb is MoveVerb.ADOPT and event.ok:
            delay = 0.0  # it may have a token before anybody could hear of this: the answer comes first
        self._answer(event, self._copies.now, delay)

    def block_size(self, replica: ReplicaId) -> int:  # noqa: ARG002 (all have the same)
        """Return the tokens of a block."""
        return self._block_size

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
        self._adopted[move_id] = move.request
        return move.request.request, move.detached

    def hand_over(self, move: _Move, destination: ReplicaId) -> None:
        """Note where a request is."""
        move.request.place = replica_number(destination)
