"""What a fleet is told of a request that comes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from onbeat.core.fleet import PrefillCosts
from onbeat.core.hashing import hash_blocks, root_hash
from onbeat.core.request import Request
from onbeat.core.slo import ShedMode
from onbeat.scheduler.cluster.routing import RoutingRequest

UNIT_COSTS = PrefillCosts(token=1.0, pair=0.0, step=0.0, decode=1.0)
"""Where no replica predicts: a token is as much as another."""


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


def routing_request(
    request: Request, costs: PrefillCosts, *, block_hashes: Sequence[bytes] = ()
) -> RoutingRequest:
    """Return what a router may know of a request.

    Parameters
    ----------
    costs : of prompts and decodes, by which its work is estimated.
    block_hashes : of its prompt; none where the router does not look at prefixes.
    """
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    return RoutingRequest(
        request.request_id,
        block_hashes=block_hashes,
        prefill_work=costs.seconds(num_prompt, 0),
        decode_work=max_tokens * costs.decode,
        num_prompt_tokens=num_prompt,
        max_tokens=max_tokens,
        arrival=request.arrival,
        slo=request.slo,
        resumes=request.resumes,
        rather_refused=request.shed is ShedMode.REJECT,
        priority=request.priority,
    )
