"""How many replicas a fleet has: as many as are asked for, or as it decides itself."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from onbeat.core.errors import ConfigError
from onbeat.scheduler.cluster.events import FleetAction, Rescale, ScaleAsked, ScalingAsked
from onbeat.scheduler.cluster.membership import Membership, Replica, ReplicaState, check_count
from onbeat.scheduler.cluster.pools import Pools
from onbeat.scheduler.cluster.scaling import ScaleBounds, Scaling


class Sizing:
    """Starts replicas, or lets some end, until there are as many as there are to be.

    Parameters
    ----------
    scaling : decides on the number; None where the fleet does not.
    act : wants an action done.
    start, drain : are called with a replica and the time.
    """

    def __init__(
        self,
        members: Membership,
        pools: Pools,
        scaling: Scaling | None,
        *,
        act: Callable[[FleetAction], None],
        start: Callable[[Replica, float], None],
        drain: Callable[[Replica, float], None],
    ) -> None:
        self._members = members
        self._pools = pools
        self._scaling = scaling
        self._act = act
        self._start = start
        self._drain = drain

    def on_scale(self, event: ScaleAsked, now: float) -> None:
        """Have so many replicas, those that stay down started again included."""
        check_count(event.num_replicas)
        self._forgive()
        if self._scaling is not None and self._scaling.has_begun:
            self._scaling.set_bounds(event.num_replicas, event.num_replicas, now)
        self._resize(event.num_replicas, now)

    def on_scaling(self, event: ScalingAsked, now: float) -> None:
        """Let the fleet decide from now on, between two numbers."""
        if self._scaling is None:
            raise ConfigError("this fleet does not scale itself; start it with --autoscale")
        bounds = ScaleBounds(event.least, event.most)
        self._scaling.set_bounds(bounds.least, bounds.most, now)
        self._forgive()

    def rescale(self, decided: Rescale | None, now: float) -> None:
        """Have another number of replicas, if one was decided on."""
        if decided is not None:
            self._act(decided)
            self._resize(decided.num_replicas, now)

    def _forgive(self) -> None:
        """Let those that stay down be started again: they were asked for, too, and are again."""
        for replica in self._members.having(ReplicaState.DOWN):
            self._members.change(replica, ReplicaState.STOPPED)

    def _resize(self, num_replicas: int, now: float) -> None:
        """Start replicas, or let some end, until so many serve or will."""
        members = self._members
        expected = members.expected()
        for name in islice(members.unused_ids(), max(0, num_replicas - len(expected))):
            replica = members.get(name)
            replica.forgive()
            self._start(replica, now)
        # Those that compute prompts go last, those that are not ready first, then those with the least to do,
        # the last named of them.
        expected.sort(
            key=lambda each: (
                self._pools.is_prefill(each.replica_id),
                each.state is ReplicaState.READY,
                len(each.open),
                -each.order,
            )
        )
        for replica in expected[: max(0, len(expected) - num_replicas)]:
            self._drain(replica, now)
