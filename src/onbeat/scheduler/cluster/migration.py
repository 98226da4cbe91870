"""Which running requests are to go on elsewhere, with their KV, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import ReplicaId
from onbeat.core.handover import MoveVerb
from onbeat.scheduler.cluster.events import Answered, FleetAction, MoveStep
from onbeat.scheduler.cluster.membership import (
    Membership,
    OpenRequest,
    Replica,
    ReplicaState,
    deadline,
)
from onbeat.scheduler.cluster.mending import Mending
from onbeat.scheduler.cluster.move_rules import Mover, MoveRule, num_blocks_of
from onbeat.scheduler.cluster.moves import GROWTH_BLOCKS, Move, Moves, Outcome
from onbeat.scheduler.cluster.pairing import Pairing
from onbeat.scheduler.cluster.pools import Pools

MOST_AT_ONCE = 2
"""Moves from one replica, and to one: copies share the memory's bandwidth with the steps."""
MOST_STOPPED = 8
"""Moves to one replica where requests stand still already, since only their prompts were computed."""
FEW_TOKENS = 8
"""A request that has as few left ends sooner than it is moved."""
_RETRY_SECONDS = 0.25
"""After which a request is moved that could not be."""
_MOST_FAILURES = 3
"""Moves of a request that fail, not for want of room, before it is left where it is."""

OnMoved = Callable[[OpenRequest, Replica], None]
OnResend = Callable[[OpenRequest, Replica, Replica, float], None]

