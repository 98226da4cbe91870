"""Begins moves, and knows which requests may move and which replicas have capacity for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from onbeat.core.handover import MoveVerb
from onbeat.scheduler.cluster.events import FleetAction, MoveStep
from onbeat.scheduler.cluster.membership import Membership, Replica, ReplicaState, RoutedRequest
from onbeat.scheduler.cluster.move_stages import GROWTH_BLOCKS, RUNS, Course, Move
from onbeat.scheduler.cluster.moves import Moves
from onbeat.scheduler.cluster.pools import Pools

MOST_AT_ONCE = 2
"""Moves from one replica, and to one: copies share the memory's bandwidth with the steps."""
MOST_STOPPED = 8
"""Moves to one replica where requests stand still already, since only their prompts were computed."""
FEW_TOKENS = 8
"""A request that has as few left ends sooner than it is moved."""
RETRY_SECONDS = 0.25
"""After which a request is moved that could not be."""
_MOST_FAILURES = 3
"""Moves of a request that fail, not for want of capacity, before it is left where it is."""

Resend = Callable[[RoutedRequest, Replica, Replica, float], None]


class Mover:
    """What rules ask about requests and replicas before they move a stream.

    Parameters
    ----------
    act : takes what is to be done.
    resend : takes a request back from a replica and sends it to another one, which computes it from the
        start; is called with the request, both replicas, and the time.

    Attributes
    ----------
    moves : those under way.
    waiting : requests that stand still until a replica has capacity, the first first; with their moves, where
        one has been begun.
    least_left : a stream that has as few tokens left, or fewer, is not moved.
    is_to_look : whether somebody may be free to move that was not before.
    """

    def __init__(
        self,
        members: Membership,
        pools: Pools,
        moves: Moves,
        *,
        act: Callable[[FleetAction], None],
        resend: Resend,
    ) -> None:
        self._members = members
        self._pools = pools
        self._act = act
        self.moves = moves
        self.resend = resend
        self.waiting: dict[str, tuple[RoutedRequest, Move | None]] = {}
        self.least_left = FEW_TOKENS
        self.is_to_look = False

    def movable(self) -> list[Replica]:
        """Return the replicas whose streams may move; those of prompts let go of theirs in any case."""
        return [
            each
            for each in self._members.having(ReplicaState.READY, ReplicaState.DRAINING)
            if each.moves_streams and not self._pools.is_prefill(each.replica_id)
        ]

    def may_move(self, open_request: RoutedRequest, now: float) -> bool:
        """Return whether a stream is free to move, and no move of it has just failed."""
        return now >= open_request.no_move_before and self.is_free_to_move(open_request)

    def may_resend(self, open_request: RoutedRequest, source: Replica) -> bool:
        """Return whether a request that holds no KV may begin elsewhere: prompts of pools stay in theirs."""
        request_id = open_request.request.request_id
        is_elsewhere = request_id in self.waiting or self.moves.is_under_way(request_id)
        return open_request.may_begin_again and not (
            is_elsewhere or self._pools.is_prefill(source.replica_id)
        )

    def begin(
        self,
        open_request: RoutedRequest,
        source: Replica,
        destination: Replica,
        why: str,
        now: float,
        *,
        course: Course = RUNS,
    ) -> None:
        """Begin to move a stream."""
        self.moves.begin(
            open_request.request.request_id,
            source.replica_id,
            destination.replica_id,
            num_blocks=num_blocks_of(open_request, destination),
            why=why,
            now=now,
            course=course,
        )

    def put_back(self, open_request: RoutedRequest, source: Replica, now: float) -> None:
        """Let a request go on at its source that stands still there and does not move."""
        self._act(MoveStep(source.replica_id, "", open_request.request.request_id, MoveVerb.REATTACH))
        open_request.no_move_before = now + RETRY_SECONDS
        self.is_to_look = True

    def is_free_to_move(self, open_request: RoutedRequest) -> bool:
        """Return whether a stream runs that may be moved, and has so much left that this is worth it."""
        request = open_request.request
        may_succeed = open_request.num_failed_moves < _MOST_FAILURES
        return (
            open_request.has_started
            and self.has_many_left(open_request)
            and may_succeed
            and request.request_id not in self.waiting
            and not self.moves.is_under_way(request.request_id)
        )

    def has_many_left(self, open_request: RoutedRequest) -> bool:
        """Return whether a request does not end sooner than it is moved."""
        return open_request.request.max_tokens - open_request.num_output_tokens > self.least_left

    def destination(
        self, open_request: RoutedRequest, source: Replica, *, most_coming: float = MOST_AT_ONCE
    ) -> Replica | None:
        """Return the candidate with the most capacity for each of its requests, this one included."""
        fitting = [
            each for each in self.candidates(source) if self.fits(open_request, each, most_coming=most_coming)
        ]
        return max(fitting, key=lambda each: (self.freeness(open_request, each), -each.order), default=None)

    def may_ever_move(self, open_request: RoutedRequest, source: Replica) -> bool:
        """Return whether a candidate would take a stream if it had nothing else to do."""
        return any(_could_take(open_request, each) for each in self.candidates(source))

    def candidates(self, source: Replica) -> Iterable[Replica]:
        """Return the replicas that may take a request: those that decode, else any, where one drains."""
        others = [
            each
            for each in self._members.having(ReplicaState.READY)
            if each is not source and each.moves_streams
        ]
        decoding = [each for each in others if not self._pools.is_prefill(each.replica_id)]
        return decoding if decoding or source.state is not ReplicaState.DRAINING else others

    def fits(
        self, open_request: RoutedRequest, replica: Replica, *, most_coming: float = MOST_AT_ONCE
    ) -> bool:
        """Return whether a replica has a slot and blocks for a stream, and fewer are on their way to it."""
        limits = replica.limits
        assert limits is not None, "it is ready"
        return (
            _could_take(open_request, replica)
            and self.moves.num_to(replica.replica_id) < most_coming
            and self._num_running(replica) < limits.max_num_seqs
            and self._num_free(replica) >= num_blocks_of(open_request, replica) + GROWTH_BLOCKS
        )

    def freeness(self, open_request: RoutedRequest, replica: Replica) -> float:
        """Return the free blocks for each request, once this one is there (Llumnix, section 4.4.2)."""
        num_left = self._num_free(replica) - num_blocks_of(open_request, replica)
        return num_left / (1 + self._num_running(replica))

    def _num_running(self, replica: Replica) -> int:
        """Return the requests that run there or are on their way."""
        num_reported = 0 if replica.load is None else replica.load.num_running
        return num_reported + self.moves.num_coming(replica.replica_id)

    def _num_free(self, replica: Replica) -> int:
        """Return the blocks that nobody has there, is going to have, or waits for."""
        limits, load = replica.limits, replica.load
        assert limits is not None
        num_coming = self.moves.num_blocks_to(replica.replica_id)
        if load is None:
            return limits.num_blocks - num_coming
        return load.num_free_blocks - load.num_wanted_blocks - num_coming


def _could_take(open_request: RoutedRequest, replica: Replica) -> bool:
    """Return whether a replica with nothing to do would take a request."""
    limits, request = replica.limits, open_request.request
    assert limits is not None, "it is ready"
    is_short = request.num_prompt_tokens + request.max_tokens <= limits.max_model_len
    return is_short and limits.num_blocks >= num_blocks_of(open_request, replica) + GROWTH_BLOCKS


def num_blocks_of(open_request: RoutedRequest, replica: Replica) -> int:
    """Return the blocks of a replica that a request has, as far as the fleet knows."""
    assert replica.limits is not None
    return replica.limits.num_blocks_for(open_request.num_tokens)


class MoveRule(Protocol):
    """Decides which streams move without a drain, and without prompts on replicas of their own."""

    def on_report(self, replica: Replica, now: float) -> None:
        """Look at how a replica stands, by its newest report, and begin what moves are wanted.

        It is ready, and its streams may move.
        """
        ...
