"""How many KV blocks a replica has left once all that is spoken for is taken off.

Sun et al., "Llumnix", OSDI 2024, section 4.4: each request has a *virtual usage*, which for most is the
memory that it has. The first in the queue counts with what its prompt wants, the others there with nothing,
so that a long prompt that fits nowhere makes room for itself. Requests of high priority count, together,
with the headroom that keeps their replica below a target load.
"""

from __future__ import annotations

from math import inf

from onbeat.core.fleet import ReplicaLimits, ReplicaLoad

HIGH_TARGET_TOKENS = 1600
"""KV tokens up to which a replica with requests of high priority is filled: the paper's, section 6.4, where
steps of LLaMA-7B are hardly longer than of one request."""


def is_high(priority: int) -> bool:
    """Return whether a request has high priority: an earlier turn than the usual, which is 0."""
    return priority < 0


def freeness(
    load: ReplicaLoad,
    limits: ReplicaLimits | None = None,
    *,
    num_high: int = 0,
    num_blocks: int = 0,
    num_more: int = 0,
    is_draining: bool = False,
) -> float:
    """Return the blocks that a replica has left for each running request; below 0 where more is spoken for.

    Parameters
    ----------
    limits : asked for the headroom alone; None where no request has high priority.
    num_high : its requests of high priority.
    num_blocks, num_more : blocks and requests that are to come and are not in `load` yet; below 0 where
        they are to leave.
    is_draining : what drains counts as infinitely full.
    """
    if is_draining:
        return -inf
    # What the first in the queue lacks comes on top of all free blocks, which it will have, too.
    num_left = -load.num_wanted_blocks if load.num_wanted_blocks else load.num_free_blocks
    num_left -= num_blocks
    if num_high and limits is not None:
        num_left -= max(0, limits.num_blocks - HIGH_TARGET_TOKENS // limits.block_size)
    return num_left / max(1, load.num_running + num_more)
