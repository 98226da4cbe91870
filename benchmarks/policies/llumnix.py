"""Llumnix (Sun et al., OSDI 2024): router, moves of streams and scaling by free KV memory.

Section 4.4: each request has a *virtual usage*, which for most is the memory that it has. The first in the
queue counts with what its prompt wants, the others there with nothing, so that a long prompt that fits
nowhere makes room for itself. Requests of high priority count, together, with the headroom that keeps their
replica below a target load. *Freeness* is what a replica has left for each of its requests.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from onbeat.core.fleet import ReplicaLimits, ReplicaLoad
from onbeat.scheduler.cluster.events import RoutingRequest
from onbeat.scheduler.cluster.membership import Replica, ReplicaState, RoutedRequest
from onbeat.scheduler.cluster.migration import Migration, num_blocks_of
from onbeat.scheduler.cluster.routing import NONE_EXCLUDED, Router, RoutingChoice
from onbeat.scheduler.cluster.scaling_policy import FleetLoad, ScalingPolicy, Wanted

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


_UNKNOWN = ReplicaLimits(max_model_len=0, max_num_seqs=256, num_blocks=1 << 16, block_size=16)


class _Member:
    """A replica, and what it was sent that its last report does not count."""

    def __init__(self, limits: ReplicaLimits) -> None:
        self.limits = limits
        self.load = ReplicaLoad(time=0.0, num_taken=0, num_free_blocks=limits.num_blocks)
        self.sent: dict[str, tuple[int, int]] = {}
        """Request -> the how many-th that it was sent, and its blocks."""
        self.num_sent = 0
        self.num_high = 0
        self.last_choice = -1

    def freeness_with(self, request: RoutingRequest) -> float:
        """Return how free it is with one request more, and with the headroom that this needs."""
        return freeness(
            self.load,
            self.limits,
            num_high=self.num_high + is_high(request.priority),
            num_blocks=sum(num_blocks for _, num_blocks in self.sent.values()),
            num_more=len(self.sent) + 1,
        )


class FreenessRouter(Router):
    """The freest replica, the request itself included in those that share what is free.

    One of high priority needs headroom wherever it goes, so that it goes to a replica that keeps some already
    rather than to one that is fuller.

    Nothing is predicted and no length is guessed: what counts is memory by reports, and the prompts that
    were sent since. A choice costs O(replicas).
    """

    reads_reports = reads_every_report = True

    def __init__(self) -> None:
        self._members: dict[int, _Member] = {}
        """Those that have left included: what they still have may go on there."""
        self._left: set[int] = set()
        self._num_choices = 0

    def route(
        self,
        request: RoutingRequest,
        now: float = 0.0,  # noqa: ARG002
        excluded: Collection[int] = NONE_EXCLUDED,
    ) -> RoutingChoice | None:
        """Return the freest; of equal ones the least recently chosen."""
        away = self._left.union(excluded)
        allowed = ((number, each) for number, each in self._members.items() if number not in away)
        best = max(
            allowed, key=lambda each: (each[1].freeness_with(request), -each[1].last_choice), default=None
        )
        if best is None:
            return None
        number, member = best
        member.last_choice = self._num_choices
        self._num_choices += 1
        member.num_sent += 1
        num_tokens = request.num_prompt_tokens + request.num_output_tokens
        member.sent[request.request_id] = (member.num_sent, member.limits.num_blocks_for(num_tokens))
        member.num_high += is_high(request.priority)
        return RoutingChoice(number, "load")

    def take(self, replica: int, request: RoutingRequest) -> None:
        """Its blocks are in the next report."""
        if (member := self._members.get(replica)) is not None:
            member.num_high += is_high(request.priority)

    def on_finish(self, replica: int, request: RoutingRequest) -> None:
        """Count it no more."""
        if (member := self._members.get(replica)) is not None:
            member.sent.pop(request.request_id, None)
            member.num_high -= is_high(request.priority)

    def on_report(self, replica: int, load: ReplicaLoad, now: float) -> None:  # noqa: ARG002
        """Take a report."""
        if (member := self._members.get(replica)) is not None:
            member.load = load
            member.num_sent = max(member.num_sent, load.num_taken)  # some nobody asked a router about
            member.sent = {name: each for name, each in member.sent.items() if each[0] > load.num_taken}

    def join(self, replica: int, limits: ReplicaLimits | None = None) -> None:
        """Let a replica be chosen: a new one, or one that has left."""
        self._left.discard(replica)
        if replica not in self._members:
            self._members[replica] = _Member(limits or _UNKNOWN)

    def leave(self, replica: int) -> None:
        """Choose a replica no more."""
        if replica in self._members:
            self._left.add(replica)


LOW, HIGH = 10.0, 60.0
"""The band of the paper's released code, in blocks for each running request."""
_BAND_SECONDS = 10.0
"""For which the mean has to be outside before anything is done: the interval of that code."""


