"""Which replica serves a request: the same objects in front of live and of simulated replicas."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import ReplicaLimits
from onbeat.core.hashing import BlockHash
from onbeat.scheduler.cluster.events import RoutingRequest
from onbeat.scheduler.cluster.routing import NONE_EXCLUDED, LeastLoaded, Router, RoutingChoice
from onbeat.scheduler.cluster.slo_router import SLORouter


class Stateless(Router):
    """A router that need not hear of requests."""

    def __init__(self) -> None:
        self._members: list[int] = []

    def join(self, replica: int, limits: ReplicaLimits | None = None) -> None:
        place = bisect_left(self._members, replica)
        if replica not in self._members[place : place + 1]:
            self._members.insert(place, replica)

    def leave(self, replica: int) -> None:
        self._members = [each for each in self._members if each != replica]

    def allowed(self, excluded: Collection[int]) -> list[int]:
        """Return the members that may be chosen, in their order."""
        if not excluded:
            return self._members
        return [each for each in self._members if each not in excluded]


class RoundRobin(Stateless):
    """The replicas in turn."""

    _next = 0
    """The first that may be next."""

    def route(
        self, request: RoutingRequest, now: float = 0.0, excluded: Collection[int] = NONE_EXCLUDED
    ) -> RoutingChoice | None:
        members = self.allowed(excluded)
        if not members:
            return None
        replica = members[bisect_left(members, self._next) % len(members)]
        self._next = replica + 1
        return RoutingChoice(replica, "turn")


class ByLoad(Router):
    """A router that counts each replica's load: in requests that have not ended, unless it says otherwise."""

    def __init__(self) -> None:
        self.replicas = LeastLoaded()

    def take(self, replica: int, request: RoutingRequest) -> None:
        self.replicas.add(replica, 1)

    def on_finish(self, replica: int, request: RoutingRequest) -> None:
        self.replicas.add(replica, -1)

    def join(self, replica: int, limits: ReplicaLimits | None = None) -> None:
        self.replicas.join(replica)

    def leave(self, replica: int) -> None:
        self.replicas.leave(replica)


class LeastOutstanding(ByLoad):
    """The replica with the fewest requests that have not ended."""

    def route(
        self, request: RoutingRequest, now: float = 0.0, excluded: Collection[int] = NONE_EXCLUDED
    ) -> RoutingChoice | None:
        replica = self.replicas.peek(excluded)
        if replica is None:
            return None
        self.replicas.choose(replica, 1)
        return RoutingChoice(replica, "load")


_USUAL_SLOTS = 256
"""`max_num_seqs` of a replica that nothing is known of."""


class PrefixAffinity(ByLoad):
    """The replica that was last sent the request's longest known prefix, unless it is overloaded.

    Overloaded is one with more than `max_imbalance` times the requests of the least loaded replica, and
    more above it than `min_excess` of its slots; then, and where less than half of the prompt's blocks are
    known, the least outstanding replica gets the request (SGLang's cache-aware router works by
    the same rules; Zheng et al., "SGLang", NeurIPS 2024).

    Attributes
    ----------
    min_excess : share of a replica's `max_num_seqs`; 256 where its limits are not known.
    max_known_blocks : blocks remembered, over all replicas; the least recently seen are forgotten first.
    """

    max_imbalance, min_excess, max_known_blocks = 1.5, 0.125, 1_000_000

    def __init__(self) -> None:
        super().__init__()
        self._replica_of_block: OrderedDict[BlockHash, int] = OrderedDict()
        self._excess: dict[int, float] = {}

    def join(self, replica: int, limits: ReplicaLimits | None = None) -> None:
        super().join(replica, limits)
        if limits is not None:
            self._excess[replica] = self.min_excess * limits.max_num_seqs

    def route(
        self, request: RoutingRequest, now: float = 0.0, excluded: Collection[int] = NONE_EXCLUDED
    ) -> RoutingChoice | None:
        least = self.replicas.peek(excluded)
        if least is None:
            return None
        matched = self._match(request.block_hashes)
        is_matched = (
            matched is not None and matched not in excluded and not self._is_overloaded(matched, least)
        )
        replica = matched if is_matched and matched is not None else least
        self._remember(request.block_hashes, replica)
        self.replicas.choose(replica, 1)
        return RoutingChoice(replica, "prefix" if is_matched else "load")

    def _match(self, block_hashes: Sequence[BlockHash]) -> int | None:
        """Return the member that holds enough of the prompt's first blocks."""
        known = self._replica_of_block
        replica = known.get(block_hashes[0]) if block_hashes else None
        if replica is None or replica not in self.replicas.members:
            return None
        num_matched = 1
        while num_matched < len(block_hashes) and known.get(block_hashes[num_matched]) == replica:
            num_matched += 1
        return replica if num_matched >= 0.5 * len(block_hashes) else None

    def _is_overloaded(self, replica: int, least: int) -> bool:
        load, least_load = self.replicas.loads[replica], self.replicas.loads[least]
        excess = self._excess.get(replica, self.min_excess * _USUAL_SLOTS)
        return load > self.max_imbalance * least_load and load - least_load > excess

    def _remember(self, block_hashes: Sequence[BlockHash], replica: int) -> None:
        known = self._replica_of_block
        for block_hash in block_hashes:
            known[block_hash] = replica
            known.move_to_end(block_hash)
        while len(known) > self.max_known_blocks:
            known.popitem(last=False)


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-outstanding": LeastOutstanding,
    "prefix-affinity": PrefixAffinity,
    "slo": SLORouter,
}


def make_router(name: str) -> Router:
    """Build a router by name, without members.

    Raises
    ------
    ConfigError : there is no such router.
    """
    if name not in ROUTERS:
        raise ConfigError(f"unknown router {name!r}; choose one of {', '.join(ROUTERS)}")
    return ROUTERS[name]()
