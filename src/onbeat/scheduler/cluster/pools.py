"""Prompts on some replicas, tokens on others: which replica a request is sent to first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf
from typing import Literal, get_args

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import PoolSizes, ReplicaId, ReplicaLoad, replica_number
from onbeat.scheduler.cluster.membership import Membership, OpenRequest, Replica, ReplicaState
from onbeat.scheduler.cluster.move_rules import FEW_TOKENS, MOST_STOPPED, Mover
from onbeat.scheduler.cluster.move_stages import STANDS_STILL, Move
from onbeat.scheduler.cluster.routing import Router

PoolRule = Literal["adaptive", "distserve", "splitwise"]
POOL_RULES: tuple[PoolRule, ...] = get_args(PoolRule)
"""`adaptive` is onbeat's own, see `Adaptive`; `distserve` and `splitwise` are those of `comparators`."""

RULE_HELP = (
    "adaptive: short and cached prompts are computed where they generate, and a stream that nobody has room "
    "for goes on where it is; distserve: the first N compute every prompt, and its stream waits there for "
    "room; splitwise: where it goes on is chosen at arrival, its KV is copied while its prompt is computed, "
    "and what one side has no room for goes to the other"
)
"""Of the flag --pool-rule."""

_FEW_TOKENS = 64
"""Of a prompt that stays where it will decode, where no replica predicts what it costs."""


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

    def narrow(self, opened: OpenRequest, excluded: Collection[int], policy: PoolPolicy) -> Collection[int]:
        """Return the numbers of ready replicas that a request is better not sent to.

        Parameters
        ----------
        excluded : those that it must not go to.
        policy : that of the rule.
        """
        if not self._num_prefill:
            return excluded
        ready = [each for each in self._members.having(ReplicaState.READY) if each.number not in excluded]
        prefill = [each for each in ready if self.is_prefill(each.replica_id)]
        decode = [each for each in ready if not self.is_prefill(each.replica_id)]
        if not (prefill and decode):
            return excluded
        kept = {each.number for each in policy.prompt_replicas(opened, prefill, decode)}
        return {*excluded, *(each.number for each in ready if each.number not in kept)}


class PoolPolicy:
    """Decides where prompts are computed, and where and when their streams go on.

    By itself it computes any prompt anywhere, and moves a stream once it has its first token.

    Parameters
    ----------
    mover : moves streams.
    """

    least_left = FEW_TOKENS
    """A stream that has as few tokens left, or fewer, is not moved."""

    def __init__(self, mover: Mover, members: Membership, pools: Pools) -> None:
        self._mover = mover
        self._members = members
        self._pools = pools

    def prompt_replicas(
        self,
        opened: OpenRequest,  # noqa: ARG002
        prefill: Sequence[Replica],
        decode: Sequence[Replica],
    ) -> Sequence[Replica]:
        """Return the replicas that a request may be sent to first; both pools have some."""
        return (*prefill, *decode)

    def stream_replica(self, opened: OpenRequest, source: Replica) -> Replica | None:  # noqa: ARG002
        """Return where a request will generate whose prompt is sent to another pool; None: not known yet."""
        return None

    def on_sent(self, opened: OpenRequest, source: Replica, destination: Replica, now: float) -> None:
        """Hear that a request has been sent that is to generate at another replica, a known one."""

    def on_first_token(self, opened: OpenRequest, source: Replica, now: float) -> None:
        """Move a request that stands still, or let it go on where it is until there is room."""
        destination = self._mover.destination(opened, source, most_coming=MOST_STOPPED)
        if destination is None:
            self._mover.put_back(opened, source, now)
        else:
            self._mover.begin(opened, source, destination, "prefill", now, course=STANDS_STILL)

    # --- for policies whose streams wait for room, and stand still meanwhile --------------------------

    def is_waiting(self, request_id: str) -> bool:  # noqa: ARG002
        """Whether a request stands still until a replica has room."""
        return False

    def on_no_room(self, opened: OpenRequest, move: Move) -> None:
        """Hear that a destination has no room after all, where the course of the move waits for some."""

    def on_end(self, request_id: str) -> None:
        """Hear that a request has left its replica."""

    def on_change(self) -> None:
        """Hear that a replica may have more room than before, or that none ever will."""

    def advance(self, now: float, *, is_time: bool) -> None:
        """Begin the moves that are due.

        Parameters
        ----------
        is_time : whether those that had no room are to be tried again.
        """


class Adaptive(PoolPolicy):
    """Computes a prompt that disturbs nobody where it will generate, and any other on a prefill replica.

    A stream that no replica has room for goes on where its prompt was computed.
    """

    def prompt_replicas(
        self, opened: OpenRequest, prefill: Sequence[Replica], decode: Sequence[Replica]
    ) -> Sequence[Replica]:
        """Return the replicas whose streams hardly notice the prompt, else those that compute prompts."""
        held = self._pools.router.num_held(opened.request)
        num_tokens = opened.num_tokens
        undisturbed = [
            each
            for each in decode
            if _fits_in_a_step(each.load, num_tokens, min(held.get(each.number, 0), num_tokens))
        ]
        return undisturbed or prefill


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