MOVE_RULES: dict[str, Callable[[Mover], MoveRule]] = {"mend": Mending, "llumnix": Pairing}
"""What moves streams of replicas that do not drain, and compute no prompts for others."""
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
        self._standing: dict[str, Move | None] = {}
        """Requests that stand still until somebody has room, in the order in which they came to; their moves,
        where one has been begun."""
        self._now = 0.0
        self._look_at = inf
        """When to look again at what could not be moved."""
        self._is_to_look = False
        self._may_have_room = False
        """Whether somebody may have room since that was asked for those who stand still."""

    @property
    def next_time(self) -> float:
        """When `advance` is wanted at the latest; infinite where never."""
        return min(self._look_at, self._moves.next_time)

    def look(self) -> None:
        """Let the next `advance` look at who should be elsewhere."""
        self._is_to_look = self._may_have_room = True

    def is_mixed(self, replica: Replica) -> bool:
        """Return whether a replica has work of the other pool: prompts in its queue, or streams that stay.

        Its reports would not do: they count streams that are about to leave.
        """
        if not self._pools.is_prefill(replica.replica_id):
            return replica.num_queued_tokens > 0
        return replica.num_streams > self._moves.num_from(replica.replica_id)

    def stream_replica(self, opened: OpenRequest, replica: Replica) -> Replica | None:
        """Return where a request is to generate that is sent to a replica; None: who has room then.

        Elsewhere than there, it is to stand still after its first token.
        """
        goes_on = (
            self._pools.is_prefill(replica.replica_id)
            and _moves_streams(replica)
            and self._has_many_left(opened)
            and any(True for _ in self.candidates(replica))
        )
        if not goes_on:
            return replica
        return self._with_room_ahead(opened, replica) if self._pools.chooses_both else None

    def begin_ahead(self, opened: OpenRequest, source: Replica, destination: Replica, now: float) -> None:
        """Let a request that has been sent to a replica go on at another, while its prompt is computed."""
        self._moves.begin(
            opened.request.request_id,
            source.replica_id,
            destination.replica_id,
            num_blocks=num_blocks_of(opened, destination),
            why="prefill",
            now=now,
            is_early=True,
        )

    def _with_room_ahead(self, opened: OpenRequest, source: Replica) -> Replica | None:
        """Return where a stream will have the most room: its pool, a mixed replica, or one for prompts."""
        pools: tuple[list[Replica], ...] = [], [], []
        for each in self._members.having(ReplicaState.READY):
            if _moves_streams(each):
                is_prefill = self._pools.is_prefill(each.replica_id)
                pools[1 if self.is_mixed(each) else 2 * is_prefill].append(each)
        for pool in pools:
            fitting = [each for each in pool if self.has_room(opened, each, most_coming=inf)]
            if fitting:
                # Of equal ones it stays where its prompt is: nothing is copied then.
                return max(
                    fitting, key=lambda each: (self.freeness(opened, each), each is source, -each.order)
                )
        return None

    def on_first_token(self, opened: OpenRequest, replica: Replica, now: float) -> None:
        """Hear that a request has had its first token from a replica."""
        if opened.stops:
            opened.stops = False
            self._move_on(opened, replica, now)
        elif replica.state is ReplicaState.DRAINING or self._pools.is_prefill(replica.replica_id):
            self._is_to_look = True

    def _move_on(self, opened: OpenRequest, source: Replica, now: float) -> None:
        """Begin to move a request that stands still, or let it go on where it is until there is room."""
        if self._moves.on_stop(opened.request.request_id, now):
            return
        if self._has_many_left(opened):
            if self._pools.waits_for_room:
                self._standing[opened.request.request_id] = None
                self._may_have_room = True
                return
            destination = self._destination(opened, source, most_coming=MOST_STOPPED)
            if destination is not None:
                self.begin(opened, source, destination, "prefill", now, is_stopped=True)
                return
        self._put_back(opened, source, now)

    def _put_back(self, opened: OpenRequest, source: Replica, now: float) -> None:
        """Let a request go on that stands still."""
        self._act(MoveStep(source.replica_id, "", opened.request.request_id, MoveVerb.REATTACH))
        opened.no_move_before = now + _RETRY_SECONDS
        self._is_to_look = True

    def on_report(self, replica: Replica, now: float) -> None:
        """Look at how a replica stands, which may be a reason to move streams."""
        self._may_have_room = True
        if _moves_streams(replica):
            self._rule.on_report(replica, now)

    def on_answer(self, event: Answered, now: float) -> None:
        """Hear what came of a step of a move."""
        self._now = now
        self._moves.on_answer(event, now)

    def on_end(self, request_id: str) -> None:
        """Hear that a request has left its replica otherwise: by its end, or because it was taken back."""
        self._standing.pop(request_id, None)
        self._moves.drop(request_id)

    def on_leave(self, replica: Replica) -> None:
        """Hear that a replica takes nothing new."""
        self._may_have_room = True  # or nobody ever will
        self._moves.on_leave(replica.replica_id)

    def on_lost(self, replica: Replica) -> None:
        """Hear that a replica is gone, before its requests are sent elsewhere."""
        self._moves.on_lost(replica.replica_id)

    def advance(self, now: float) -> None:
        """Begin the moves that are due; at the end of each event."""
        self._now = now
        if self._moves.next_time <= now:
            self._moves.on_tick(now)
        if self._standing and (self._may_have_room or self._look_at <= now):
            self._may_have_room = False
            self._let_go_on(now)
        if not self._is_to_look and now < self._look_at:
            return
        self._is_to_look, self._look_at = False, inf
        for source in self._members.having(*self._pools.states_to_relieve):
            if source.open and _moves_streams(source):
                self._relieve(source, now)

    def _let_go_on(self, now: float) -> None:
        """Move those that stand still, the first first, until there is no room for one."""
        for request_id, move in list(self._standing.items()):
            opened = self._open[request_id]
            assert opened.replica is not None
            source = self._members.replicas[opened.replica]
            destination = self._destination(opened, source, most_coming=MOST_STOPPED)
            if destination is None and any(_could_take(opened, each) for each in self.candidates(source)):
                return
            del self._standing[request_id]
            if destination is None and move is None:
                self._put_back(opened, source, now)
            elif destination is None:
                assert move is not None
                self._moves.stay(move)
            elif move is None:
                self.begin(opened, source, destination, "prefill", now, is_stopped=True)
            else:
                num_blocks = num_blocks_of(opened, destination)
                self._moves.try_again(move, destination.replica_id, num_blocks=num_blocks, now=now)

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
            destination = self._destination(opened, source)
            if destination is None:
                opened.no_move_before = now + _RETRY_SECONDS
                self._look_at = min(self._look_at, opened.no_move_before)
                continue
            self.begin(opened, source, destination, why, now)

    # --- what rules may ask, see `Mover` --------------------------------------------------------------

    def movable(self) -> list[Replica]:
        """Return the replicas whose streams may move; those of prompts let go of theirs in any case."""
        return [
            each
            for each in self._members.having(ReplicaState.READY, ReplicaState.DRAINING)
            if _moves_streams(each) and not self._pools.is_prefill(each.replica_id)
        ]

    def may_move(self, opened: OpenRequest, now: float) -> bool:
        """Return whether a stream can be moved now, and has so much left that this is sooner than its end."""
        return now >= opened.no_move_before and self._is_free_to_move(opened)

    def may_resend(self, opened: OpenRequest, source: Replica) -> bool:
        """Return whether a request that holds no KV may begin elsewhere: prompts of pools stay in theirs."""
        request_id = opened.request.request_id
        is_elsewhere = request_id in self._standing or self._moves.is_under_way(request_id)
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
        is_stopped: bool = False,
    ) -> None:
        """Begin to move a stream."""
        self._moves.begin(
            opened.request.request_id,
            source.replica_id,
            destination.replica_id,
            num_blocks=num_blocks_of(opened, destination),
            why=why,
            now=now,
            is_stopped=is_stopped,
            is_patient=is_stopped and self._pools.waits_for_room,
        )

    def _is_free_to_move(self, opened: OpenRequest) -> bool:
        request = opened.request
        may_succeed = opened.num_failed_moves < _MOST_FAILURES
        return (
            opened.has_started
            and self._has_many_left(opened)
            and may_succeed
            and request.request_id not in self._standing
            and not self._moves.is_under_way(request.request_id)
        )

    def _has_many_left(self, opened: OpenRequest) -> bool:
        least = 0 if self._pools.waits_for_room else FEW_TOKENS
        return opened.request.max_tokens - opened.num_output_tokens > least

    def _destination(
        self, opened: OpenRequest, source: Replica, *, most_coming: int = MOST_AT_ONCE
    ) -> Replica | None:
        """Return the replica with the most room for each of its requests, this one included."""
        fitting = [
            each for each in self.candidates(source) if self.has_room(opened, each, most_coming=most_coming)
        ]
        return max(fitting, key=lambda each: (self.freeness(opened, each), -each.order), default=None)

    def candidates(self, source: Replica) -> Iterable[Replica]:
        """Return the replicas that may take a request: those that decode, else any, where one drains."""
        others = [
            each
            for each in self._members.having(ReplicaState.READY)
            if each is not source and _moves_streams(each)
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
        """Let a request stand still before all others that do: it was the first of them."""
        self._standing = {move.request_id: move, **self._standing}
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


def _moves_streams(replica: Replica) -> bool:
    return replica.limits is not None and replica.limits.moves_streams


def _could_take(opened: OpenRequest, replica: Replica) -> bool:
    """Return whether a replica with nothing to do would take a request."""
    limits, request = replica.limits, opened.request
    assert limits is not None, "it is ready"
    is_short = request.num_prompt_tokens + request.max_tokens <= limits.max_model_len
    return is_short and limits.num_blocks >= num_blocks_of(opened, replica) + GROWTH_BLOCKS
