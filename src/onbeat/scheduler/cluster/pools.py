"""Prompts on some replicas, tokens on others: which replica a request is sent to first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import PoolSizes, ReplicaId, replica_number
from onbeat.scheduler.cluster.membership import Membership, Replica, ReplicaState
from onbeat.scheduler.cluster.routing import Router


def check_pools(pools: PoolSizes | None, rule: str, *, replicas: int) -> None:
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
    rule : one of `POOL_POLICIES`, in `migration`.
    """

    def __init__(self, members: Membership, router: Router, num_prefill: int, rule: str) -> None:
        self._members = members
        self._num_prefill = num_prefill
        self.router = router
        self.rule = rule

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
        self,
        excluded: Collection[int],
        choose: Callable[[Sequence[Replica], Sequence[Replica]], Sequence[Replica]],
    ) -> Collection[int]:
        """Return the numbers of ready replicas that a request is better not sent to.

        Parameters
        ----------
        excluded : those that it must not go to.
        choose : returns those that it is sent to, of the two pools; is asked if both have some.
        """
        if not self._num_prefill:
            return excluded
        ready = [each for each in self._members.having(ReplicaState.READY) if each.number not in excluded]
        prefill = [each for each in ready if self.is_prefill(each.replica_id)]
        decode = [each for each in ready if not self.is_prefill(each.replica_id)]
        if not (prefill and decode):
            return excluded
        kept = {each.number for each in choose(prefill, decode)}
        return {*excluded, *(each.number for each in ready if each.number not in kept)}
