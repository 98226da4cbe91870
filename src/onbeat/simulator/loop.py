"""The event loop: virtual time jumps from one instant at which something happens to the next."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from onbeat.core.errors import ConfigError, RequestRejected
from onbeat.simulator.client import Clients, OfferedRequest
from onbeat.simulator.collector import Collector
from onbeat.simulator.dispatch import Dispatcher
from onbeat.simulator.refusal import REFUSALS, write_refusal
from onbeat.simulator.replica import VirtualReplica


class EventLoop:
    """Runs requests through replicas until all have ended.

    At each instant, steps end first, by ascending replica; then requests are sent, those of a closed loop
    that another's end lets go included, and taken or refused; then replicas plan, and give up requests that
    have waited in vain. So the outcome depends neither on the order in
    which events were found, nor on whether a run of steps was taken at once.
    """

    def __init__(
        self,
        clients: Clients,
        replicas: Sequence[VirtualReplica],
        dispatcher: Dispatcher,
        collector: Collector,
    ) -> None:
        self._clients = clients
        self._replicas = replicas
        self._dispatcher = dispatcher
        self._collector = collector
        self._heap: list[tuple[float, int]] = []
        """(when, replica); an entry counts only if it is the replica's `next_time`"""

    def run(self) -> None:
        """Run to the end of the last request.

        Raises
        ------
        ConfigError : a request that no replica can ever run.
        """
        clients, heap, replicas = self._clients, self._heap, self._replicas
        while True:
            now = clients.next_time
            if heap and heap[0][0] < now:
                now = heap[0][0]
            if now == inf:
                assert not clients.num_under_way, "nothing runs, but a request has not ended"
                return
            called = self._end_steps(now)
            while clients.next_time <= now:
                called.append(self._send(now))
            for index in called if len(called) == 1 else sorted(set(called)):
                replica = replicas[index]
                if replica.next_time <= now:  # a run that was cut at this very instant; none of it ends
                    replica.end(now, clients.next_time)
                for offered in replica.start(now, clients.next_time):
                    self._close(index, offered, now)
                if replica.next_time < inf:
                    heappush(heap, (replica.next_time, index))

    def _end_steps(self, now: float) -> list[int]:
        """Call the replicas that wait for this instant; return them."""
        heap, clients = self._heap, self._clients
        called: list[int] = []
        while heap and heap[0][0] <= now:
            index = heappop(heap)[1]
            replica = self._replicas[index]
            if replica.next_time != now:
                continue  # out of date
            finished = replica.end(now, clients.next_time)
            called.append(index)
            if replica.started:
                self._dispatcher.on_first_tokens(index, replica.started)
            for offered in finished:
                self._close(index, offered, now)
        return called

    def _send(self, now: float) -> int:
        """Send a request; return the replica that was asked to take it."""
        offered = self._clients.send(now)
        index = self._dispatcher.choose(offered)
        self._collector.on_request(offered)
        try:
            self._replicas[index].add(offered, now)
        except REFUSALS as refusal:
            offered.record.replica = self._replicas[index].name
            write_refusal(offered.record, refusal, now)
            self._close(index, offered, now)
        except RequestRejected as error:
            raise ConfigError(f"request {offered.index} of the load can never run: {error}") from error
        return index

    def _close(self, index: int, offered: OfferedRequest, now: float) -> None:
        """Tell everybody of a request that ended, however it did."""
        self._clients.on_finish(now)
        self._dispatcher.on_finish(index, offered)
        self._collector.on_finish(offered, now)
