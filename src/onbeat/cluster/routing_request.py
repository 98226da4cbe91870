"""What a fleet is told of a request that comes."""

from __future__ import annotations

from onbeat.core.fleet import PrefillCosts
from onbeat.core.hashing import hash_blocks, root_hash
from onbeat.core.request import Request
from onbeat.core.slo import ShedMode
from onbeat.scheduler.cluster.routing import RoutingRequest

UNIT_COSTS = PrefillCosts(token=1.0, pair=0.0, step=0.0, decode=1.0)
"""Where no replica predicts: a token is as much as another."""


def routing_request(request: Request, costs: PrefillCosts, *, block_size: int | None) -> RoutingRequest:
    """Return what a router may know of a request.

    Parameters
    ----------
    costs : of prompts and decodes, by which its work is estimated.
    block_size : tokens of the blocks whose hashes it gets; None leaves prefixes out.
    """
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    return RoutingRequest(
        request.request_id,
        block_hashes=()
        if block_size is None
        else hash_blocks(root_hash(request.cache_salt), request.prompt_token_ids, block_size),
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
