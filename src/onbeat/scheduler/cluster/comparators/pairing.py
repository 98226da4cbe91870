"""Streams go from the fullest replicas to the freest, pair by pair (Sun et al., "Llumnix", OSDI 2024)."""

from __future__ import annotations

from onbeat.scheduler.cluster.comparators.virtual_usage import freeness, is_high
from onbeat.scheduler.cluster.membership import Replica, ReplicaState, RoutedRequest
from onbeat.scheduler.cluster.mover import Mover, num_blocks_of

FREE_ENOUGH = 3.0
"""Blocks for each running request; who has fewer gives streams away, who has more takes some. That of the
paper's released code."""
_PAIR_SECONDS = 0.2
"""Between two looks at the whole fleet."""


class Pairing:
    """Pairs the least free replica with the freest, the next with the next, and moves a stream in each pair.

    The stream is one of low priority before those of high, and the shortest of these (section 4.4.3). It
    moves if the freer replica is with it still freer than the other was, so that none goes to and fro. A
    replica that drains is the least free of all.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._look_at = 0.0

    def on_report(self, replica: Replica, now: float) -> None:  # noqa: ARG002 (all are looked at)
        """See `MoveRule.on_report`."""
        if now < self._look_at:
            return
        self._look_at = now + _PAIR_SECONDS
        known = [each for each in self._mover.movable() if each.load is not None]
        free = {each.order: self._freeness(each) for each in known}
        known.sort(key=lambda each: (free[each.order], each.order))
        sources = [each for each in known if free[each.order] < FREE_ENOUGH]
        destinations = [each for each in reversed(known) if free[each.order] > FREE_ENOUGH]
        for source, destination in zip(sources, destinations, strict=False):
            if not self._mover.moves.num_from(source.replica_id):
                self._move_one(source, destination, now)

    def _move_one(self, source: Replica, destination: Replica, now: float) -> None:
        may_move = [each for each in source.open.values() if self._mover.may_move(each, now)]
        open_request = min(may_move, key=_turn, default=None)
        if (
            open_request is not None
            and destination in self._mover.candidates(source)
            and self._mover.fits(open_request, destination)
            and self._evens_out(open_request, source, destination)
        ):
            self._mover.begin(open_request, source, destination, "balance", now)

    def _evens_out(self, open_request: RoutedRequest, source: Replica, destination: Replica) -> bool:
        num_high = int(is_high(open_request.request.priority))
        taken = self._freeness(destination, num_blocks_of(open_request, destination), 1, num_high)
        return taken > self._freeness(source)

    def _freeness(self, replica: Replica, num_blocks: int = 0, num_more: int = 0, num_high: int = 0) -> float:
        """Return how free a replica is with what is on its way there, and with a change to that."""
        assert replica.load is not None
        replica_id = replica.replica_id
        return freeness(
            replica.load,
            replica.limits,
            num_high=num_high + sum(is_high(each.request.priority) for each in replica.open.values()),
            num_blocks=num_blocks + self._mover.moves.num_blocks_to(replica_id),
            num_more=num_more + self._mover.moves.num_coming(replica_id),
            is_draining=replica.state is ReplicaState.DRAINING,
        )


def _turn(open_request: RoutedRequest) -> tuple[bool, int, float]:
    request = open_request.request
    return is_high(request.priority), open_request.num_tokens, request.arrival
