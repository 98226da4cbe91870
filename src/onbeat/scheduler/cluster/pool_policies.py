"""Where prompts are computed and where their streams go on, between two pools of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from onbeat.core.fleet import ReplicaLoad
from onbeat.scheduler.cluster.membership import Membership, Replica, RoutedRequest
from onbeat.scheduler.cluster.move_stages import STANDS_STILL, Move
from onbeat.scheduler.cluster.mover import MOST_STOPPED, Mover
from onbeat.scheduler.cluster.pools import Pools

_FEW_TOKENS = 64
"""Of a prompt that stays where it will decode, where no replica predicts what it costs."""


class PoolPolicy:
    """Decides where prompts are computed, and where and when their streams go on.

    This is the rule `adaptive`: a prompt that disturbs nobody is computed where it will generate, and a
    stream that no replica has capacity for goes on where its prompt was computed. Other rules differ in part.

    Parameters
    ----------
    mover : moves streams.
    """

    def __init__(self, mover: Mover, members: Membership, pools: Pools) -> None:
        self._mover = mover
        self._members = members
        self._pools = pools

    def prompt_replicas(
        self, open_request: RoutedRequest, prefill: Sequence[Replica], decode: Sequence[Replica]
    ) -> Sequence[Replica]:
        """Return the replicas whose streams hardly notice the prompt, else those that compute prompts."""
        held = self._pools.router.num_held(open_request.request)
        num_tokens = open_request.num_tokens
        undisturbed = [
            each
            for each in decode
            if _fits_in_a_step(each.load, num_tokens, min(held.get(each.number, 0), num_tokens))
        ]
        return undisturbed or prefill

    def stream_replica(self, open_request: RoutedRequest, source: Replica) -> Replica | None:  # noqa: ARG002
        """Return where a request will generate whose prompt is sent to another pool; None: not known yet."""
        return None

    def on_sent(self, open_request: RoutedRequest, source: Replica, destination: Replica, now: float) -> None:
        """Hear that a request has been sent that is to generate at another replica, a known one."""

    def on_first_token(self, open_request: RoutedRequest, source: Replica, now: float) -> None:
        """Move a request that stands still, or let it go on where it is until there is capacity."""
        destination = self._mover.destination(open_request, source, most_coming=MOST_STOPPED)
        if destination is None:
            self._mover.put_back(open_request, source, now)
        else:
            self._mover.begin(open_request, source, destination, "prefill", now, course=STANDS_STILL)

    # --- for policies whose streams wait for capacity, and stand still meanwhile --------------------------

    def on_no_capacity(self, open_request: RoutedRequest, move: Move) -> None:
        """Hear that a destination has no capacity after all, where the course of the move waits for some."""

    def on_change(self) -> None:
        """Hear that a replica may have more capacity than before, or that none ever will."""

    def advance(self, now: float, *, is_time: bool) -> None:
        """Begin the moves that are due.

        Parameters
        ----------
        is_time : whether those that had no capacity are to be tried again.
        """


def _fits_in_a_step(load: ReplicaLoad | None, num_tokens: int, num_cached_tokens: int) -> bool:
    """Return whether a step of a replica can compute a prompt, beside what it has to do.

    It then keeps the tightest TBT of the streams there; where none has any, it is at most twice as long.
    """
    num_new = num_tokens - num_cached_tokens
    step = None if load is None else load.decode_step()
    if load is None or load.costs is None or step is None:
        return num_new <= _FEW_TOKENS
    longest = load.tightest_tbt if load.tightest_tbt < inf else 2 * step
    return step + load.costs.seconds(num_new, num_cached_tokens) <= longest
