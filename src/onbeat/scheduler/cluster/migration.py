"""Which running requests are to go on elsewhere, with their KV, and where.

Prompts are computed, and their streams go on, in two pools of replicas. A replica that is predicted to get
into trouble lets streams go, and no other does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Protocol

from onbeat.core.fleet import ReplicaLimits, ReplicaLoad
from onbeat.core.handover import MoveVerb
from onbeat.scheduler.cluster.events import Answered, MoveStep
from onbeat.scheduler.cluster.membership import Membership, Replica, ReplicaState, RoutedRequest, deadline
from onbeat.scheduler.cluster.moves import GROWTH_BLOCKS, RUNS, STANDS_STILL, Course, Move, MoveEnd, Moves

MOST_AT_ONCE = 2
"""Moves from one replica, and to one: copies share the memory's bandwidth with the steps."""
MOST_STOPPED = 8
"""Moves to one replica where requests stand still already, since only their prompts were computed."""
FEW_TOKENS = 8
"""A request that has as few left ends sooner than it is moved."""
RETRY_SECONDS = 0.25
"""After which a request is moved that could not be."""
_MOST_FAILURES = 3
"""Moves of a request that fail, not for want of capacity, before it is left where it is."""

LOOK_AHEAD = 1.0
"""Seconds for which streams are to have blocks: without, one is about to be preempted."""
_STILL_STEPS = 4
"""Steps for which a stream stands still while it moves."""
_GUESSED_STEPS = 16
"""That are looked ahead where nobody predicts how long they take."""


def trouble(load: ReplicaLoad, limits: ReplicaLimits, *, num_more: int = 0) -> str:
    """Return what is predicted to go wrong on a replica; nothing where all is well.

    `memory`: its streams will need more blocks within `LOOK_AHEAD` than are free, so that one is preempted.
    `queue`: the first of those that wait gets no blocks. `steps`: they take longer than the tightest TBT.

    Parameters
    ----------
    num_more : streams that are still to come.
    """
    if load.num_free_blocks < _growth(load, limits, num_more):
        return "memory"
    if load.num_wanted_blocks > 0:
        return "queue"
    step = load.decode_step(num_more)
    if step is not None and load.num_decodes + num_more > 1 and step > load.tightest_tbt:
        return "steps"
    return ""


def has_spare_capacity(load: ReplicaLoad, limits: ReplicaLimits, *, num_blocks: int, num_more: int) -> bool:
    """Return whether a replica can take one more stream and still be in no trouble.

    One that has nothing else to do can: a stream is nowhere better off than by itself.

    Parameters
    ----------
    num_blocks : of this one, and of those that are on their way.
    num_more : streams, likewise.
    """
    free = load.num_free_blocks - num_blocks
    if load.num_running == load.num_waiting == 0 and num_more == 1:
        return free >= 0
    is_calm = not trouble(load, limits, num_more=num_more) and load.num_waiting == 0
    return is_calm and free >= 2 * _growth(load, limits, num_more)


def is_worth_it(load: ReplicaLoad, num_tokens: int, *, num_steps: int = 0) -> bool:
    """Return whether a move costs less than what it mends: to wait, and to compute a stream's tokens again.

    Parameters
    ----------
    load : of the source.
    num_tokens : of the stream.
    num_steps : for which it would wait for blocks.
    """
    costs, step = load.costs, load.decode_step()
    if costs is None or step is None:
        return True
    return _STILL_STEPS * step < num_steps * step + costs.seconds(num_tokens, 0)


def _growth(load: ReplicaLoad, limits: ReplicaLimits, num_more: int) -> float:
    """Return the blocks that its streams and so many more will need beyond those that they have."""
    step = load.decode_step(num_more)
    num_steps = _GUESSED_STEPS if step is None else LOOK_AHEAD / max(step, 1e-4)
    return (load.num_decodes + num_more) * num_steps / limits.block_size * (1 + limits.windows.num_groups)


_CALM_SECONDS = 0.5
"""After a move that was to mend something, its replica is left alone for so long: reports must show it."""
_STAY_SECONDS = 5.0
"""For so long a request that was moved to mend something is not moved for that again."""


class MoveRule(Protocol):
    """Decides which streams move without a drain, and without prompts on replicas of their own."""

    def on_report(self, replica: Replica, now: float) -> None:
        """Look at how a replica stands, by its newest report, and begin what moves are wanted.

        It is ready, and its streams may move.
        """


