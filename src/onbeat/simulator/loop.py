"""The event loop: virtual time jumps from one instant at which something happens to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf

from onbeat.core.errors import RequestRejected
from onbeat.simulator.client import Clients, OfferedRequest
from onbeat.simulator.deliveries import refuse
from onbeat.simulator.dispatch import Dispatcher
from onbeat.simulator.observer import Collector
from onbeat.simulator.replica import VirtualReplica


class EventLoop:
    """Runs requests through replicas until all have ended.

    At each instant, steps end first, by ascending replica; then replicas join or leave; then requests are
    sent, those of a closed loop that another's end lets go included, and admitted or rejected; then replicas
    plan, and end requests that have waited for too long. So the outcome depends neither on the order in which
    events were found, nor on whether a run of steps was taken at once.

    Parameters
    ----------
    dispatcher : says where a request runs.
    changes : (when, what is called then), by time: for replicas that begin or cease to get requests.
    """

    def __init__(
        self,
        clients: Clients,
        replicas: Sequence[VirtualReplica],
        dispatcher: Dispatcher,
        collector: Collector,
        *,
        changes: Sequence[tuple[float, Callable[[], None]]] = (),
    ) -> None:
        self._clients = clients
        self._replicas = replicas
        self._dispatcher = dispatcher
        self._collector = collector
        self._changes = deque(changes)
        self._steps: list[tuple[float, int]] = []
        """(when, replica); an entry counts only if it is the replica's `next_time`"""

    def run(self) -> None:
        """Run to the end of the last request.

        Raises
        ------
        ConfigError : a request that no replica can ever run.
        """
        clients, steps, changes = self._clients, self._steps, self._changes
        while True:
            now = clients.next_time
            if steps and steps[0][0] < now:
                now = steps[0][0]
            if changes and changes[0][0] < now:
                now = changes[0][0]
            if now == inf:
                assert not clients.num_under_way, "nothing runs, but a request has not ended"
                return
            called = self._end_steps(now)
            while changes and changes[0][0] <= now:
                changes.popleft()[1]()
            while clients.next_time <= now:
                called.append(self._send(now))
            for index in called if len(called) == 1 else sorted(set(called)):
                self._plan(index, now)

    def _end_steps(self, now: float) -> list[int]:
        """Call the replicas that wait for this instant; return who has something new to plan with."""
        steps, dispatcher = self._steps, self._dispatcher
        called: list[int] = []
        while steps and steps[0][0] <= now:
            index = heappop(steps)[1]
            replica = self._replicas[index]
            if replica.next_time != now:
                continue  # out of date
            finished = replica.end(now)
            called.append(index)
            if replica.started:
                dispatcher.on_first_tokens(index, replica.started)
            for offered in finished:
                self._close(index, offered, now)
        return called

    def _send(self, now: float) -> int:
        """Send a request; return the replica that was asked to take it."""
        offered = self._clients.send(now)
        index = self._dispatcher.send(offered)
        self._collector.on_request(offered)
        try:
            self._replicas[index].add(offered, now)
        except RequestRejected as error:
            refuse(offered, error, self._replicas[index].name, now)
            self._close(index, offered, now)
        return index

    def _plan(self, index: int, now: float) -> None:
        """Start a step where the replica is free."""
        replica, next_arrival = self._replicas[index], self._clients.next_time
        if replica.next_time <= now:  # a run that was cut at this very instant; none of it ends
            replica.end(now)
        for offered in replica.start(now, next_arrival):
            self._close(index, offered, now)
        if replica.next_time < inf:
            heappush(self._steps, (replica.next_time, index))

    def _close(self, index: int, offered: OfferedRequest, now: float) -> None:
        """Tell everybody of a request that ended, however it did."""
        self._clients.on_finish(now)
        self._dispatcher.on_finish(index, offered)
        self._collector.on_finish(offered, now)
