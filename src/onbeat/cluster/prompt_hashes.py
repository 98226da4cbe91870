"""The hashes of a prompt, by which a fleet knows where its beginning is cached."""

from __future__ import annotations

import asyncio

from onbeat.core.hashing import hash_blocks, root_hash
from onbeat.core.request import Request

_BLOCKS_AT_ONCE = 512
"""Blocks that are hashed before others of the event loop have their turn, such as other choices' blocks."""


async def prompt_hashes(request: Request, block_size: int) -> list[bytes]:
    """Return the hashes of a prompt's full blocks."""
    hashes: list[bytes] = []
    parent, token_ids = root_hash(request.cache_salt), request.prompt_token_ids
    step = _BLOCKS_AT_ONCE * block_size
    for start in range(0, len(token_ids), step):
        if start:
            await asyncio.sleep(0)
        hashes += hash_blocks(hashes[-1] if hashes else parent, token_ids[start : start + step], block_size)
    return hashes
