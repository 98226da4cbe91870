"""One engine's part in copies of KV: what it serves, and what it fetches."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any

from onbeat.core.errors import KVUnavailable
from onbeat.engine.kv_access import BlockMemory
from onbeat.engine.kv_transfer.leases import Leases
from onbeat.engine.kv_transfer.source import KVSource
from onbeat.engine.kv_transfer.tcp import PULL_SECONDS, TcpTransport

MOST_PULLS = 2
"""At once: copies share the memory's bandwidth with the steps."""


class KVTransfers:
    """Serves an engine's blocks, and pulls others'.

    Parameters
    ----------
    memory : the engine's KV.

    Attributes
    ----------
    leases : what others may copy.
    endpoint : where they find it.
    """

    def __init__(self, memory: BlockMemory, transport: TcpTransport) -> None:
        self.memory = memory
        self.leases = Leases()
        self._transport = transport
        self._summing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="onbeat-lend")
        self._pool = ThreadPoolExecutor(max_workers=MOST_PULLS, thread_name_prefix="onbeat-pull")
        self.endpoint = transport.serve(memory, self.leases)

    def summed(self, source: KVSource) -> Future[KVSource]:
        """Return, from a thread of its own, blocks that are lent with their checksums.

        Each is read once a lease, so that further ones cost nothing for those before.
        """
        return self._summing.submit(self._sum, source)

    def _sum(self, source: KVSource) -> KVSource:
        known = self.leases.checksums(source.lease_id, source.serial)
        for block_id in source.block_ids:
            if block_id not in known:
                known[block_id] = self.memory.checksum(block_id)
        return replace(source, checksums=tuple(known[block_id] for block_id in source.block_ids))

    def pull(
        self, source: KVSource, first_block: int, into: Sequence[int], *, after: Future[Any] | None = None
    ) -> Future[int]:
        """Copy blocks in a thread of its own; the future has how many bytes that were, or `KVUnavailable`.

        Nothing is written to the blocks once the future is done; until then they must be nobody else's.

        Parameters
        ----------
        first_block : counted from the first of `source`.
        into : our block for each that is copied.
        after : what must be done before anything is written.
        """
        return self._pool.submit(partial(self._pull, source, first_block, tuple(into), after))

    def _pull(
        self, source: KVSource, first_block: int, into: Sequence[int], after: Future[Any] | None
    ) -> int:
        if after is not None and wait([after], timeout=PULL_SECONDS).not_done:
            raise KVUnavailable(f"a step that may write to the blocks has not ended in {PULL_SECONDS:g} s")
        if len(source.checksums) != len(source.block_ids):
            raise KVUnavailable(f"the checksums of the KV of {source.lease_id!r} were not sent with it")
        num_bytes = self._transport.pull(source, first_block, self.memory, into)
        for number, block_id in enumerate(into, first_block):
            if self.memory.checksum(block_id) != source.checksums[number]:
                raise KVUnavailable(
                    f"block {number} of the KV of {source.lease_id!r} has changed on the way; it is not "
                    "used. If that happens again, look at the machine's memory and network"
                )
        return num_bytes

    def close(self) -> None:
        """Let copies end, and serve no more; call it before the memory goes."""
        for pool in (self._summing, self._pool):
            pool.shutdown(wait=True, cancel_futures=True)
        self._transport.close()
