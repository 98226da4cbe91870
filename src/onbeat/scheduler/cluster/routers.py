"""Which replica serves a request: the same objects in front of live and of simulated replicas."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from typing import Protocol

from onbeat.core.errors import ConfigError
from onbeat.core.hashing import BlockHash


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What a router may know of a request."""

    request_id: str
    block_hashes: Sequence[BlockHash] = ()
    """Of its prompt, first block first; empty where prefixes are not known."""
    prefill_work: float = 0.0
    """Predicted seconds of a replica until its first token."""
    decode_work: float = 0.0
    """Predicted seconds of a replica for the tokens after that."""


class Router(Protocol):
    """Chooses a replica and hears what becomes of the request there.

    At first all replicas are members. Each call costs at most O(log replicas), and O(blocks) where prefixes
    are looked at; a change of the members O(replicas).
    """

    ignores_state: bool
    """Whether the choice depends on the requests so far alone, and not on how the replicas get on."""
    weighs_work: bool
    """Whether it looks at predicted work, which others need not predict."""

    def route(self, request: RoutingRequest) -> int:
        """Return the replica that serves the request; it counts as outstanding there from now on."""
        ...

    def on_first_token(self, replica: int, request: RoutingRequest) -> None:
        """Hear that its prompt is done."""
        ...

    def on_finish(self, replica: int, request: RoutingRequest) -> None:
        """Hear that it ended."""
        ...

    def join(self, replica: int) -> None:
        """Let a replica that has left be chosen again, with what is outstanding there."""
        ...

    def leave(self, replica: int) -> None:
        """Choose a replica no more; it may still end what it has.

        Raises
        ------
        ConfigError : it is the last one.
        """
        ...


def _without(members: Iterable[int], replica: int) -> list[int]:
    rest = sorted(set(members) - {replica})
    if not rest:
        raise ConfigError(
            f"replica {replica} cannot leave: no other takes requests; let another one join before"
        )
    return rest


class _Stateless:
    """A router that need not hear of requests."""

    ignores_state = True
    weighs_work = False

    def __init__(self, num_replicas: int) -> None:
        self._members = list(range(num_replicas))

    def join(self, replica: int) -> None:
        self._members = sorted({*self._members, replica})

    def leave(self, replica: int) -> None:
        self._members = _without(self._members, replica)

    def on_first_token(self, replica: int, request: RoutingRequest) -> None:
        """Nothing is kept."""

    def on_finish(self, replica: int, request: RoutingRequest) -> None:
        """Nothing is kept."""


class RoundRobin(_Stateless):
    """The replicas in turn."""

    _next = 0
    """The first that may be next."""

    def route(self, request: RoutingRequest) -> int:  # noqa: ARG002 (all requests are alike)
        members = self._members
        replica = members[bisect_left(members, self._next) % len(members)]
        self._next = replica + 1
        return replica


class RandomRouter(_Stateless):
    """Evenly by a hash of the seed and the request's id: the same request goes to the same replica."""

    def __init__(self, num_replicas: int, *, seed: int = 0) -> None:
        super().__init__(num_replicas)
        self._prefix = f"{seed}/"

    def route(self, request: RoutingRequest) -> int:
        digest = blake2b((self._prefix + request.request_id).encode(), digest_size=8).digest()
        return self._members[int.from_bytes(digest, "little") % len(self._members)]


class LeastLoaded:
    """Replicas by a load that goes up and down; of equal ones, the least recently chosen first.

    A heap in which only a replica's newest entry counts; stale ones are dropped when they come to the top, or
    all at once when they are the majority, so a change costs O(log replicas).
    """

    def __init__(self, num_replicas: int) -> None:
        self.loads = [0.0] * num_replicas
        self.members = frozenset(range(num_replicas))
        self._last_choices = list(range(-num_replicas, 0))
        self._num_choices = 0
        self._heap = [(0.0, order, replica) for replica, order in enumerate(self._last_choices)]

    def peek(self) -> int:
        """Return the member with the least load."""
        heap, members = self._heap, self.members
        while True:
            load, last_choice, replica = heap[0]
            is_newest = load == self.loads[replica] and last_choice == self._last_choices[replica]
            if is_newest and replica in members:
                return replica
            heappop(heap)

    def choose(self, replica: int, load: float) -> None:
        """Add load to a replica that was chosen."""
        self._last_choices[replica] = self._num_choices
        self._num_choices += 1
        self.add(replica, load)

    def add(self, replica: int, load: float) -> None:
        """Change a replica's load."""
        self.loads[replica] += load
        heappush(self._heap, self._entry(replica))
        if len(self._heap) > 4 * len(self.loads):
            self.set_members(self.members)

    def set_members(self, members: Iterable[int]) -> None:
        """Say which replicas may be chosen; the loads of the others are kept."""
        self.members = frozenset(members)
        self._heap = [self._entry(each) for each in self.members]
        heapify(self._heap)

    def _entry(self, replica: int) -> tuple[float, int, int]:
        return (self.loads[replica], self._last_choices[replica], replica)


