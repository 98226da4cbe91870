"""The seam between who moves requests and how their KV is copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from onbeat.core.errors import KVUnavailable
from onbeat.engine.kv_access import BlockMemory
from onbeat.engine.kv_transfer.leases import Leases
from onbeat.engine.kv_transfer.source import KVEndpoint, KVSource

PULL_SECONDS = 10.0
"""A copy that takes longer is given up: the tokens have been computed by then."""


class KVTransport(Protocol):
    """One way to copy blocks from one engine into another."""

    @property
    def name(self) -> str: ...

    def serve(self, memory: BlockMemory, leases: Leases, endpoint: KVEndpoint) -> KVEndpoint:
        """Let others copy leased blocks; return the endpoint with the way to them added.

        Raises
        ------
        KVUnavailable : this way does not work here; the message says why.
        """
        ...

    def obstacle(self, endpoint: KVEndpoint) -> str | None:
        """Return why blocks cannot be copied from there in this way; None where they can."""
        ...

    def pull(self, source: KVSource, first_block: int, memory: BlockMemory, into: Sequence[int]) -> int:
        """Copy blocks, and return how many bytes that were. Takes `PULL_SECONDS` at most.

        When it returns, or raises, it writes no more.

        Parameters
        ----------
        first_block : counted from the first of `source`.
        memory, into : where to, and the block for each that is copied.

        Raises
        ------
        KVUnavailable : the source is gone, or the lease has ended. What the blocks hold then is not KV.
            Whether bytes have changed on the way is found by `KVTransfers`.
        """
        ...

    def close(self) -> None:
        """Serve no more."""
        ...


def blocks_to_copy(source: KVSource, first_block: int, memory: BlockMemory, into: Sequence[int]) -> list[int]:
    """Return the source's blocks that go into some of ours.

    Raises
    ------
    KVUnavailable : the layouts differ, or the source or this engine has no such blocks.
    """
    memory.layout.check_same(source.endpoint.layout)
    memory.check_ids(into)
    end = first_block + len(into)
    if not 0 <= first_block <= end <= len(source.block_ids):
        raise KVUnavailable(
            f"blocks {first_block} to {end} of {source.lease_id!r} were asked for, but "
            f"{len(source.block_ids)} of them are lent"
        )
    return list(source.block_ids[first_block:end])