class Mending:
    """Moves the request that came last away from a replica that is in trouble, if that is worth it.

    The first that waits there without blocks, new or preempted, has nothing to move: it begins elsewhere.
    """

    def __init__(self, migration: Migration) -> None:
        self._migration = migration

    def on_report(self, replica: Replica, now: float) -> None:
        """See `MoveRule.on_report`."""
        load, limits = replica.load, replica.limits
        assert load is not None
        if now < replica.no_mending_before or (load.blocked and self._resend(replica, load.blocked, now)):
            return
        if (why := trouble(load, limits)) and not self._migration.moves.num_from(replica.replica_id):
            self._mend(replica, why, now)

    def _resend(self, source: Replica, request_id: str, now: float) -> bool:
        """Let a request that waits begin where there is capacity for it; return whether there is any."""
        open_request = source.open.get(request_id)
        if (
            open_request is None
            or now < open_request.no_mending_before
            or not self._migration.may_resend(open_request, source)
        ):
            return False
        destination = self._destination(open_request, source)
        if destination is not None:
            source.no_mending_before = now + _CALM_SECONDS
            open_request.no_mending_before = now + _STAY_SECONDS
            self._migration.resend(open_request, source, destination, now)
        return destination is not None

    def _mend(self, source: Replica, why: str, now: float) -> None:
        """Begin to move the request that came last, which would be preempted first, if that is worth it."""
        load, migration = source.load, self._migration
        assert load is not None
        source.no_mending_before = now + _CALM_SECONDS
        for open_request in sorted(source.open.values(), key=_arrival, reverse=True):
            num_steps = 0 if why == "steps" else _steps_to_an_end(source, open_request)
            if not is_worth_it(load, open_request.num_tokens, num_steps=num_steps):
                continue
            if now < open_request.no_mending_before or not migration.may_move(open_request, now):
                continue
            destination = self._destination(open_request, source)
            if destination is not None:
                migration.begin(open_request, source, destination, why, now)
                open_request.no_mending_before = now + _STAY_SECONDS
            return

    def _destination(self, open_request: RoutedRequest, source: Replica) -> Replica | None:
        """Return the replica with the most capacity of those that take a request without trouble."""
        migration = self._migration
        spare = [each for each in migration.candidates(source) if self._can_spare(open_request, each)]
        return migration.freest(open_request, spare)

    def _can_spare(self, open_request: RoutedRequest, replica: Replica) -> bool:
        """Return whether a replica takes a request without being in trouble itself."""
        load, limits = replica.load, replica.limits
        if load is None or not self._migration.fits(open_request, replica):
            return False
        num_coming = self._migration.moves.num_coming(replica.replica_id)
        num_blocks = self._migration.moves.num_blocks_to(replica.replica_id) + num_blocks_of(
            open_request, replica
        )
        slo, step = open_request.request.slo, load.decode_step(num_coming + 1)
        is_slow = slo is not None and slo.tbt is not None and step is not None and step > slo.tbt
        has_room = partial(has_spare_capacity, load, limits, num_more=num_coming + 1)
        if is_slow or not has_room(num_blocks=num_blocks):
            return False
        # What its report may not show is summed over its requests: only where there is room without it.
        return has_room(num_blocks=num_blocks + limits.num_blocks_for(replica.num_queued_tokens))


def _steps_to_an_end(source: Replica, open_request: RoutedRequest) -> int:
    """Return the steps until another stream ends and gives back its blocks, as far as the fleet knows."""
    left = (
        each.request.max_tokens - each.num_output_tokens
        for each in source.open.values()
        if each is not open_request and each.has_started
    )
    return max(0, min(left, default=0))


def _arrival(open_request: RoutedRequest) -> float:
    return open_request.request.arrival


_FEW_TOKENS = 64
"""Of a prompt that stays where it will decode, where no replica predicts what it costs."""


