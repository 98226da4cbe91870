"""The lives of virtual replicas: which of them start and live, what they report, and what they have done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from onbeat.core.fleet import replica_id
from onbeat.scheduler.cluster.events import Reported
from onbeat.simulator.fleet_loop import HEAR, REPORT, FleetLoop, FrontEnd
from onbeat.simulator.result import ReplicaCounters
from onbeat.simulator.simulation_config import ReplicaKind
from onbeat.simulator.virtual_replica import VirtualReplica

MakeReplica = Callable[[int, ReplicaKind], VirtualReplica]


class Lives:
    """Starts replicas of a loop and lets them be gone.

    Parameters
    ----------
    front_end : of the loop.
    kinds : what the replicas are, the first first; further ones are like the last.
    make_replica : makes a replica of a kind, each time that one starts.
    start_seconds : from when one is asked for until it is ready; those at time 0 are there at once.
    on_ready : takes the number of one that is ready, and the time.

    Attributes
    ----------
    replicas : those that live, by number.
    seconds : for which replicas were held, those that are still held left out.
    """

    def __init__(
        self,
        loop: FleetLoop,
        front_end: FrontEnd,
        kinds: Sequence[ReplicaKind],
        make_replica: MakeReplica,
        *,
        start_seconds: float,
        on_ready: Callable[[int, float], None],
    ) -> None:
        self._loop = loop
        self._desk = front_end
        self._kinds = kinds
        self._make_replica = make_replica
        self._start_seconds = start_seconds
        self._on_ready = on_ready
        self.replicas: dict[int, VirtualReplica] = {}
        self._counters: dict[int, ReplicaCounters] = {}
        """Of replicas that have lived, by number."""
        self._starting: dict[int, int] = {}
        """The newest start of a replica that starts, by number: one that was stopped meanwhile is not ready
        when that start would have been done."""
        self._num_starts = 0
        self._held: dict[int, float] = {}
        """Since when a replica has been held, by number: from its start, before it is ready."""
        self.seconds = 0.0

    def kind(self, number: int) -> ReplicaKind:
        """Return what a replica is."""
        return self._kinds[min(number, len(self._kinds) - 1)]

    def start(self, number: int, delay: float, now: float) -> None:
        """Begin to start a replica, after a delay."""
        self._held.setdefault(number, now)
        is_first = now == 0.0 and number not in self._counters
        self._num_starts += 1
        self._starting[number] = self._num_starts
        when = now if is_first else now + delay + self._start_seconds
        self._loop.at(when, HEAR, partial(self._started, number, self._num_starts))

    def _started(self, number: int, start: int, now: float) -> None:
        """Let a replica join whose start is done, unless it was stopped since."""
        if self._starting.get(number) == start:
            del self._starting[number]
            self.replicas[number] = self._make_replica(number, self.kind(number))
            self._loop.join(number, self.replicas[number], self._desk)
            self._on_ready(number, now)

    def give_back(self, number: int, now: float) -> None:
        """Hold a replica no longer, nor start it."""
        self.seconds += now - self._held.pop(number, now)
        self._starting.pop(number, None)

    def remove(self, number: int, *, died: bool = False) -> None:
        """Let a replica be gone."""
        del self.replicas[number]
        counters = self._loop.leave(number).counters()
        if died:  # with what it held, such as the KV of streams that were leaving
            counters = replace(counters, num_leaked_blocks=0)
        before = self._counters.get(number)
        self._counters[number] = counters if before is None else before.joined(counters)

    def end(self, now: float) -> None:
        """Hold no replica any longer."""
        for number in list(self._held):
            self.give_back(number, now)

    def counters(self) -> list[ReplicaCounters]:
        """Let all be gone; return what each replica has done, over all its lives, by number."""
        for number in list(self.replicas):
            self.remove(number)
        return [self._counters[number] for number in sorted(self._counters)]


class Reports:
    """Lets replicas say how they stand.

    Parameters
    ----------
    replicas : those that live, by number.
    seconds : until a report is heard of.
    hear : takes reports, and the time.
    """

    def __init__(
        self,
        loop: FleetLoop,
        replicas: Mapping[int, VirtualReplica],
        *,
        seconds: float,
        hear: Callable[[Reported, float], None],
    ) -> None:
        self._loop = loop
        self._replicas = replicas
        self._seconds = seconds
        self._hear = hear
        self._report_times: dict[int, float] = {}
        """By number, the instant at which a replica is to report, or has."""

    def ask(self, number: int) -> None:
        """Let a replica report at this instant, once all have planned."""
        now = self._loop.now
        if self._report_times.get(number) != now:
            self._report_times[number] = now
            self._loop.at(now, REPORT, partial(self.take, number), number)

    def take(self, number: int, now: float) -> None:
        """Let what a replica reports now be heard of a little later."""
        replica = self._replicas.get(number)
        if replica is None or replica.next_time <= now:
            return  # it is gone; or its run had no further step, and it reports once that has ended
        load = replica.load(now)

        def hear(then: float) -> None:
            if self._replicas.get(number) is replica:
                self._hear(Reported(replica_id(number), load), then)

        self._loop.at(now + self._seconds, HEAR, hear)
