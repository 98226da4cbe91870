"""Carries out the steps of moves between virtual replicas, with the verbs of their schedulers."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from onbeat.core.errors import RequestRejected
from onbeat.core.fleet import replica_id, replica_number
from onbeat.core.handover import DetachAnswer, Detached, MoveVerb
from onbeat.scheduler.cluster.events import Answered, MoveStep
from onbeat.scheduler.replica.departures import Departures
from onbeat.simulator.client import OfferedRequest
from onbeat.simulator.config import KVLink
from onbeat.simulator.links import Links
from onbeat.simulator.replica import VirtualReplica

Answer = Callable[[Answered, float, float], None]
"""Takes an answer, the time, and in how many seconds it is heard of."""


_NOWHERE = -1
"""The destination of a move that has not asked for room."""

_LETTING_GO = (MoveVerb.TAKE, MoveVerb.REATTACH, MoveVerb.UNHOLD, MoveVerb.RELEASE)
"""What ends a move, or a part of it: blocks are given back then."""


@dataclass(slots=True)
class _VirtualMove:
    offered: OfferedRequest
    source: int
    destination: int
    why: str
    num_lent: int = 0
    """Blocks that the source lends."""
    detached: Detached | None = None
    is_pulling: bool = False
    is_adopted: bool = False
    is_released: bool = False
    """Whether the destination has been told to forget it."""


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
    on_room : takes that of one that has more room, whether it runs a step or not.
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
        on_room: Callable[[int], None],
    ) -> None:
        self._replicas = replicas
        self._link = link
        self._block_size = block_size
        self._message_seconds = message_seconds
        self._memory_bandwidth = memory_bandwidth
        self._answer = answer
        self._call = call
        self._on_room = on_room
        self.links: Links[tuple[str, int]] = Links(link.bandwidth)
        self._moves: dict[str, _VirtualMove] = {}
        self._asked: deque[MoveStep] = deque()
        self._copies: dict[tuple[str, int], _VirtualMove] = {}
        """(move, blocks copied before): copies under way, those into room that was given up included."""
        self._departures: defaultdict[int, Departures[DetachAnswer]] = defaultdict(Departures)
        """By replica."""
        self._awaited: dict[int, dict[str, MoveStep]] = {}
        """Replica -> request whose prompt it computes -> what is asked for once there is more of it."""

    # --- what the fleet asks for ----------------------------------------------------------------------

    @property
    def is_asked(self) -> bool:
        """Whether something has been asked for that has not been done."""
        return bool(self._asked)

    def ask(self, step: MoveStep, offered: OfferedRequest | None) -> None:
        """Take a step that is to be done as soon as no step of a replica is left to end at this instant.

        Parameters
        ----------
        offered : the request; None where it has ended.
        """
        if step.verb in (MoveVerb.RESERVE, MoveVerb.HOLD):
            move = self._moves.get(step.move)
            if move is None:
                assert offered is not None
                move = self._moves[step.move] = _VirtualMove(offered, offered.place, _NOWHERE, step.why)
            if step.verb is MoveVerb.RESERVE:
                move.destination = replica_number(step.replica)
        elif step.verb is MoveVerb.TAKE:
            assert offered is not None
            offered.place = replica_number(step.replica)
        self._asked.append(step)

    def do_next(self, now: float) -> None:
        """Do what was asked for first; all steps that end at this instant have ended."""
        step = self._asked.popleft()
        move = self._moves.get(step.move)
        self._do(step, now)
        if step.verb is MoveVerb.RELEASE:
            self._on_room(replica_number(step.replica))
        elif move is not None and step.verb is MoveVerb.TAKE:
            self._on_room(move.source)

    def why(self, move_id: str) -> str:
        """Return what a move that has not ended is for."""
        return self._moves[move_id].why

    def leave(self, number: int, now: float) -> None:
        """Let a replica stop, which has nothing left: what it was asked to let go of, it lets go of now."""
        kept: deque[MoveStep] = deque()
        while self._asked:
            step = self._asked.popleft()
            move = self._moves.get(step.move)
            at = replica_number(step.replica)
            if step.verb is MoveVerb.TAKE and move is not None:
                at = move.source
            # In their order: whoever copies from it is told to let go before the move is forgotten.
            is_its_own = at == number or (move is not None and move.source == number)
            if is_its_own and step.verb in _LETTING_GO:
                self._do(step, now)
            else:
                kept.append(step)
        self._asked = kept
        for move in self._moves.values():
            if move.source == number:  # a stream that was to stop for it, of which no answer has come
                self._go_on(number, move.offered.request.request_id, now, is_back=False)
        self._departures.pop(number, None)
        self._cut(
            [key for key, move in self._copies.items() if number in (move.source, move.destination)], now
        )

    def lose(self, number: int, now: float) -> None:
        """Let a replica be gone, with all that it has."""
        for key, move in list(self._copies.items()):
            if number in (move.source, move.destination):
                self.links.drop(key, now)
                del self._copies[key]
                move.is_pulling = False
                if move.is_released and move.destination != number:
                    self._release_room(key[0], move, now)
        self._departures.pop(number, None)
        self._awaited.pop(number, None)

    def close(self, now: float) -> None:
        """Cut the copies that go on once every request has ended."""
        self._cut(list(self._copies), now)

    def stop_after_first(self, number: int, request_id: str) -> None:
        """Let a request that is new stand still after its first token, until it is moved or put back."""
        self._departures[number].stop_after_first(request_id)

    def forget(self, number: int, request_id: str) -> None:
        """Hear of a request that is taken from its replica."""
        self._departures[number].forget(request_id)
        self._await_no_more(number, request_id)

    # --- what happens ---------------------------------------------------------------------------------

    def on_first_token(self, number: int, request_id: str, now: float, *, is_finished: bool) -> None:
        """Hear that a request has had its first token from a replica, between two steps."""
        if self._departures[number].on_first_token(request_id, is_finished=is_finished):
            self._replicas[number].scheduler.handover.detach(request_id)
            self.on_step_end(number, now)

    def on_step_end(self, number: int, now: float) -> None:
        """Take note of the requests that have left the batch of a replica."""
        handover, departures = self._replicas[number].scheduler.handover, self._departures[number]
        for answer in handover.take_detached():
            departures.on_left(answer)
        for request_id in departures.take_to_put_back():
            handover.reattach(request_id)
        for move_id, left in departures.take_gone():
            self._depart(move_id, number, left.detached, now)
        for step in list(self._awaited.get(number, {}).values()):
            self._hold(step, self._moves[step.move], now)

    def end_copies(self, now: float) -> None:
        """End the copies whose last byte has gone."""
        for key in self.links.end(now):
            self._end_copy(key, self._copies[key], now)

    def _cut(self, keys: Sequence[tuple[str, int]], now: float) -> None:
        """End copies before their last byte, all of them into room that was given up."""
        for key in keys:
            move = self._copies[key]
            assert move.is_released, "it has something left"
            self.links.drop(key, now)
            self._end_copy(key, move, now)

    def _end_copy(self, key: tuple[str, int], move: _VirtualMove, now: float) -> None:
        del self._copies[key]
        move.is_pulling = False
        if move.is_released:
            self._release_room(key[0], move, now)
        else:
            self._tell(key[0], move.destination, MoveVerb.PULL, now, delay=self._link.latency)

    # --- one step -------------------------------------------------------------------------------------

    def _do(self, step: MoveStep, now: float) -> None:
        number, verb = replica_number(step.replica), step.verb
        move = self._moves.get(step.move)
        if verb is MoveVerb.TAKE:
            assert move is not None
            self._take(step, move, now)
        elif verb in (MoveVerb.REATTACH, MoveVerb.UNHOLD):
            self._moves.pop(step.move, None)
            self._go_on(number, step.request_id, now, is_back=verb is MoveVerb.REATTACH)
        elif move is None or number not in self._replicas:
            return
        elif verb is MoveVerb.RELEASE:
            self._release(step, move, now)
        elif verb in (MoveVerb.HOLD, MoveVerb.FREEZE):
            self._do_at_source(step, move, now)
        elif not move.is_released:
            self._do_at_destination(step, move, now)

    def _do_at_source(self, step: MoveStep, move: _VirtualMove, now: float) -> None:
        replica, request_id = self._replicas[move.source], step.request_id
        replica.settle(now)
        if step.verb is MoveVerb.HOLD:
            self._hold(step, move, now)
        else:
            self._await_no_more(move.source, request_id)
            if self._departures[move.source].ask(request_id, step.move):
                replica.scheduler.handover.detach(request_id)
            self.on_step_end(move.source, now)
        self._call(move.source)

    def _hold(self, step: MoveStep, move: _VirtualMove, now: float) -> None:
        """Lend what is full, once that is as much as was asked for."""
        handover = self._replicas[move.source].scheduler.handover
        if handover.num_full_blocks(step.request_id) < step.num_blocks:
            self._awaited.setdefault(move.source, {})[step.request_id] = step
            return
        self._await_no_more(move.source, step.request_id)
        held = handover.hold(step.request_id, inf)
        move.num_lent = 0 if held is None else len(held.block_ids)
        self._tell(step.move, move.source, step.verb, now, ok=held is not None, num_blocks=move.num_lent)

    def _await_no_more(self, number: int, request_id: str) -> None:
        self._awaited.get(number, {}).pop(request_id, None)

    def _do_at_destination(self, step: MoveStep, move: _VirtualMove, now: float) -> None:
        number = move.destination
        replica = self._replicas[number]
        replica.settle(now)
        self._call(number)
        handover = replica.scheduler.handover
        match step.verb:
            case MoveVerb.RESERVE:
                has_room = handover.reserve(step.move, step.num_blocks * self._block_size, inf) is not None
                self._tell(step.move, number, step.verb, now, ok=has_room)
            case MoveVerb.PULL:
                self._copy(step, move, now)
            case _:
                assert move.detached is not None
                try:
                    replica.adopt(step.move, move.offered, move.detached, now)
                except RequestRejected:
                    self._tell(step.move, number, step.verb, now, ok=False)
                    return
                move.is_adopted = True
                # It may have a token before anybody could hear of this: the answer comes first.
                self._answer(Answered(step.replica, step.move, step.verb, ok=True), now, 0.0)

    def _copy(self, step: MoveStep, move: _VirtualMove, now: float) -> None:
        key = (step.move, step.num_blocks)
        num_bytes = (move.num_lent - step.num_blocks) * self._block_size * self._link.bytes_per_token
        move.is_pulling = True
        self._copies[key] = move
        self.links.begin(key, move.source, move.destination, num_bytes, now)
        for number in (move.source, move.destination):
            self._replicas[number].charge(num_bytes / self._memory_bandwidth(number))

    def _take(self, step: MoveStep, move: _VirtualMove, now: float) -> None:
        del self._moves[step.move]
        source = self._replicas.get(move.source)
        if source is not None:
            source.settle(now)
            source.let_go(step.request_id)
            source.scheduler.handover.release_hold(step.request_id)
            self._call(move.source)

    def _go_on(self, number: int, request_id: str, now: float, *, is_back: bool) -> None:
        """Let a request go on where it is, and lend nothing of it any more."""
        replica = self._replicas.get(number)
        self._await_no_more(number, request_id)
        if replica is None:
            return
        self._departures[number].go_on(request_id)
        replica.settle(now)
        if is_back:
            replica.scheduler.handover.reattach(request_id)
        replica.scheduler.handover.release_hold(request_id)
        self._call(number)

    def _release(self, step: MoveStep, move: _VirtualMove, now: float) -> None:
        move.is_released = True
        if move.is_adopted:
            self._replicas[move.destination].withdraw(step.request_id, now)
            record = move.offered.record
            record.replica = (record.replica or "").rpartition("+")[0]
            self._call(move.destination)
        elif not move.is_pulling:
            self._release_room(step.move, move, now)

    def _release_room(self, move_id: str, move: _VirtualMove, now: float) -> None:
        """Free what is kept for a move at its destination, where no copy writes any more."""
        replica = self._replicas.get(move.destination)
        if replica is not None:
            replica.settle(now)
            replica.scheduler.handover.release_reservation(move_id)
            self._call(move.destination)
            self._on_room(move.destination)

    def _depart(self, move_id: str, number: int, detached: Detached | None, now: float) -> None:
        move = self._moves.get(move_id)
        if move is None:
            assert detached is None, "nobody would let it go on"
            return
        move.detached = detached
        move.num_lent = 0 if detached is None else len(detached.block_ids)
        is_out = detached is not None
        self._tell(move_id, number, MoveVerb.FREEZE, now, ok=is_out, num_blocks=move.num_lent)

    def _tell(  # noqa: PLR0913 (all of them say what is answered)
        self,
        move_id: str,
        number: int,
        verb: MoveVerb,
        now: float,
        *,
        ok: bool = True,
        num_blocks: int = 0,
        delay: float | None = None,
    ) -> None:
        answered = Answered(replica_id(number), move_id, verb, ok, num_blocks)
        self._answer(answered, now, self._message_seconds + (delay or 0.0))
