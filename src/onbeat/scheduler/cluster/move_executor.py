"""Carries the steps of moves to the agents at the replicas, and their answers back, live or simulated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from onbeat.core.fleet import ReplicaId
from onbeat.core.handover import Detached, LentT, MoveTask, MoveVerb, TaskAnswer
from onbeat.core.request import Request
from onbeat.scheduler.cluster.events import Answered, MoveStep

RequestT = TypeVar("RequestT")
"""What a fleet's owner knows a request by."""


@dataclass(slots=True)
class OpenMove(Generic[RequestT, LentT]):
    """A move under way, with what one replica has to know of the other."""

    request: RequestT
    source: ReplicaId
    name: str
    """Under which the source has the request."""
    why: str
    lent: LentT | None = None
    """By the source."""
    detached: Detached | None = None
    adopted: str = ""
    """Under which the destination has it, or will."""


class MoveExecutor(ABC, Generic[RequestT, LentT]):
    """The moves under way. Whoever has the replicas knows where requests are, and reaches the agents.

    Attributes
    ----------
    moves : by their ids, until the source may forget them.
    """

    def __init__(self) -> None:
        self.moves: dict[str, OpenMove[RequestT, LentT]] = {}

    @abstractmethod
    def send(self, replica: ReplicaId, task: MoveTask[LentT]) -> None:
        """Let the agent at a replica take a task; it is lost with the replica."""

    @abstractmethod
    def tell(self, event: Answered) -> None:
        """Tell the fleet what happened."""

    @abstractmethod
    def num_tokens_in(self, replica: ReplicaId, num_blocks: int) -> int:
        """Return the tokens of a request that holds so many of a replica's blocks."""

    @abstractmethod
    def whereabouts(self, request: RequestT) -> tuple[ReplicaId, str]:
        """Return the replica that has a request, and the name under which it does."""

    @abstractmethod
    def adoption(
        self, move_id: str, move: OpenMove[RequestT, LentT], destination: ReplicaId
    ) -> tuple[Request, Detached] | None:
        """Return a request as its destination is to go on with it; None where it must not."""

    @abstractmethod
    def hand_over(self, move: OpenMove[RequestT, LentT], destination: ReplicaId) -> None:
        """Let a request be its destination's from now on."""

    def do(self, step: MoveStep, request: RequestT | None) -> None:
        """Carry out a step of the move of a request; None where that has ended."""
        verb = step.verb
        move = self.moves.get(step.move)
        if move is None and verb in (MoveVerb.RESERVE, MoveVerb.HOLD):
            assert request is not None
            move = self.moves[step.move] = OpenMove(request, *self.whereabouts(request), step.why)
        if move is None:
            if not step.move and request is not None:  # one that stands still and is not moved
                self.send(step.replica, MoveTask("", verb, self.whereabouts(request)[1]))
            return
        task = self._task(step, move)
        if task is None:
            self.tell(Answered(step.replica, step.move, verb, ok=False))
            return
        self.send(move.source if verb is MoveVerb.TAKE else step.replica, task)
        if verb in (MoveVerb.TAKE, MoveVerb.UNHOLD, MoveVerb.REATTACH):
            del self.moves[step.move]
        if verb is MoveVerb.TAKE:
            self.hand_over(move, step.replica)

    def _task(self, step: MoveStep, move: OpenMove[RequestT, LentT]) -> MoveTask[LentT] | None:
        """Return what an agent is asked for, with what it has to know; None where that must not be done."""
        task: MoveTask[LentT] = MoveTask(step.move, step.verb, move.name)
        match step.verb:
            case MoveVerb.RESERVE | MoveVerb.HOLD:
                task.num_tokens = self.num_tokens_in(step.replica, step.num_blocks)
            case MoveVerb.PULL:
                task.source, task.first_block = move.lent, step.num_blocks
            case MoveVerb.ADOPT:
                adoption = self.adoption(step.move, move, step.replica)
                if adoption is None:
                    return None
                task.request, task.detached = adoption
                move.adopted = task.request.request_id
        return task

    def on_answer(self, replica: ReplicaId, answer: TaskAnswer[LentT]) -> None:
        """Take what the agent at a replica says of a task."""
        move = self.moves.get(answer.move)
        if move is None:
            return
        if answer.source is not None:
            move.lent = answer.source
        if answer.detached is not None:
            move.detached = answer.detached
        num_blocks = 0 if answer.source is None else len(answer.source.block_ids)
        self.tell(Answered(replica, answer.move, answer.verb, answer.ok, num_blocks))
