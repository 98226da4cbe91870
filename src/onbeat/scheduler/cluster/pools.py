"""Prompts on some replicas, tokens on others: which replica a request is sent to first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import Literal, get_args

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import PoolSizes, ReplicaId, ReplicaLoad, replica_number
from onbeat.scheduler.cluster.membership import Membership, OpenRequest, Replica, ReplicaState
from onbeat.scheduler.cluster.routing import Router

PoolRule = Literal["adaptive", "distserve", "splitwise"]
POOL_RULES: tuple[PoolRule, ...] = get_args(PoolRule)
"""`adaptive`: a prompt that disturbs nobody is computed where it will generate, and a stream that nobody has
room for goes on where its prompt was computed. `distserve` (Zhong et al., OSDI 2024, section 4.3): every
prompt is computed on a prefill replica, where its KV waits until a decode replica has room, so that bursts
hold up prompts and not streams. `splitwise` (Patel et al., ISCA 2024, section 4): a prompt joins the shortest
queue, and where its stream will go on is chosen at once, so that its KV is copied while it is computed; what
one pool has no room for goes to replicas of the other, which are mixed until that has ended."""

RULE_HELP = (
    "adaptive: short and cached prompts are computed where they generate, and a stream that nobody has room "
    "for goes on where it is; distserve: the first N compute every prompt, and its stream waits there for "
    "room; splitwise: where it goes on is chosen at arrival, its KV is copied while its prompt is computed, "
    "and what one side has no room for goes to the other"
)
"""Of the flag --pool-rule."""

_FEW_TOKENS = 64
"""Of a prompt that stays where it will decode, where no replica predicts what it costs."""
MOST_QUEUED_TOKENS = 8192
"""Of `splitwise`, in a queue of prompts that has not only this one. The paper speaks of a threshold; this is
that of its authors' simulator (Mutinifni/splitwise-sim)."""


def check_pools(pools: PoolSizes | None, rule: PoolRule, *, replicas: int) -> None:
    """Check the settings of pools together.

    Raises
    ------
    ConfigError : another number of replicas is asked for, too, or there is a rule without pools.
    """
    if pools is None:
        if rule != "adaptive":
            raise ConfigError(f"--pool-rule {rule} is for --disaggregate; give both, or neither")
    elif replicas not in (1, pools.num_replicas):
        raise ConfigError(
            f"--disaggregate {pools} is {pools.num_replicas} replicas, but --replicas is {replicas}; leave "
            "--replicas out"
        )


class Pools:
    """Tells replicas that compute prompts from those that generate.

    Roles are where requests are sent, and not what a replica can: where one pool is gone, the other does all.

    Parameters
    ----------
    num_prefill : replicas `r0`, `r1`, ... of this number compute prompts for the others; 0 leaves all alike.
    rule : one of `POOL_RULES`.
    """

    def __init__(self, members: Membership, router: Router, num_prefill: int, rule: PoolRule) -> None:
        self._members = members
        self._router = router
        self._num_prefill = num_prefill
        self._rule = rule

    @property
    def waits_for_room(self) -> bool:
        """Whether a stream that nobody has room for stands still until somebody has."""
        return self._rule == "distserve"

    @property
    def chooses_both(self) -> bool:
        """Whether the replica where a request generates is chosen with that of its prompt."""
        return self._num_prefill > 0 and self._rule == "splitwise"

    @property
    def states_to_relieve(self) -> tuple[ReplicaState, ...]:
        """Of replicas that may have requests which should be elsewhere, however they stand."""
        draining = (ReplicaState.DRAINING,)
        return (ReplicaState.READY, *draining) if self._num_prefill else draining

    def is_prefill(self, replica: ReplicaId) -> bool:
        """Whether a replica computes prompts for others."""
        return self._num_prefill > 0 and replica_number(replica) < self._num_prefill

    def role(self, replica: ReplicaId) -> str:
        """Return `prefill` or `decode`; nothing where all replicas are alike."""
        if not self._num_prefill:
            return ""
        return "prefill" if self.is_prefill(replica) else "decode"

    def narrow(
        self, opened: OpenRequest, excluded: Collection[int], *, is_mixed: Callable[[Replica], bool]
    ) -> Collection[int]:
        """Return the numbers of ready replicas that a request is better not sent to.

        Parameters
        ----------
        excluded : those that it must not go to.
        is_mixed : says whether a replica has work of the other pool.
        """
        if not self._num_prefill:
            return excluded
        ready = [each for each in self._members.having(ReplicaState.READY) if each.number not in excluded]
        prefill = [each for each in ready if self.is_prefill(each.replica_id)]
        decode = [each for each in ready if not self.is_prefill(each.replica_id)]
        if not (prefill and decode):
            return excluded
        chosen: Sequence[Replica] = prefill
        if self._rule == "splitwise":
            mixed = [each for each in ready if is_mixed(each)]
            chosen = [_shortest_queue(opened.num_tokens, prefill, decode, mixed)]
        elif self._rule == "adaptive":
            chosen = self._where_it_stays(opened, decode) or prefill
        kept = {each.number for each in chosen}
        return {*excluded, *(each.number for each in ready if each.number not in kept)}

    def _where_it_stays(self, opened: OpenRequest, decode: Sequence[Replica]) -> list[Replica]:
        """Return the replicas whose streams hardly notice the prompt: its KV need not be moved there."""
        held = self._router.num_held(opened.request)
        num_tokens = opened.num_tokens
        return [
            each
            for each in decode
            if _fits_in_a_step(each.load, num_tokens, min(held.get(each.number, 0), num_tokens))
        ]


def _shortest_queue(
    num_tokens: int, prefill: Sequence[Replica], decode: Sequence[Replica], mixed: Sequence[Replica]
) -> Replica:
    """Return where a prompt waits least: in its pool, then on a mixed replica, then on any other."""
    orders = {each.order for each in mixed}
    for pool in ([each for each in prefill if each.order not in orders], mixed):
        shortest = min(pool, key=_queue, default=None)
        if shortest is not None and _takes_one_more(shortest, num_tokens):
            return shortest
    others = [each for each in decode if each.order not in orders]
    return min(others or (*prefill, *decode), key=_queue)


def _queue(replica: Replica) -> tuple[int, int]:
    return replica.num_queued_tokens, replica.order


def _takes_one_more(replica: Replica, num_tokens: int) -> bool:
    num_queued = replica.num_queued_tokens
    return not num_queued or num_queued + num_tokens <= MOST_QUEUED_TOKENS


def _fits_in_a_step(load: ReplicaLoad | None, num_tokens: int, num_cached_tokens: int) -> bool:
    """Return whether a step of a replica can compute a prompt, beside what it has to do.

    It then keeps the tightest TBT of the streams there; where none has any, it is at most twice as long.
    """
    num_new = num_tokens - num_cached_tokens
    step = None if load is None else load.decode_step()
    if load is None or load.costs is None or step is None:
        return num_new <= _FEW_TOKENS
    longest = load.tightest_tbt if load.tightest_tbt < inf else 2 * step
    return step + load.costs.seconds(num_new, num_cached_tokens) <= longest
