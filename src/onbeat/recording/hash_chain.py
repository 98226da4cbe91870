"""The identity of a request's prefix blocks, kept beside the scheduler's own."""

from __future__ import annotations

from collections.abc import Sequence

from onbeat.core.hashing import hash_blocks, root_hash
from onbeat.typed import Hash

LOGGED_BYTES = 8
"""Of each 16-byte hash: among a thousand million blocks two would be mixed up with odds of 1 in 37."""


class HashChain:
    """Hashes the full blocks of a growing token sequence, and keeps none of them.

    Parameters
    ----------
    block_size : tokens a block holds.
    cache_salt : as in `Request`.
    """

    __slots__ = ("_block_size", "_open_ids", "_parent")

    def __init__(self, block_size: int, cache_salt: str | None) -> None:
        self._block_size = block_size
        self._parent = root_hash(cache_salt)
        self._open_ids: list[int] = []
        """Tokens of the last block, which is not full."""

    def extend(self, token_ids: Sequence[int]) -> list[Hash]:
        """Append tokens; return the hashes of the blocks that this filled, shortened."""
        pending, size = self._open_ids, self._block_size
        pending += token_ids
        if len(pending) < size:
            return []
        hashes = hash_blocks(self._parent, pending, size)
        self._parent = hashes[-1]
        del pending[: len(hashes) * size]
        return [Hash(each[:LOGGED_BYTES]) for each in hashes]
