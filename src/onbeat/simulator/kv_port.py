"""The KV of a virtual replica, as the agent of its moves sees it: nothing but time and room."""

from __future__ import annotations

from concurrent.futures import Future
from math import inf
from typing import NamedTuple, Protocol

from onbeat.core.handover import Detached
from onbeat.core.request import Request
from onbeat.scheduler.replica.move_agent import Departure
from onbeat.simulator.replica import VirtualReplica


class VirtualSource(NamedTuple):
    """Blocks that a virtual replica lends."""

    replica: int
    block_ids: tuple[int, ...]


class VirtualFleet(Protocol):
    """What lies between virtual replicas."""

    def copy(self, move: str, source: VirtualSource, first_block: int, destination: int, /) -> Future[int]:
        """Begin a copy; the future has its bytes."""
        ...

    def adopt(self, move: str, destination: int, detached: Detached, /) -> None:
        """Let a replica go on with the request of a move; raises RequestRejected as `Handovers.adopt`."""
        ...

    def release(self, move: str, destination: int, /) -> None:
        """Give back what a replica keeps for a move, once no copy writes there."""
        ...


class VirtualKV:
    """Lends the KV of a virtual replica, and takes that of others, with the verbs of its scheduler.

    Parameters
    ----------
    number : the replica's.
    block_size : tokens of a KV block.
    """

    def __init__(self, number: int, replica: VirtualReplica, block_size: int, fleet: VirtualFleet) -> None:
        self._number = number
        self._replica = replica
        self._handover = replica.scheduler.handover
        self._block_size = block_size
        self._fleet = fleet

    def num_full_tokens(self, request_id: str) -> int:
        """Return the tokens of the blocks that `hold` would lend."""
        return self._handover.num_full_blocks(request_id) * self._block_size

    def hold(self, request_id: str) -> VirtualSource | None:
        """Lend the full blocks of a request, for as long as it takes."""
        held = self._handover.hold(request_id, inf)
        return None if held is None else VirtualSource(self._number, held.block_ids)

    def summed(self, source: VirtualSource) -> Future[VirtualSource]:
        """Return what is lent, at once."""
        future: Future[VirtualSource] = Future()
        future.set_result(source)
        return future

    def unhold(self, request_id: str) -> None:
        """Lend it no longer."""
        self._handover.release_hold(request_id)

    def detach(self, request_id: str) -> None:
        """Take a request out of the batch at the end of the steps under way."""
        self._handover.detach(request_id)

    def take_departures(self) -> list[Departure[VirtualSource]]:
        """Return what became of those who were to leave since the last call."""
        return [
            Departure(
                each.request_id,
                each.detached,
                None if each.detached is None else VirtualSource(self._number, each.detached.block_ids),
            )
            for each in self._handover.take_detached()
        ]

    def reattach(self, request_id: str) -> bool:
        """Let a request go on that has left."""
        return self._handover.reattach(request_id)

    def free(self, request_id: str) -> None:
        """Forget a request that has left, and lend its KV no longer."""
        self._replica.let_go(request_id)
        self._handover.release_hold(request_id)

    def reserve(self, move: str, num_tokens: int) -> bool:
        """Keep a slot and blocks, for as long as it takes."""
        return self._handover.reserve(move, num_tokens, inf) is not None

    def pull(self, move: str, source: VirtualSource, first_block: int) -> Future[int]:
        """Begin a copy."""
        return self._fleet.copy(move, source, first_block, self._number)

    def adopt(self, move: str, request: Request, detached: Detached) -> None:  # noqa: ARG002
        """Go on with a request whose KV has come."""
        self._fleet.adopt(move, self._number, detached)

    def release(self, move: str) -> None:
        """Keep room no longer, once no copy writes there."""
        self._fleet.release(move, self._number)