class _ByLoad:
    """A router that counts each replica's load: in requests that have not ended, unless it says otherwise."""

    ignores_state = False
    weighs_work = False

    def __init__(self, num_replicas: int) -> None:
        self._replicas = LeastLoaded(num_replicas)

    def on_first_token(self, replica: int, request: RoutingRequest) -> None:
        """Nothing changes: the request is still outstanding."""

    def on_finish(self, replica: int, request: RoutingRequest) -> None:  # noqa: ARG002
        self._replicas.add(replica, -1)

    def join(self, replica: int) -> None:
        self._replicas.set_members({*self._replicas.members, replica})

    def leave(self, replica: int) -> None:
        self._replicas.set_members(_without(self._replicas.members, replica))


class LeastOutstanding(_ByLoad):
    """The replica with the fewest requests that have not ended."""

    def route(self, request: RoutingRequest) -> int:  # noqa: ARG002 (all requests count the same)
        replica = self._replicas.peek()
        self._replicas.choose(replica, 1)
        return replica


class LeastWork(_ByLoad):
    """The replica with the least predicted work left: prompts to run, and tokens to generate."""

    weighs_work = True

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas)
        self._num_outstanding = [0] * num_replicas

    def route(self, request: RoutingRequest) -> int:
        replica = self._replicas.peek()
        self._num_outstanding[replica] += 1
        self._replicas.choose(replica, request.prefill_work + request.decode_work)
        return replica

    def on_first_token(self, replica: int, request: RoutingRequest) -> None:
        self._replicas.add(replica, -request.prefill_work)

    def on_finish(self, replica: int, request: RoutingRequest) -> None:
        self._num_outstanding[replica] -= 1
        # Sums of floats do not come back to 0 by themselves.
        is_idle = self._num_outstanding[replica] == 0
        self._replicas.add(replica, -self._replicas.loads[replica] if is_idle else -request.decode_work)


class PrefixAffinity(_ByLoad):
    """The replica that was last sent the request's longest known prefix, unless it is overloaded.

    Overloaded is one with more than `max_imbalance` times the requests of the least loaded replica, and
    `min_excess` above it; then, and where less than `min_share` of the prompt's blocks are known, the least
    outstanding replica gets the request (SGLang's cache-aware router works by the same rules; Zheng et al.,
    "SGLang", NeurIPS 2024).

    Parameters
    ----------
    max_known_blocks : blocks remembered, over all replicas; the least recently seen are forgotten first.
    """

    def __init__(
        self,
        num_replicas: int,
        *,
        max_imbalance: float = 1.5,
        min_excess: int = 32,
        min_share: float = 0.5,
        max_known_blocks: int = 1_000_000,
    ) -> None:
        super().__init__(num_replicas)
        self._max_imbalance = max_imbalance
        self._min_excess = min_excess
        self._min_share = min_share
        self._max_known_blocks = max_known_blocks
        self._replica_of_block: OrderedDict[BlockHash, int] = OrderedDict()

    def route(self, request: RoutingRequest) -> int:
        least = self._replicas.peek()
        matched = self._match(request.block_hashes)
        replica = least if matched is None or self._is_overloaded(matched, least) else matched
        self._remember(request.block_hashes, replica)
        self._replicas.choose(replica, 1)
        return replica

    def _match(self, block_hashes: Sequence[BlockHash]) -> int | None:
        """Return the member that holds enough of the prompt's first blocks."""
        known = self._replica_of_block
        replica = known.get(block_hashes[0]) if block_hashes else None
        if replica is None or replica not in self._replicas.members:
            return None
        num_matched = 1
        while num_matched < len(block_hashes) and known.get(block_hashes[num_matched]) == replica:
            num_matched += 1
        return replica if num_matched >= self._min_share * len(block_hashes) else None

    def _is_overloaded(self, replica: int, least: int) -> bool:
        load, least_load = self._replicas.loads[replica], self._replicas.loads[least]
        return load > self._max_imbalance * least_load and load - least_load > self._min_excess

    def _remember(self, block_hashes: Sequence[BlockHash], replica: int) -> None:
        known = self._replica_of_block
        for block_hash in block_hashes:
            known[block_hash] = replica
            known.move_to_end(block_hash)
        while len(known) > self._max_known_blocks:
            known.popitem(last=False)


ROUTERS: dict[str, Callable[[int, int], Router]] = {
    "round-robin": lambda num_replicas, seed: RoundRobin(num_replicas),  # noqa: ARG005
    "random": lambda num_replicas, seed: RandomRouter(num_replicas, seed=seed),
    "least-outstanding": lambda num_replicas, seed: LeastOutstanding(num_replicas),  # noqa: ARG005
    "least-work": lambda num_replicas, seed: LeastWork(num_replicas),  # noqa: ARG005
    "prefix-affinity": lambda num_replicas, seed: PrefixAffinity(num_replicas),  # noqa: ARG005
}
"""name -> (number of replicas, seed) -> router"""


def require_router(name: str) -> None:
    """Raise ConfigError unless there is a router of this name."""
    if name not in ROUTERS:
        raise ConfigError(f"unknown router {name!r}; choose one of {', '.join(ROUTERS)}")


def make_router(name: str, num_replicas: int, *, seed: int = 0) -> Router:
    """Build a router by name.

    Raises
    ------
    ConfigError : there is no such router.
    """
    require_router(name)
    return ROUTERS[name](num_replicas, seed)
