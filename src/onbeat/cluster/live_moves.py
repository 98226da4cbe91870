"""Moves between live replicas: the names and clocks of the two, and whose tokens count."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from onbeat.cluster.clock_offset import by_their_clock
from onbeat.cluster.streams import OpenRequest, Origin
from onbeat.core.fleet import ReplicaId
from onbeat.core.handover import Detached, MoveTask, TaskAnswer
from onbeat.core.request import Request
from onbeat.engine.kv_transfer.source import KVSource
from onbeat.engine.messages import AskMove
from onbeat.scheduler.cluster.events import MoveStep
from onbeat.scheduler.cluster.move_executor import MoveExecutor, OpenMove

if TYPE_CHECKING:
    from onbeat.cluster.controller import FleetController

logger = logging.getLogger("onbeat.cluster")

_Move = OpenMove[OpenRequest, KVSource]


class LiveMoves:
    """The moves under way between live replicas.

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
        replicas: FleetController,
        requests: Mapping[str, OpenRequest],
        *,
        on_moved: Callable[[OpenRequest, Origin], None],
        on_stayed: Callable[[str], None],
        on_copied: Callable[[int], None],
    ) -> None:
        self._replicas = replicas
        self._requests = requests
        self._on_moved = on_moved
        self._on_copied = on_copied
        self._executor: MoveExecutor[OpenRequest, KVSource] = MoveExecutor(self, on_stayed=on_stayed)
        self.tell = replicas.tell
        self.block_size = replicas.block_size

    def do(self, step: MoveStep) -> None:
        """Carry out a step."""
        self._executor.do(step, self._requests.get(step.request_id))

    def on_answer(self, replica: ReplicaId, answer: TaskAnswer[KVSource]) -> None:
        """Take what a replica says of a step."""
        move = self._executor.moves.get(answer.move)
        if move is None:
            return
        if not answer.ok:
            logger.info(
                "%s: %s of %s failed: %s", replica, answer.verb, move.name, answer.why or "it has ended"
            )
        if answer.num_bytes:
            self._on_copied(answer.num_bytes)
        if answer.detached is not None:
            answer.detached = _shifted(answer.detached, self._replicas.clock_offset(replica))
        self._executor.on_answer(replica, answer)

    # --- what the executor asks for, see `MoveHost` ----------------------------------------------------

    def send(self, replica: ReplicaId, task: MoveTask[KVSource]) -> None:
        """Send a task to a replica."""
        self._replicas.send(replica, AskMove(task))

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
        self._on_moved(open_request, Origin(move.source, move.name, move.why))


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