class FreenessScaling(ScalingPolicy):
    """Adds a replica where the mean freeness is below a band for a while, and takes one away above it.

    A replica's freeness is that for requests of usual priority, without headroom: steps that its batch has
    until memory is full, in blocks.
    """

    cools_down = False

    def __init__(self) -> None:
        self._below = self._above = inf
        """Since when the mean has been there."""

    def look(self, fleet: FleetLoad, now: float) -> Wanted:
        """Return one more or one less, where it is time."""
        num = fleet.num_expected
        if not fleet.loads or fleet.num_ready < num:
            self._below = self._above = inf
            return Wanted(num)
        mean = sum(freeness(load) for load, _ in fleet.loads) / len(fleet.loads)
        self._below = min(self._below, now) if mean < LOW else inf
        self._above = min(self._above, now) if mean > HIGH else inf
        if now - self._below >= _BAND_SECONDS:
            self._below = inf
            return Wanted(num + 1, "freeness")
        is_last = num == 1 and fleet.num_open > 0
        if now - self._above >= _BAND_SECONDS and not is_last:
            self._above = inf
            return Wanted(num - 1, "freeness")
        return Wanted(num)


FREE_ENOUGH = 3.0
"""Blocks for each running request; who has fewer gives streams away, who has more takes some. That of the
paper's released code."""
_PAIR_SECONDS = 0.2
"""Between two looks at the whole fleet."""


class Pairing:
    """Pairs the least free replica with the freest, the next with the next, and moves a stream in each pair.

    The stream is one of low priority before those of high, and the shortest of these (section 4.4.3). It
    moves if the freer replica is with it still freer than the other was, so that none goes to and fro. A
    replica that drains is the least free of all.
    """

    def __init__(self, migration: Migration) -> None:
        self._migration = migration
        self._look_at = 0.0

    def on_report(self, replica: Replica, now: float) -> None:  # noqa: ARG002 (all are looked at)
        """See `MoveRule.on_report`."""
        if now < self._look_at:
            return
        self._look_at = now + _PAIR_SECONDS
        known = [each for each in self._movable() if each.load is not None]
        free = {each.order: self._freeness(each) for each in known}
        known.sort(key=lambda each: (free[each.order], each.order))
        sources = [each for each in known if free[each.order] < FREE_ENOUGH]
        destinations = [each for each in reversed(known) if free[each.order] > FREE_ENOUGH]
        for source, destination in zip(sources, destinations, strict=False):
            if not self._migration.moves.num_from(source.replica_id):
                self._move_one(source, destination, now)

    def _movable(self) -> list[Replica]:
        """Return the replicas whose streams may move; those of prompts let go of theirs in any case."""
        members = self._migration.members
        return [
            each
            for each in members.having(ReplicaState.READY, ReplicaState.DRAINING)
            if each.limits.moves_streams and not members.is_prefill(each.replica_id)
        ]

    def _move_one(self, source: Replica, destination: Replica, now: float) -> None:
        may_move = [each for each in source.open.values() if self._migration.may_move(each, now)]
        open_request = min(may_move, key=_turn, default=None)
        if (
            open_request is not None
            and destination in self._migration.candidates(source)
            and self._migration.fits(open_request, destination)
            and self._evens_out(open_request, source, destination)
        ):
            self._migration.begin(open_request, source, destination, "balance", now)

    def _evens_out(self, open_request: RoutedRequest, source: Replica, destination: Replica) -> bool:
        num_high = int(is_high(open_request.request.priority))
        taken = self._freeness(destination, num_blocks_of(open_request, destination), 1, num_high)
        return taken > self._freeness(source)

    def _freeness(self, replica: Replica, num_blocks: int = 0, num_more: int = 0, num_high: int = 0) -> float:
        """Return how free a replica is with what is on its way there, and with a change to that."""
        assert replica.load is not None
        replica_id = replica.replica_id
        return freeness(
            replica.load,
            replica.limits,
            num_high=num_high + sum(is_high(each.request.priority) for each in replica.open.values()),
            num_blocks=num_blocks + self._migration.moves.num_blocks_to(replica_id),
            num_more=num_more + self._migration.moves.num_coming(replica_id),
            is_draining=replica.state is ReplicaState.DRAINING,
        )


def _turn(open_request: RoutedRequest) -> tuple[bool, int, float]:
    request = open_request.request
    return is_high(request.priority), open_request.num_tokens, request.arrival
