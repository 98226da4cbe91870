"""Chained hash of the token blocks of a request: the identity of a prefix, the same on every replica."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Protocol

BlockHash = bytes | int
"""Equal hashes mean equal tokens in this block and in every block before it. 16 bytes if made here."""

_SALT = b"salt"
"""Sets the hashes of salts apart from those of blocks: a salt can spell what a block is hashed from."""


class Numbered(Protocol):
    """What has a number of its own: a `core.request.Adapter`."""

    @property
    def number(self) -> int: ...


def root_hash(cache_salt: str | None = None, adapter: Numbered | None = None) -> bytes:
    """Return the parent of a request's first block; requests that differ in it never share blocks.

    Parameters
    ----------
    cache_salt : what its caller keeps it apart by.
    adapter : its LoRA adapter; None is the model without one.
    """
    key = b"" if adapter is None else adapter.number.to_bytes(8, "little")
    return hashlib.blake2b((cache_salt or "").encode(), digest_size=16, person=_SALT, key=key).digest()


def hash_blocks(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the hashes of the full blocks of consecutive tokens; those behind the last are left out.

    Parameters
    ----------
    parent : hash of the block before, or `root_hash()` for the first.
    token_ids : of all blocks, each in [0, 2**32).
    """
    hashes = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = array("I", token_ids[start : start + block_size]).tobytes()
        parent = hashlib.blake2b(parent + block, digest_size=16).digest()
        hashes.append(parent)
    return hashes
