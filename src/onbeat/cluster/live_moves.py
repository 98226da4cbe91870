"""Carries out the steps of moves: what replicas are asked for, and whose tokens count."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from onbeat.cluster.clock_offset import by_their_clock
from onbeat.cluster.open_request import OpenRequest, Origin
from onbeat.core.fleet import ReplicaId
from onbeat.core.handover import Detached, MoveVerb
from onbeat.engine.kv_transfer.source import KVSource
from onbeat.engine.messages import AbortRequests, AskMove, MoveAnswer, ToEngine
from onbeat.scheduler.cluster.events import Answered, MoveStep

logger = logging.getLogger("onbeat.cluster")


class Replicas(Protocol):
    """What is needed of a fleet's controller."""

    def send(self, replica: ReplicaId, message: ToEngine) -> None:
        """Send a message to a replica; it is lost with the replica."""
        ...

    def tell(self, event: Answered) -> None:
        """Tell the fleet what happened."""
        ...

    def block_size(self, replica: ReplicaId) -> int:
        """Return the tokens of a replica's blocks."""
        ...

    def clock_offset(self, replica: ReplicaId) -> float:
        """Return by how many seconds a replica's clock is behind this one's."""
        ...


@dataclass(slots=True)
class _LiveMove:
    opened: OpenRequest
    source: ReplicaId
    name: str
    """Under which the source has the request."""
    why: str
    kv: KVSource | None = None
    """What the source lends."""
    detached: Detached | None = None
    adopted: str = ""
    """Under which the destination has it, or will."""


class LiveMoves:
    """The moves under way, with what replicas have to know of one another.

    Parameters
    ----------
    replicas : who sends messages.
    requests : those that are open, by id.
    on_moved : is called with a request that is its destination's from now on.
    on_stayed : is called for each move that has failed, with what it was for.
    on_copied : is called with the bytes of each copy.
    """

    def __init__(
        self,
        replicas: Replicas,
        requests: Mapping[str, OpenRequest],
        *,
        on_moved: Callable[[OpenRequest, Origin], None],
        on_stayed: Callable[[str], None],
        on_copied: Callable[[int], None],
    ) -> None:
        self._replicas = replicas
        self._requests = requests
        self._on_moved = on_moved
        self._on_stayed = on_stayed
        self._on_copied = on_copied
        self._moves: dict[str, _LiveMove] = {}

    def do(self, step: MoveStep) -> None:
        """Carry out a step."""
        replica, verb = step.replica, step.verb
        move = self._moves.get(step.move)
        if move is None:
            if verb not in (MoveVerb.RESERVE, MoveVerb.HOLD):
                if not step.move:  # one that stands still and is not moved
                    self._ask(replica, AskMove("", verb, self._requests[step.request_id].name))
                return  # it is over
            opened = self._requests[step.request_id]
            assert opened.replica is not None
            move = self._moves[step.move] = _LiveMove(opened, opened.replica, opened.name, step.why)
        match verb:
            case MoveVerb.ADOPT:
                self._adopt(step, move)
            case MoveVerb.TAKE:
                self._take(step, move)
            case MoveVerb.UNHOLD | MoveVerb.REATTACH:
                del self._moves[step.move]
                self._ask(replica, AskMove(step.move, verb, move.name))
            case MoveVerb.RELEASE:
                self._on_stayed(move.why)
                self._ask(replica, AskMove(step.move, verb, move.name))
            case _:
                message = AskMove(step.move, verb, move.name)
                if verb in (MoveVerb.RESERVE, MoveVerb.HOLD):
                    message.num_tokens = step.num_blocks * self._replicas.block_size(replica)
                elif verb is MoveVerb.PULL:
                    message.source, message.first_block = move.kv, step.num_blocks
                self._ask(replica, message)

    def on_answer(self, replica: ReplicaId, answer: MoveAnswer) -> None:
        """Take what a replica says of a step."""
        move = self._moves.get(answer.move)
        if move is None:
            return
        if answer.verb in (MoveVerb.HOLD, MoveVerb.FREEZE) and answer.ok:
            move.kv = answer.source
        if answer.detached is not None:
            move.detached = _shifted(answer.detached, self._replicas.clock_offset(replica))
        if not answer.ok:
            logger.info(
                "%s: %s of %s failed: %s", replica, answer.verb, move.name, answer.why or "it has ended"
            )
        if answer.num_bytes:
            self._on_copied(answer.num_bytes)
        num_blocks = 0 if answer.source is None else len(answer.source.block_ids)
        self._replicas.tell(Answered(replica, answer.move, MoveVerb(answer.verb), answer.ok, num_blocks))

    def _adopt(self, step: MoveStep, move: _LiveMove) -> None:
        detached, opened = move.detached, move.opened
        assert detached is not None
        if list(detached.output_token_ids) != opened.token_ids:
            logger.error("%s left %s with other tokens than it delivered", move.name, move.source)
            self._replicas.tell(Answered(step.replica, step.move, MoveVerb.ADOPT, ok=False))
            return
        offset = self._replicas.clock_offset(step.replica)
        request = by_their_clock(opened.next_name(), offset)
        move.adopted = request.request_id
        message = AskMove(step.move, MoveVerb.ADOPT, move.name)
        message.detached = _shifted(detached, -offset)
        message.request = detached.moved(request)
        self._ask(step.replica, message)

    def _take(self, step: MoveStep, move: _LiveMove) -> None:
        del self._moves[step.move]
        move.opened.move_to(step.replica, move.adopted)
        self._ask(move.source, AskMove(step.move, MoveVerb.TAKE, move.name))
        self._on_moved(move.opened, Origin(move.source, move.name, move.why))
        if move.opened.is_aborted:
            self._replicas.send(step.replica, AbortRequests([move.adopted]))

    def _ask(self, replica: ReplicaId, message: AskMove) -> None:
        self._replicas.send(replica, message)


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
