"""Which running requests are to go on elsewhere, with their KV, and where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from onbeat.core.errors import ConfigError
from onbeat.scheduler.cluster.events import Answered, FleetAction
from onbeat.scheduler.cluster.membership import Membership, Replica, ReplicaState, RoutedRequest, deadline
from onbeat.scheduler.cluster.mending import Mending
from onbeat.scheduler.cluster.move_stages import Move
from onbeat.scheduler.cluster.mover import MOST_AT_ONCE, RETRY_SECONDS, Mover, MoveRule, Resend
from onbeat.scheduler.cluster.moves import Moves, Outcome
from onbeat.scheduler.cluster.pool_policies import PoolPolicy
from onbeat.scheduler.cluster.pools import Pools

OnMoved = Callable[[RoutedRequest, Replica], None]

MOVE_RULES: dict[str, Callable[[Mover], MoveRule]] = {"mend": Mending}
"""What moves streams of replicas that do not drain, and compute no prompts for others."""
POOL_POLICIES: dict[str, Callable[[Mover, Membership, Pools], PoolPolicy]] = {"adaptive": PoolPolicy}
"""How prompts and streams share two pools of replicas."""


def check_move_rule(rule: str, *, moves: bool, cure: str) -> None:
    """Check a rule by which streams move.

    Parameters
    ----------
    moves : whether streams move at all.
    cure : what to give so that they do.

    Raises
    ------
    ConfigError : there is no such rule, or nothing that it could move.
    """
    if rule not in MOVE_RULES:
        raise ConfigError(f"move-rule is {rule!r}; it must be one of {', '.join(MOVE_RULES)}")
    if rule != "mend" and not moves:
        raise ConfigError(f"--move-rule {rule} is for streams that move; {cure}, or leave it out")


class Migration:
    """Moves requests from replicas that drain, that compute prompts for others, or that are in trouble.

    Parameters
    ----------
    members : with what they have.
    open_requests : the open requests, by id.
    pools : says which replicas compute prompts.
    rule : one of `MOVE_RULES`.
    act : takes what is to be done.
    on_moved : is called with a request and the replica that it has come to.
    on_resend : is called with a request that is to begin elsewhere, its replica, the other one, and the time.
    """

    def __init__(  # noqa: PLR0913 -- who is asked, and who is told
        self,
        members: Membership,
        open_requests: Mapping[str, RoutedRequest],
        pools: Pools,
        *,
        rule: str,
        act: Callable[[FleetAction], None],
        on_moved: OnMoved,
        on_resend: Resend,
    ) -> None:
        self._members = members
        self._open = open_requests
        self._pools = pools
        self._on_moved = on_moved
        self._moves = Moves(act, self._on_end, self._on_no_capacity)
        self._mover = Mover(members, pools, self._moves, act=act, resend=on_resend)
        self._rule = MOVE_RULES[rule](self._mover)
        self.pool_policy = POOL_POLICIES[pools.rule](self._mover, members, pools)
        self._now = 0.0
        self._look_at = inf
        """When to look again at what could not be moved."""

    @property
    def next_time(self) -> float:
        """When `advance` is wanted at the latest; infinite where never."""
        return min(self._look_at, self._moves.next_time)

    def look(self) -> None:
        """Let the next `advance` look at who should be elsewhere."""
        self._mover.is_to_look = True
        self.pool_policy.on_change()

    def stream_replica(self, open_request: RoutedRequest, replica: Replica) -> Replica | None:
        """Return where a request is to generate that is sent to a replica; None: who has capacity then.

        Elsewhere than there, it is to stand still after its first token.
        """
        goes_on = (
            self._pools.is_prefill(replica.replica_id)
            and replica.moves_streams
            and self._mover.has_many_left(open_request)
            and any(True for _ in self._mover.candidates(replica))
        )
        return self.pool_policy.stream_replica(open_request, replica) if goes_on else replica

    def on_first_token(self, open_request: RoutedRequest, replica: Replica, now: float) -> None:
        """Hear that a request has had its first token from a replica."""
        if open_request.stops:
            open_request.stops = False
            self._move_on(open_request, replica, now)
        elif replica.state is ReplicaState.DRAINING or self._pools.is_prefill(replica.replica_id):
            self._mover.is_to_look = True

    def _move_on(self, open_request: RoutedRequest, source: Replica, now: float) -> None:
        """Let a request that stands still be moved, or go on where it is."""
        if self._moves.on_first_token(open_request.request.request_id, now):
            return
        if self._mover.has_many_left(open_request):
            self.pool_policy.on_first_token(open_request, source, now)
        else:
            self._mover.put_back(open_request, source, now)

    def on_report(self, replica: Replica, now: float) -> None:
        """Look at how a replica stands, which may be a reason to move streams."""
        self.pool_policy.on_change()
        if replica.moves_streams:
            self._rule.on_report(replica, now)

    def on_answer(self, event: Answered, now: float) -> None:
        """Hear what came of a step of a move."""
        self._now = now
        self._moves.on_answer(event, now)

    def on_end(self, request_id: str) -> None:
        """Hear that a request has left its replica otherwise: by its end, or because it was taken back."""
        self._mover.waiting.pop(request_id, None)
        self._moves.drop(request_id)

    def on_leave(self, replica: Replica) -> None:
        """Hear that a replica takes nothing new."""
        self.pool_policy.on_change()
        self._moves.on_leave(replica.replica_id)

    def on_lost(self, replica: Replica) -> None:
        """Hear that a replica is gone, before its requests are sent elsewhere."""
        self._moves.on_lost(replica.replica_id)

    def advance(self, now: float) -> None:
        """Begin the moves that are due; at the end of each event."""
        self._now = now
        if self._moves.next_time <= now:
            self._moves.on_tick(now)
        self.pool_policy.advance(now, is_time=self._look_at <= now)
        if not self._mover.is_to_look and now < self._look_at:
            return
        self._mover.is_to_look, self._look_at = False, inf
        for source in self._members.having(*self._pools.states_to_relieve):
            if source.open and source.moves_streams:
                self._relieve(source, now)

    def _relieve(self, source: Replica, now: float) -> None:
        """Begin to move what should not be on a replica, those that are due first."""
        if source.state is ReplicaState.DRAINING:
            why = "drain"
        elif self._pools.is_prefill(source.replica_id):
            why = "prefill"
        else:
            return
        for open_request in sorted(source.open.values(), key=deadline):
            if self._moves.num_from(source.replica_id) >= MOST_AT_ONCE:
                return
            if not self._mover.is_free_to_move(open_request):
                continue
            if now < open_request.no_move_before:
                self._look_at = min(self._look_at, open_request.no_move_before)
                continue
            destination = self._mover.destination(open_request, source)
            if destination is None:
                open_request.no_move_before = now + RETRY_SECONDS
                self._look_at = min(self._look_at, open_request.no_move_before)
                continue
            self._mover.begin(open_request, source, destination, why, now)

    def _on_no_capacity(self, move: Move) -> None:
        """Let a move wait for capacity."""
        self.pool_policy.on_no_capacity(self._open[move.request_id], move)
        self._look_at = min(self._look_at, self._now + RETRY_SECONDS)

    def _on_end(self, move: Move, outcome: Outcome) -> None:
        self.look()
        open_request = self._open.get(move.request_id)
        if open_request is None:
            return
        if outcome is Outcome.MOVED:
            self._on_moved(open_request, self._members.replicas[move.destination])
            return
        open_request.num_failed_moves += outcome is Outcome.FAILED
        open_request.no_move_before = self._now + RETRY_SECONDS
        self._look_at = min(self._look_at, open_request.no_move_before)
