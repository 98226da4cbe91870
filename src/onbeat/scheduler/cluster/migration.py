"""Which running requests are to go on elsewhere, with their KV, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import ReplicaId
from onbeat.core.handover import MoveVerb
from onbeat.scheduler.cluster.comparators.distserve import DistServe
from onbeat.scheduler.cluster.comparators.pairing import Pairing
from onbeat.scheduler.cluster.comparators.splitwise import Splitwise
from onbeat.scheduler.cluster.events import Answered, FleetAction, MoveStep
from onbeat.scheduler.cluster.membership import (
    Membership,
    OpenRequest,
    Replica,
    ReplicaState,
    deadline,
)
from onbeat.scheduler.cluster.mending import Mending
from onbeat.scheduler.cluster.move_rules import MOST_AT_ONCE, Mover, MoveRule, num_blocks_of
from onbeat.scheduler.cluster.move_stages import GROWTH_BLOCKS, RUNS, Course, Move
from onbeat.scheduler.cluster.moves import Moves, Outcome
from onbeat.scheduler.cluster.pools import Adaptive, PoolPolicy, PoolRule, Pools

_RETRY_SECONDS = 0.25
"""After which a request is moved that could not be."""
_MOST_FAILURES = 3
"""Moves of a request that fail, not for want of room, before it is left where it is."""

OnMoved = Callable[[OpenRequest, Replica], None]
OnResend = Callable[[OpenRequest, Replica, Replica, float], None]

MOVE_RULES: dict[str, Callable[[Mover], MoveRule]] = {"mend": Mending, "llumnix": Pairing}
"""What moves streams of replicas that do not drain, and compute no prompts for others."""
POOL_POLICIES: dict[PoolRule, Callable[[Mover, Membership, Pools], PoolPolicy]] = {
    "adaptive": Adaptive,
    "distserve": DistServe,
    "splitwise": Splitwise,
}
MOVE_HELP = (
    "which streams move to other replicas, beside those of drains; mend: the last to come, where something "
    "is predicted to go wrong that this mends; llumnix: the shortest, from replicas with the least free KV "
    "memory to those with the most"
)
"""Of the flag --move-rule."""


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
    opened : the open requests, by id.
    pools : says which replicas compute prompts.
    rule : one of `MOVE_RULES`.
    act : takes what is to be done.
    on_moved : is called with a request and the replica that it has come to.
    on_resend : is called with a request that is to begin elsewhere, its replica, the other one, and the time.
    """

    def __init__(  # noqa: PLR0913 -- who is asked, and who is told
        self,
        members: Membership,
        opened: Mapping[str, OpenRequest],
        pools: Pools,
        *,
        rule: str,
        act: Callable[[FleetAction], None],
        on_moved: OnMoved,
        on_resend: OnResend,
    ) -> None:
        self._members = members
        self._open = opened
        self._pools = pools
        self._act = act
        self._on_moved = on_moved
        self.resend = on_resend
        self._moves = Moves(act, self._on_end, self._on_no_room)
        self._rule = MOVE_RULES[rule](self)
        self.pool_policy = POOL_POLICIES[pools.rule](self, members, pools)
        self._now = 0.0
        self._look_at = inf
        """When to look again at what could not be moved."""
        self._is_to_look = False

    @property
    def next_time(self) -> float:
        """When `advance` is wanted at the latest; infinite where never."""
        return min(self._look_at, self._moves.next_time)

    def look(self) -> None:
        """Let the next `advance` look at who should be elsewhere."""
        self._is_to_look = True
        self.pool_policy.on_change()

    def stream_replica(self, opened: OpenRequest, replica: Replica) -> Replica | None:
        """Return where a request is to generate that is sent to a replica; None: who has room then.

        Elsewhere than there, it is to stand still after its first token.
        """
        goes_on = (
            self._pools.is_prefill(replica.replica_id)
            and replica.moves_streams
            and self._has_many_left(opened)
            and any(True for _ in self.candidates(replica))
        )
        return self.pool_policy.stream_replica(opened, replica) if goes_on else replica

    def on_first_token(self, opened: OpenRequest, replica: Replica, now: float) -> None:
        """Hear that a request has had its first token from a replica."""
        if opened.stops:
            opened.stops = False
            self._move_on(opened, replica, now)
        elif replica.state is ReplicaState.DRAINING or self._pools.is_prefill(replica.replica_id):
            self._is_to_look = True

    def _move_on(self, opened: OpenRequest, source: Replica, now: float) -> None:
        """Let a request that stands still be moved, or go on where it is."""
        if self._moves.on_first_token(opened.request.request_id, now):
            return
        if self._has_many_left(opened):
            self.pool_policy.on_first_token(opened, source, now)
        else:
            self.put_back(opened, source, now)

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
        self.pool_policy.on_end(request_id)
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
        if not self._is_to_look and now < self._look_at:
            return
        self._is_to_look, self._look_at = False, inf
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
        for opened in sorted(source.open.values(), key=deadline):
            if self._moves.num_from(source.replica_id) >= MOST_AT_ONCE:
                return
            if not self._is_free_to_move(opened):
                continue
            if now < opened.no_move_before:
                self._look_at = min(self._look_at, opened.no_move_before)
                continue
            destination = self.destination(opened, source)
            if destination is None:
                opened.no_move_before = now + _RETRY_SECONDS
                self._look_at = min(self._look_at, opened.no_move_before)
                continue
            self.begin(opened, source, destination, why, now)

    # --- what rules and policies may ask, see `Mover` -------------------------------------------------

    def movable(self) -> list[Replica]:
        """Return the replicas whose streams may move; those of prompts let go of theirs in any case."""
        return [
            each
            for each in self._members.having(ReplicaState.READY, ReplicaState.DRAINING)
            if each.moves_streams and not self._pools.is_prefill(each.replica_id)
        ]

    def may_move(self, opened: OpenRequest, now: float) -> bool:
        """Return whether a stream can be moved now, and has so much left that this is sooner than its end."""
        return now >= opened.no_move_before and self._is_free_to_move(opened)

    def may_resend(self, opened: OpenRequest, source: Replica) -> bool:
        """Return whether a request that holds no KV may begin elsewhere: prompts of pools stay in theirs."""
        request_id = opened.request.request_id
        is_elsewhere = self.pool_policy.is_waiting(request_id) or self._moves.is_under_way(request_id)
        return not (is_elsewhere or self._pools.is_prefill(source.replica_id))

    def num_from(self, replica: ReplicaId) -> int:
        """Return how many streams are on their way from a replica."""
        return self._moves.num_from(replica)

    def num_coming(self, replica: ReplicaId) -> int:
        """Return how many are on their way to one."""
        return self._moves.num_coming(replica)

    def num_blocks_to(self, replica: ReplicaId) -> int:
        """Return the blocks that these will have there."""
        return self._moves.num_blocks_to(replica)

    def begin(
        self,
        opened: OpenRequest,
        source: Replica,
        destination: Replica,
        why: str,
        now: float,
        *,
        course: Course = RUNS,
    ) -> None:
        """Begin to move a stream."""
        self._moves.begin(
            opened.request.request_id,
            source.replica_id,
            destination.replica_id,
            num_blocks=num_blocks_of(opened, destination),
            why=why,
            now=now,
            course=course,
        )

    def try_again(self, move: Move, opened: OpenRequest, destination: Replica | None, now: float) -> None:
        """Go on with a move that is nowhere; None lets its request go on at its source."""
        if destination is None:
            self._moves.stay(move)
        else:
            num_blocks = num_blocks_of(opened, destination)
            self._moves.try_again(move, destination.replica_id, num_blocks=num_blocks, now=now)

    def put_back(self, opened: OpenRequest, source: Replica, now: float) -> None:
        """Let a request go on at its source that stands still there and does not move."""
        self._act(MoveStep(source.replica_id, "", opened.request.request_id, MoveVerb.REATTACH))
        opened.no_move_before = now + _RETRY_SECONDS
        self._is_to_look = True

    def _is_free_to_move(self, opened: OpenRequest) -> bool:
        request = opened.request
        may_succeed = opened.num_failed_moves < _MOST_FAILURES
        return (
            opened.has_started
            and self._has_many_left(opened)
            and may_succeed
            and not self.pool_policy.is_waiting(request.request_id)
            and not self._moves.is_under_way(request.request_id)
        )

    def _has_many_left(self, opened: OpenRequest) -> bool:
        return opened.request.max_tokens - opened.num_output_tokens > self.pool_policy.least_left

    def destination(
        self, opened: OpenRequest, source: Replica, *, most_coming: float = MOST_AT_ONCE
    ) -> Replica | None:
        """Return the candidate with the most room for each of its requests, this one included."""
        fitting = [
            each for each in self.candidates(source) if self.has_room(opened, each, most_coming=most_coming)
        ]
        return max(fitting, key=lambda each: (self.freeness(opened, each), -each.order), default=None)

    def may_ever_move(self, opened: OpenRequest, source: Replica) -> bool:
        """Return whether a candidate would take a stream if it had nothing else to do."""
        return any(_could_take(opened, each) for each in self.candidates(source))

    def candidates(self, source: Replica) -> Iterable[Replica]:
        """Return the replicas that may take a request: those that decode, else any, where one drains."""
        others = [
            each
            for each in self._members.having(ReplicaState.READY)
            if each is not source and each.moves_streams
        ]
        decoding = [each for each in others if not self._pools.is_prefill(each.replica_id)]
        return decoding if decoding or source.state is not ReplicaState.DRAINING else others

    def has_room(self, opened: OpenRequest, replica: Replica, *, most_coming: float = MOST_AT_ONCE) -> bool:
        """Return whether a replica has a slot and blocks for a stream."""
        limits = replica.limits
        assert limits is not None, "it is ready"
        return (
            _could_take(opened, replica)
            and self._moves.num_to(replica.replica_id) < most_coming
            and self._num_running(replica) < limits.max_num_seqs
            and self._num_free(replica) >= num_blocks_of(opened, replica) + GROWTH_BLOCKS
        )

    def freeness(self, opened: OpenRequest, replica: Replica) -> float:
        """Return the free blocks for each request, once this one is there (Llumnix, section 4.4.2)."""
        num_left = self._num_free(replica) - num_blocks_of(opened, replica)
        return num_left / (1 + self._num_running(replica))

    def _num_running(self, replica: Replica) -> int:
        """Return the requests that run there or are on their way."""
        num_reported = 0 if replica.load is None else replica.load.num_running
        return num_reported + self._moves.num_coming(replica.replica_id)

    def _num_free(self, replica: Replica) -> int:
        """Return the blocks that nobody has there, is going to have, or waits for."""
        limits, load = replica.limits, replica.load
        assert limits is not None
        num_coming = self._moves.num_blocks_to(replica.replica_id)
        if load is None:
            return limits.num_blocks - num_coming
        return load.num_free_blocks - load.num_wanted_blocks - num_coming

    def _on_no_room(self, move: Move) -> None:
        """Let a move wait for room."""
        self.pool_policy.on_no_room(self._open[move.request_id], move)
        self._look_at = min(self._look_at, self._now + _RETRY_SECONDS)

    def _on_end(self, move: Move, outcome: Outcome) -> None:
        self.look()
        opened = self._open.get(move.request_id)
        if opened is None:
            return
        if outcome is Outcome.MOVED:
            self._on_moved(opened, self._members.replicas[move.destination])
            return
        opened.num_failed_moves += outcome is Outcome.FAILED
        opened.no_move_before = self._now + _RETRY_SECONDS
        self._look_at = min(self._look_at, opened.no_move_before)


def _could_take(opened: OpenRequest, replica: Replica) -> bool:
    """Return whether a replica with nothing to do would take a request."""
    limits, request = replica.limits, opened.request
    assert limits is not None, "it is ready"
    is_short = request.num_prompt_tokens + request.max_tokens <= limits.max_model_len
    return is_short and limits.num_blocks >= num_blocks_of(opened, replica) + GROWTH_BLOCKS