class PoolPolicy:
    """Decides where prompts are computed, and where and when their streams go on.

    This is the rule `adaptive`: a prompt that disturbs nobody is computed where it will generate, and a
    stream that no replica has capacity for goes on where its prompt was computed. Other rules differ in part.

    Parameters
    ----------
    migration : moves streams.
    """

    def __init__(self, migration: Migration) -> None:
        self._migration = migration
        self._members = migration.members

    def prompt_replicas(
        self, open_request: RoutedRequest, prefill: Sequence[Replica], decode: Sequence[Replica]
    ) -> Sequence[Replica]:
        """Return the replicas whose streams hardly notice the prompt, else those that compute prompts."""
        held = self._members.router.num_held(open_request.request)
        num_tokens = open_request.num_tokens
        undisturbed = [
            each
            for each in decode
            if _fits_in_a_step(each.load, num_tokens, min(held.get(each.number, 0), num_tokens))
        ]
        return undisturbed or prefill

    def stream_replica(self, open_request: RoutedRequest, source: Replica) -> Replica | None:  # noqa: ARG002
        """Return where a request will generate whose prompt is sent to another pool; None: not known yet."""
        return None

    def on_sent(self, open_request: RoutedRequest, source: Replica, destination: Replica, now: float) -> None:
        """Hear that a request has been sent that is to generate at another replica, a known one."""

    def on_first_token(self, open_request: RoutedRequest, source: Replica, now: float) -> None:
        """Move a request that stands still, or let it go on where it is until there is capacity."""
        destination = self._migration.destination(open_request, source, most_coming=MOST_STOPPED)
        if destination is None:
            self._migration.put_back(open_request, source, now)
        else:
            self._migration.begin(open_request, source, destination, "prefill", now, course=STANDS_STILL)

    # --- for policies whose streams wait for capacity, and stand still meanwhile --------------------------

    def on_no_capacity(self, open_request: RoutedRequest, move: Move) -> None:
        """Hear that a destination has no capacity after all, where the course of the move waits for some."""

    def on_change(self) -> None:
        """Hear that a replica may have more capacity than before, or that none ever will."""

    def advance(self, now: float, *, is_time: bool) -> None:
        """Begin the moves that are due.

        Parameters
        ----------
        is_time : whether those that had no capacity are to be tried again.
        """


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


MOVE_RULES: dict[str, Callable[[Migration], MoveRule]] = {"mend": Mending}
"""What moves streams of replicas that do not drain, and compute no prompts for others."""
POOL_POLICIES: dict[str, Callable[[Migration], PoolPolicy]] = {"adaptive": PoolPolicy}
"""How prompts and streams share two pools of replicas."""


