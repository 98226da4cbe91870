"""The event loop: virtual time jumps from one instant at which something happens to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf

from onbeat.core.errors import RequestRejected
from onbeat.simulator.deliveries import Collector, refuse
from onbeat.simulator.virtual_clients import Clients, OfferedRequest
from onbeat.simulator.virtual_replica import VirtualReplica

STEP, HEAR, COPY, TICK, ARRIVE, MOVE, PLAN, REPORT, STOP = range(9)
"""At one instant steps end; what is due is heard of, such as reports, starts and deaths; copies end; the
fleet looks at what is due; requests arrive; moves take steps; replicas plan; they report; the run ends."""

Call = Callable[[float], None]
"""What is done, given the time."""


class FrontEnd:
    """Says where requests go, and hears what becomes of them."""

    hears_all = False
    """Whether it hears of all steps, and before each plan; else of those that begin or end requests."""
    hears_news = False
    """Whether it hears of plans of something else than one more token for each."""

    def open(self) -> None:
        """Begin, at time 0."""

    def arrive(self, offered: OfferedRequest, now: float) -> None:
        """Take a request."""
        raise NotImplementedError

    def on_step(self, member: Member, finished: Sequence[OfferedRequest], now: float) -> None:
        """Hear that a replica has ended a step, and requests with it."""
        raise NotImplementedError

    def before_plan(self, member: Member, now: float) -> None:
        """Hear that a replica is about to plan."""

    def on_news(self, member: Member, now: float) -> None:
        """Hear that a replica has planned something else than before."""

    def on_expired(self, member: Member, offered: OfferedRequest, now: float) -> None:
        """Hear of a request that a replica let wait in vain."""
        raise NotImplementedError


class FleetLoop:
    """Runs requests through replicas until all have ended.

    One heap holds all that is to happen, each at its time; at one instant it happens in the order of the
    phases above, and within a phase by ascending replica, else in the order in which it was asked for. So the
    outcome depends neither on the order in which events were found, nor on whether a run of steps was taken
    at once.
    """

    def __init__(self, clients: Clients, collector: Collector) -> None:
        self.clients = clients
        self._collector = collector
        self.events: list[tuple[float, int, int, int, Call]] = []
        """(when, phase, replica, serial number, call)"""
        self.num_events = 0
        """That were ever in the heap."""
        self.members: dict[int, Member] = {}
        """Those that live, by number."""
        self.now = 0.0
        self._next_arrival = inf
        """When an arrival is in the heap; infinite while none is."""

    def run(self, front_end: FrontEnd) -> bool:
        """Run to the end of the last request; return whether that came, not a Ctrl-C.

        Parameters
        ----------
        front_end : of this loop.

        Raises
        ------
        ConfigError : a request that no replica can ever run.
        """
        self._front_end, events = front_end, self.events
        try:
            front_end.open()
            self._expect_arrival()
            while events:
                self.now, _, _, _, call = heappop(events)
                call(self.now)
        except KeyboardInterrupt:
            return False
        assert not self.clients.num_under_way, "nothing runs, but a request has not ended"
        return True

    def at(self, when: float, phase: int, call: Call, number: int = 0) -> None:
        """Have something done.

        Parameters
        ----------
        number : of the replica that it is done to; 0 where it is none's.
        """
        self.num_events += 1
        heappush(self.events, (when, phase, number, self.num_events, call))

    def join(self, number: int, replica: VirtualReplica, front_end: FrontEnd) -> Member:
        """Let a replica take requests."""
        member = self.members[number] = Member(self, front_end, number, replica)
        return member

    def leave(self, number: int) -> VirtualReplica:
        """Let a replica be gone; return it."""
        member = self.members.pop(number)
        member.is_gone = True
        return member.replica

    def close(self, offered: OfferedRequest, now: float) -> None:
        """Hear of a request that ended, however it did."""
        self.clients.on_finish(offered, now)
        self._collector.on_finish(offered, now)
        if self.clients.next_time < self._next_arrival:
            self._expect_arrival()
        elif not self.clients.num_under_way and self.clients.next_time == inf:
            self.at(now, STOP, self._stop)

    def _expect_arrival(self) -> None:
        self._next_arrival = self.clients.next_time
        if self._next_arrival < inf:
            self.at(self._next_arrival, ARRIVE, self._arrive)

    def _arrive(self, now: float) -> None:
        if now != self._next_arrival:
            return  # another request was due sooner, and came then
        offered = self.clients.send(now)
        self._expect_arrival()
        self._collector.on_request(offered)
        self._front_end.arrive(offered, now)

    def _stop(self, now: float) -> None:  # noqa: ARG002 (that of the last request's end)
        self.events.clear()


class Member:
    """One life of a replica in a loop: when it ends steps, and when it plans."""

    __slots__ = ("_due", "_front_end", "_loop", "_planned", "is_gone", "number", "replica")

    def __init__(self, loop: FleetLoop, front_end: FrontEnd, number: int, replica: VirtualReplica) -> None:
        self.number = number
        self.replica = replica
        self.is_gone = False
        self._loop = loop
        self._front_end = front_end
        self._due = inf
        """When an end of its step is in the heap."""
        self._planned = -1.0
        """The instant at which it is to plan, or has."""

    def call(self, now: float) -> None:
        """Let it plan at this instant, after all else."""
        if self._planned != now:
            self._planned = now
            self._loop.at(now, PLAN, self._plan, self.number)

    def _end(self, now: float) -> None:
        """Take what its step, or run of steps, has brought."""
        replica, loop, front_end = self.replica, self._loop, self._front_end
        if self._due == now:
            self._due = inf
        if replica.next_time != now or self.is_gone:
            return  # out of date
        finished = replica.end(now)
        if self._planned != now:
            self._planned = now
            loop.num_events += 1
            heappush(loop.events, (now, PLAN, self.number, loop.num_events, self._plan))
        if finished or replica.started or front_end.hears_all:
            front_end.on_step(self, finished, now)

    def _plan(self, now: float) -> None:
        """Start a step where the replica is free."""
        self._planned = -1.0
        if self.is_gone:
            return
        replica, loop, front_end = self.replica, self._loop, self._front_end
        if replica.next_time <= now:  # a run that was cut at this very instant; none of it ends
            replica.end(now)
        if front_end.hears_all:
            front_end.before_plan(self, now)
        for offered in replica.start(now, loop.clients.next_time):
            front_end.on_expired(self, offered, now)
        if front_end.hears_news and replica.has_news:
            front_end.on_news(self, now)
        when = replica.next_time
        if when != self._due and when < inf:
            self._due = when
            loop.num_events += 1
            heappush(loop.events, (when, STEP, self.number, loop.num_events, self._end))


class OnlyReplica(FrontEnd):
    """A fleet of one replica, to which nothing happens: nobody decides anything, or hears of it."""

    def __init__(self, loop: FleetLoop, replica: VirtualReplica) -> None:
        self._loop = loop
        self._member = loop.join(0, replica, self)

    def arrive(self, offered: OfferedRequest, now: float) -> None:
        """Let the replica take a request, or refuse it."""
        member = self._member
        try:
            member.replica.add(offered, now)
        except RequestRejected as error:
            refuse(offered, error, member.replica.name, now)
            self._loop.close(offered, now)
        member.call(now)

    def on_step(self, member: Member, finished: Sequence[OfferedRequest], now: float) -> None:  # noqa: ARG002
        """Let requests end."""
        for offered in finished:
            self._loop.close(offered, now)

    def on_expired(self, member: Member, offered: OfferedRequest, now: float) -> None:  # noqa: ARG002
        """Let the request end: no other replica could take it."""
        self._loop.close(offered, now)
