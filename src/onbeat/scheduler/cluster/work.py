"""What a fleet is told of a request that comes, live and simulated."""

from __future__ import annotations

from collections.abc import Sequence

from onbeat.core.fleet import PrefillCosts
from onbeat.core.hashing import BlockHash
from onbeat.core.request import Request
from onbeat.core.slo import ShedMode
from onbeat.scheduler.cluster.routing import RoutingRequest

UNIT_COSTS = PrefillCosts(token=1.0, pair=0.0, step=0.0, decode=1.0)
"""Where no replica predicts: a token is as much as another."""


def describe(
    request: Request, costs: PrefillCosts | None = None, *, block_hashes: Sequence[BlockHash] = ()
) -> RoutingRequest:
    """Return what a router may know of a request.

    Parameters
    ----------
    costs : of prompts and decodes, by which its work is estimated. Its output is not known beforehand: it
        counts with its limit. None: the router does not look at work.
    block_hashes : of its prompt; none where the router does not look at prefixes.
    """
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    return RoutingRequest(
        request.request_id,
        block_hashes,
        0.0 if costs is None else costs.seconds(num_prompt, 0),
        0.0 if costs is None else max_tokens * costs.decode,
        num_prompt,
        max_tokens,
        arrival=request.arrival,
        slo=request.slo,
        resumes=request.resumes,
        rather_refused=request.shed is ShedMode.REJECT,
        priority=request.priority,
    )
