"""Moves that mend what is predicted to go wrong on a replica, and no others."""

from __future__ import annotations

from onbeat.scheduler.cluster.balance import has_spare_capacity, is_worth_it, trouble
from onbeat.scheduler.cluster.membership import Replica, RoutedRequest
from onbeat.scheduler.cluster.mover import Mover, num_blocks_of

_CALM_SECONDS = 0.5
"""After a move that was to mend something, its replica is left alone for so long: reports must show it."""
_STAY_SECONDS = 5.0
"""For so long a request that was moved to mend something is not moved for that again."""


class Mending:
    """Moves the request that came last away from a replica that is in trouble, if that is worth it.

    The first that waits there without blocks, new or preempted, has nothing to move: it begins elsewhere.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover

    def on_report(self, replica: Replica, now: float) -> None:
        """See `MoveRule.on_report`."""
        load, limits = replica.load, replica.limits
        assert load is not None
        assert limits is not None
        if now < replica.no_mending_before or (load.blocked and self._resend(replica, load.blocked, now)):
            return
        if (why := trouble(load, limits)) and not self._mover.moves.num_from(replica.replica_id):
            self._mend(replica, why, now)

    def _resend(self, source: Replica, request_id: str, now: float) -> bool:
        """Let a request that waits begin where there is capacity for it; return whether there is any."""
        open_request = source.open.get(request_id)
        if (
            open_request is None
            or now < open_request.no_mending_before
            or not self._mover.may_resend(open_request, source)
        ):
            return False
        destination = self._destination(open_request, source)
        if destination is not None:
            source.no_mending_before = now + _CALM_SECONDS
            open_request.no_mending_before = now + _STAY_SECONDS
            self._mover.resend(open_request, source, destination, now)
        return destination is not None

    def _mend(self, source: Replica, why: str, now: float) -> None:
        """Begin to move the request that came last, which would be preempted first, if that is worth it."""
        load, mover = source.load, self._mover
        assert load is not None
        source.no_mending_before = now + _CALM_SECONDS
        for open_request in sorted(source.open.values(), key=_arrival, reverse=True):
            num_steps = 0 if why == "steps" else _steps_to_an_end(source, open_request)
            if not is_worth_it(load, open_request.num_tokens, num_steps=num_steps):
                continue
            if now < open_request.no_mending_before or not mover.may_move(open_request, now):
                continue
            destination = self._destination(open_request, source)
            if destination is not None:
                mover.begin(open_request, source, destination, why, now)
                open_request.no_mending_before = now + _STAY_SECONDS
            return

    def _destination(self, open_request: RoutedRequest, source: Replica) -> Replica | None:
        """Return the replica with the most capacity of those that take a request without trouble."""
        spare = [each for each in self._mover.candidates(source) if self._can_spare(open_request, each)]
        return max(
            spare, key=lambda each: (self._mover.freeness(open_request, each), -each.order), default=None
        )

    def _can_spare(self, open_request: RoutedRequest, replica: Replica) -> bool:
        """Return whether a replica takes a request without being in trouble itself."""
        load, limits = replica.load, replica.limits
        if load is None or limits is None or not self._mover.fits(open_request, replica):
            return False
        num_coming = self._mover.moves.num_coming(replica.replica_id)
        num_blocks = self._mover.moves.num_blocks_to(replica.replica_id) + num_blocks_of(
            open_request, replica
        )
        num_blocks += limits.num_blocks_for(replica.num_queued_tokens)  # which its report may not show
        slo, step = open_request.request.slo, load.decode_step(num_coming + 1)
        if slo is not None and slo.tbt is not None and step is not None and step > slo.tbt:
            return False
        return has_spare_capacity(load, limits, num_blocks=num_blocks, num_more=num_coming + 1)


def _steps_to_an_end(source: Replica, open_request: RoutedRequest) -> int:
    """Return the steps until another stream ends and gives back its blocks, as far as the fleet knows."""
    left = (
        each.request.max_tokens - each.num_output_tokens
        for each in source.open.values()
        if each is not open_request and each.has_started
    )
    return max(0, min(left, default=0))


def _arrival(open_request: RoutedRequest) -> float:
    return open_request.request.arrival
