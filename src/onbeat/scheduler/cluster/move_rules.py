"""What decides which streams move while all is well with their replicas: the seam, and what rules may ask."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from onbeat.core.fleet import ReplicaId
from onbeat.scheduler.cluster.membership import OpenRequest, Replica
from onbeat.scheduler.cluster.move_stages import RUNS, Course, Move

MOST_AT_ONCE = 2
"""Moves from one replica, and to one: copies share the memory's bandwidth with the steps."""
MOST_STOPPED = 8
"""Moves to one replica where requests stand still already, since only their prompts were computed."""
FEW_TOKENS = 8
"""A request that has as few left ends sooner than it is moved."""


class Mover(Protocol):
    """Carries moves out, and knows who may go where."""

    def movable(self) -> list[Replica]:
        """Return the replicas whose streams may move, those that drain included."""
        ...

    def candidates(self, source: Replica) -> Iterable[Replica]:
        """Return the replicas that may take a stream of another one."""
        ...

    def has_room(self, opened: OpenRequest, replica: Replica, *, most_coming: float = MOST_AT_ONCE) -> bool:
        """Return whether a replica has a slot and blocks for a stream, and so few or fewer come to it."""
        ...

    def destination(
        self, opened: OpenRequest, source: Replica, *, most_coming: float = MOST_AT_ONCE
    ) -> Replica | None:
        """Return the candidate with the most room for each of its requests, this one included."""
        ...

    def may_ever_move(self, opened: OpenRequest, source: Replica) -> bool:
        """Return whether a candidate would take a stream if it had nothing else to do."""
        ...

    def may_move(self, opened: OpenRequest, now: float) -> bool:
        """Return whether a stream can be moved now, and has so much left that this is sooner than its end."""
        ...

    def freeness(self, opened: OpenRequest, replica: Replica) -> float:
        """Return the blocks that a replica will have left for each request, a new one included."""
        ...

    def num_from(self, replica: ReplicaId) -> int:
        """Return how many streams are on their way from a replica."""
        ...

    def num_coming(self, replica: ReplicaId) -> int:
        """Return how many are on their way to one."""
        ...

    def num_blocks_to(self, replica: ReplicaId) -> int:
        """Return the blocks that these will have there."""
        ...

    def begin(
        self,
        opened: OpenRequest,
        source: Replica,
        destination: Replica,
        why: str,
        now: float,
        *,
        course: Course = RUNS,
    ) -> None:
        """Begin to move a stream."""
        ...

    def try_again(self, move: Move, opened: OpenRequest, destination: Replica | None, now: float) -> None:
        """Go on with a move that is nowhere; None lets its request go on at its source."""
        ...

    def put_back(self, opened: OpenRequest, source: Replica, now: float) -> None:
        """Let a request go on at its source that stands still there and does not move."""
        ...

    def may_resend(self, opened: OpenRequest, source: Replica) -> bool:
        """Return whether a request that holds no KV may begin elsewhere."""
        ...

    def resend(self, opened: OpenRequest, source: Replica, destination: Replica, now: float) -> None:
        """Take a request back from a replica and send it to another one, which computes it from the start."""
        ...


class MoveRule(Protocol):
    """Decides which streams move without a drain, and without prompts on replicas of their own."""

    def on_report(self, replica: Replica, now: float) -> None:
        """Look at how a replica stands, by its newest report, and begin what moves are wanted.

        It is ready, and its streams may move.
        """
        ...


def num_blocks_of(opened: OpenRequest, replica: Replica) -> int:
    """Return the blocks of a replica that a request has, as far as the fleet knows."""
    assert replica.limits is not None
    return replica.limits.num_blocks_for(opened.num_tokens)