class Migration:
    """Moves requests from replicas that drain, that compute prompts for others, or that are in trouble.

    It tells its rules which requests may move, and which replicas have capacity for them.

    Parameters
    ----------
    members : with what they have, and the rules.
    on_moved : is called with a request and the replica that it has come to.
    resend : takes a request back from a replica and sends it to another one, which computes it from the
        start; is called with the request, both replicas, and the time.

    Attributes
    ----------
    members : as given.
    moves : those under way.
    waiting : requests that stand still until a replica has capacity, the first first; with their moves, where
        one has been begun.
    least_left : a stream that has as few tokens left, or fewer, is not moved.
    """

    def __init__(
        self,
        members: Membership,
        *,
        on_moved: Callable[[RoutedRequest, Replica], None],
        resend: Callable[[RoutedRequest, Replica, Replica, float], None],
    ) -> None:
        self.members = members
        self._on_moved = on_moved
        self.resend = resend
        self.moves = Moves(members.act, self._on_end, self._on_no_capacity)
        self.waiting: dict[str, tuple[RoutedRequest, Move | None]] = {}
        self.least_left = FEW_TOKENS
        self._rule = MOVE_RULES[members.rules.move_rule](self)
        self.pool_policy = POOL_POLICIES[members.rules.pool_rule](self)
        self._now = 0.0
        self._is_to_look = False
        """Whether somebody may be free to move that was not before."""
        self._look_at = inf
        """When to look again at what could not be moved."""

    @property
    def next_time(self) -> float:
        """When `advance` is wanted at the latest; infinite where never."""
        return min(self._look_at, self.moves.next_time)

    def look(self) -> None:
        """Let the next `advance` look at who should be elsewhere."""
        self._is_to_look = True
        self.pool_policy.on_change()

    def stream_replica(self, open_request: RoutedRequest, replica: Replica) -> Replica | None:
        """Return where a request is to generate that is sent to a replica; None: who has capacity then.

        Elsewhere than there, it is to stand still after its first token.
        """
        goes_on = (
            self.members.is_prefill(replica.replica_id)
            and replica.limits.moves_streams
            and self.has_many_left(open_request)
            and any(True for _ in self.candidates(replica))
        )
        return self.pool_policy.stream_replica(open_request, replica) if goes_on else replica

    def on_first_token(self, open_request: RoutedRequest, replica: Replica, now: float) -> None:
        """Hear that a request has had its first token from a replica."""
        if open_request.stops:
            open_request.stops = False
            self._move_on(open_request, replica, now)
        elif replica.state is ReplicaState.DRAINING or self.members.is_prefill(replica.replica_id):
            self._is_to_look = True

    def _move_on(self, open_request: RoutedRequest, source: Replica, now: float) -> None:
        """Let a request that stands still be moved, or go on where it is."""
        if self.moves.on_first_token(open_request.request.request_id, now):
            return
        if self.has_many_left(open_request):
            self.pool_policy.on_first_token(open_request, source, now)
        else:
            self.put_back(open_request, source, now)

    def on_report(self, replica: Replica, now: float) -> None:
        """Look at how a replica stands, which may be a reason to move streams."""
        self.pool_policy.on_change()
        if replica.limits.moves_streams:
            self._rule.on_report(replica, now)

    def on_answer(self, event: Answered, now: float) -> None:
        """Hear what came of a step of a move."""
        self._now = now
        self.moves.on_answer(event, now)

    def on_end(self, request_id: str) -> None:
        """Hear that a request has left its replica otherwise: by its end, or because it was taken back."""
        self.waiting.pop(request_id, None)
        self.moves.drop(request_id)

    def on_leave(self, replica: Replica) -> None:
        """Hear that a replica takes nothing new."""
        self.pool_policy.on_change()
        self.moves.on_leave(replica.replica_id)

    def advance(self, now: float) -> None:
        """Begin the moves that are due; at the end of each event."""
        self._now = now
        if self.moves.next_time <= now:
            self.moves.on_tick(now)
        self.pool_policy.advance(now, is_time=self._look_at <= now)
        if not self._is_to_look and now < self._look_at:
            return
        self._is_to_look, self._look_at = False, inf
        states = (ReplicaState.DRAINING, ReplicaState.READY)
        for source in self.members.having(*states[: 2 if self.members.rules.num_prefill else 1]):
            if source.open and source.limits.moves_streams:
                self._relieve(source, now)

    def _relieve(self, source: Replica, now: float) -> None:
        """Begin to move what should not be on a replica, those that are due first."""
        if source.state is ReplicaState.DRAINING:
            why = "drain"
        elif self.members.is_prefill(source.replica_id):
            why = "prefill"
        else:
            return
        for open_request in sorted(source.open.values(), key=deadline):
            if self.moves.num_from(source.replica_id) >= MOST_AT_ONCE:
                return
            if not self.is_free_to_move(open_request):
                continue
            if now < open_request.no_move_before:
                self._look_at = min(self._look_at, open_request.no_move_before)
                continue
            destination = self.destination(open_request, source)
            if destination is None:
                open_request.no_move_before = now + RETRY_SECONDS
                self._look_at = min(self._look_at, open_request.no_move_before)
                continue
            self.begin(open_request, source, destination, why, now)

    def _on_no_capacity(self, move: Move) -> None:
        """Let a move wait for capacity."""
        self.pool_policy.on_no_capacity(self.members.open[move.request_id], move)
        self._look_at = min(self._look_at, self._now + RETRY_SECONDS)

    def _on_end(self, move: Move, outcome: MoveEnd) -> None:
        self.look()
        open_request = self.members.open.get(move.request_id)
        if open_request is None:
            return
        if outcome is MoveEnd.MOVED:
            self._on_moved(open_request, self.members.replicas[move.destination])
            return
        open_request.num_failed_moves += outcome is MoveEnd.FAILED
        open_request.no_move_before = self._now + RETRY_SECONDS
        self._look_at = min(self._look_at, open_request.no_move_before)

    # --- what rules ask before they move a stream ------------------------------------------------------

    def may_move(self, open_request: RoutedRequest, now: float) -> bool:
        """Return whether a stream is free to move, and no move of it has just failed."""
        return now >= open_request.no_move_before and self.is_free_to_move(open_request)

    def may_resend(self, open_request: RoutedRequest, source: Replica) -> bool:
        """Return whether a request that holds no KV may begin elsewhere: prompts of pools stay in theirs."""
        request_id = open_request.request.request_id
        is_elsewhere = request_id in self.waiting or self.moves.is_under_way(request_id)
        return open_request.may_begin_again and not (
            is_elsewhere or self.members.is_prefill(source.replica_id)
        )

    def begin(
        self,
        open_request: RoutedRequest,
        source: Replica,
        destination: Replica,
        why: str,
        now: float,
        *,
        course: Course = RUNS,
    ) -> None:
        """Begin to move a stream."""
        self.moves.begin(
            open_request.request.request_id,
            source.replica_id,
            destination.replica_id,
            num_blocks=num_blocks_of(open_request, destination),
            why=why,
            now=now,
            course=course,
        )

    def put_back(self, open_request: RoutedRequest, source: Replica, now: float) -> None:
        """Let a request go on at its source that stands still there and does not move."""
        self.members.act(MoveStep(source.replica_id, "", open_request.request.request_id, MoveVerb.REATTACH))
        open_request.no_move_before = now + RETRY_SECONDS
        self._is_to_look = True

    def is_free_to_move(self, open_request: RoutedRequest) -> bool:
        """Return whether a stream runs that may be moved, and has so much left that this is worth it."""
        request = open_request.request
        may_succeed = open_request.num_failed_moves < _MOST_FAILURES
        return (
            open_request.has_started
            and self.has_many_left(open_request)
            and may_succeed
            and request.request_id not in self.waiting
            and not self.moves.is_under_way(request.request_id)
        )

    def has_many_left(self, open_request: RoutedRequest) -> bool:
        """Return whether a request does not end sooner than it is moved."""
        return open_request.request.max_tokens - open_request.num_output_tokens > self.least_left

    def destination(
        self, open_request: RoutedRequest, source: Replica, *, most_coming: float = MOST_AT_ONCE
    ) -> Replica | None:
        """Return the candidate with the most capacity for each of its requests, this one included."""
        candidates = self.candidates(source)
        fitting = [each for each in candidates if self.fits(open_request, each, most_coming=most_coming)]
        return self.freest(open_request, fitting)

    def freest(self, open_request: RoutedRequest, replicas: Iterable[Replica]) -> Replica | None:
        """Return the one of some replicas that has the most left for each request, this one included."""
        return max(replicas, key=lambda each: (self.freeness(open_request, each), -each.order), default=None)

    def candidates(self, source: Replica) -> Iterable[Replica]:
        """Return the replicas that may take a request: those that decode, else any, where one drains."""
        others = [
            each
            for each in self.members.having(ReplicaState.READY)
            if each is not source and each.limits.moves_streams
        ]
        decoding = [each for each in others if not self.members.is_prefill(each.replica_id)]
        return decoding if decoding or source.state is not ReplicaState.DRAINING else others

    def fits(
        self, open_request: RoutedRequest, replica: Replica, *, most_coming: float = MOST_AT_ONCE
    ) -> bool:
        """Return whether a replica has a slot and blocks for a stream, and fewer are on their way to it."""
        limits = replica.limits
        return (
            could_take(open_request, replica)
            and self.moves.num_to(replica.replica_id) < most_coming
            and self._num_running(replica) < limits.max_num_seqs
            and self._num_free(replica) >= num_blocks_of(open_request, replica) + GROWTH_BLOCKS
        )

    def freeness(self, open_request: RoutedRequest, replica: Replica) -> float:
        """Return the free blocks for each request, once this one is there (Llumnix, section 4.4.2)."""
        num_left = self._num_free(replica) - num_blocks_of(open_request, replica)
        return num_left / (1 + self._num_running(replica))

    def _num_running(self, replica: Replica) -> int:
        """Return the requests that run there or are on their way."""
        num_reported = 0 if replica.load is None else replica.load.num_running
        return num_reported + self.moves.num_coming(replica.replica_id)

    def _num_free(self, replica: Replica) -> int:
        """Return the blocks that nobody has there, is going to have, or waits for."""
        limits, load = replica.limits, replica.load
        num_coming = self.moves.num_blocks_to(replica.replica_id)
        if load is None:
            return limits.num_blocks - num_coming
        return load.num_free_blocks - load.num_wanted_blocks - num_coming


def could_take(open_request: RoutedRequest, replica: Replica) -> bool:
    """Return whether a replica with nothing to do would take a request."""
    limits, request = replica.limits, open_request.request
    is_short = request.num_prompt_tokens + request.max_tokens <= limits.max_model_len
    return is_short and limits.num_blocks >= num_blocks_of(open_request, replica) + GROWTH_BLOCKS


def num_blocks_of(open_request: RoutedRequest, replica: Replica) -> int:
    """Return the blocks of a replica that a request has, as far as the fleet knows."""
    return replica.limits.num_blocks_for(open_request.num_tokens)
