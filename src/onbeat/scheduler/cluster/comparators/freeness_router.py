"""The replica with the most free KV memory for each of its requests (Sun et al., "Llumnix", OSDI 2024)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from onbeat.core.fleet import ReplicaLimits, ReplicaLoad
from onbeat.scheduler.cluster.comparators.virtual_usage import freeness, is_high
from onbeat.scheduler.cluster.events import RoutingRequest
from onbeat.scheduler.cluster.routing import NONE_EXCLUDED, RoutingChoice

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


class FreenessRouter:
    """The freest replica, the request itself included in those that share what is free.

    One of high priority needs headroom wherever it goes, so that it goes to a replica that keeps some already
    rather than to one that is fuller.

    Nothing is predicted and no length is guessed: what counts is memory by reports, and the prompts that
    were sent since. A choice costs O(replicas).
    """

    reads_reports = True

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

    def num_held(self, request: RoutingRequest) -> Mapping[int, int]:  # noqa: ARG002
        """Return nothing: it knows no prefixes."""
        return {}

    def on_first_token(self, replica: int, request: RoutingRequest) -> None:
        """Nothing is learnt from it: reports say what is done."""

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

    def least_wait(self, request: RoutingRequest, now: float) -> float | None:
        """Return None: nothing is predicted."""

    def join(self, replica: int, limits: ReplicaLimits | None = None) -> None:
        """Let a replica be chosen: a new one, or one that has left."""
        self._left.discard(replica)
        if replica not in self._members:
            self._members[replica] = _Member(limits or _UNKNOWN)

    def leave(self, replica: int) -> None:
        """Choose a replica no more."""
        if replica in self._members:
            self._left.add(replica)
