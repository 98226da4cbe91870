"""Moves that mend what is predicted to go wrong on a replica, and no others."""

from __future__ import annotations

from onbeat.core.fleet import ReplicaLimits, ReplicaLoad
from onbeat.scheduler.cluster.membership import Replica, RoutedRequest
from onbeat.scheduler.cluster.mover import Mover, num_blocks_of

LOOK_AHEAD = 1.0
"""Seconds for which streams are to have blocks: without, one is about to be preempted."""
_STILL_STEPS = 4
"""Steps for which a stream stands still while it moves."""
_GUESSED_STEPS = 16
"""That are looked ahead where nobody predicts how long they take."""


def trouble(load: ReplicaLoad, limits: ReplicaLimits, *, num_more: int = 0) -> str:
    """Return what is predicted to go wrong on a replica; nothing where all is well.

    `memory`: its streams will need more blocks within `LOOK_AHEAD` than are free, so that one is preempted.
    `queue`: the first of those that wait gets no blocks. `steps`: they take longer than the tightest TBT.

    Parameters
    ----------
    num_more : streams that are still to come.
    """
    if load.num_free_blocks < _growth(load, limits, num_more):
        return "memory"
    if load.num_wanted_blocks > 0:
        return "queue"
    step = load.decode_step(num_more)
    if step is not None and load.num_decodes + num_more > 1 and step > load.tightest_tbt:
        return "steps"
    return ""


def has_spare_capacity(load: ReplicaLoad, limits: ReplicaLimits, *, num_blocks: int, num_more: int) -> bool:
    """Return whether a replica can take one more stream and still be in no trouble.

    One that has nothing else to do can: a stream is nowhere better off than by itself.

    Parameters
    ----------
    num_blocks : of this one, and of those that are on their way.
    num_more : streams, likewise.
    """
    free = load.num_free_blocks - num_blocks
    if load.num_running == load.num_waiting == 0 and num_more == 1:
        return free >= 0
    is_calm = not trouble(load, limits, num_more=num_more) and load.num_waiting == 0
    return is_calm and free >= 2 * _growth(load, limits, num_more)


def is_worth_it(load: ReplicaLoad, num_tokens: int, *, num_steps: int = 0) -> bool:
    """Return whether a move costs less than what it mends: to wait, and to compute a stream's tokens again.

    Parameters
    ----------
    load : of the source.
    num_tokens : of the stream.
    num_steps : for which it would wait for blocks.
    """
    costs, step = load.costs, load.decode_step()
    if costs is None or step is None:
        return True
    return _STILL_STEPS * step < num_steps * step + costs.seconds(num_tokens, 0)


def _growth(load: ReplicaLoad, limits: ReplicaLimits, num_more: int) -> float:
    """Return the blocks that its streams and so many more will need beyond those that they have."""
    step = load.decode_step(num_more)
    num_steps = _GUESSED_STEPS if step is None else LOOK_AHEAD / max(step, 1e-4)
    return (load.num_decodes + num_more) * num_steps / limits.block_size


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
