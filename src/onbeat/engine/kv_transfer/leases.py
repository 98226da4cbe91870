"""Which blocks others may copy, and until when."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from onbeat.core.errors import KVUnavailable
from onbeat.engine.kv_transfer.source import KVEndpoint, KVSource

MOST_LEASES = 4096
"""At once; an engine has fewer requests."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks that may be copied."""

    serial: int
    block_ids: tuple[int, ...]
    checksums: dict[int, int] = field(default_factory=dict)
    """Block -> CRC-32, as far as known; what is lent is not written to."""


class Leases:
    """The leases of one engine: its step loop grants and revokes them, other threads look.

    A lease ends when it is revoked, which must come before its blocks are given to anybody else. Nobody is
    waited for: who copies looks once more after the last byte, and throws away what it has if the lease has
    ended meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}
        self._num_granted = 0

    def grant(self, lease_id: str, block_ids: Sequence[int]) -> Lease:
        """Let blocks be copied, or further ones under a lease that lasts.

        Raises
        ------
        KVUnavailable : there are as many leases as there can be.
        """
        with self._lock:
            known = self._leases.get(lease_id)
            if known is None:
                if len(self._leases) >= MOST_LEASES:
                    raise KVUnavailable(f"{MOST_LEASES} requests have their KV lent already, as many as may")
                self._num_granted += 1
                known = Lease(self._num_granted, ())
            lease = Lease(known.serial, tuple(block_ids), known.checksums)
            self._leases[lease_id] = lease
            return lease

    def revoke(self, lease_id: str) -> None:
        """End a lease; one that has ended is ignored."""
        with self._lock:
            self._leases.pop(lease_id, None)

    def checksums(self, lease_id: str, serial: int) -> dict[int, int]:
        """Return what is known of a lease's blocks, to be added to; of one that has ended nothing."""
        with self._lock:
            lease = self._leases.get(lease_id)
        return {} if lease is None or lease.serial != serial else lease.checksums

    def block_ids(self, lease_id: str, serial: int) -> tuple[int, ...]:
        """Return the blocks of a lease.

        Raises
        ------
        KVUnavailable : it has ended.
        """
        with self._lock:
            lease = self._leases.get(lease_id)
        if lease is None or lease.serial != serial:
            raise KVUnavailable(f"the lease of the KV of {lease_id!r} has ended")
        return lease.block_ids

    def source(self, lease_id: str, endpoint: KVEndpoint) -> KVSource:
        """Return what another engine needs to copy the blocks of a lease that lasts."""
        with self._lock:
            lease = self._leases[lease_id]
        return KVSource(
            endpoint=endpoint,
            lease_id=lease_id,
            serial=lease.serial,
            block_ids=lease.block_ids,
        )
