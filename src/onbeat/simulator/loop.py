"""The event loop: virtual time jumps from one instant at which something happens to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf

from onbeat.core.errors import RequestRejected
from onbeat.simulator.client import Clients, OfferedRequest
from onbeat.simulator.config import KVTransfer
from onbeat.simulator.deliveries import refuse
from onbeat.simulator.dispatch import Placement
from onbeat.simulator.observer import Collector
from onbeat.simulator.replica import VirtualReplica


class EventLoop:
    """Runs requests through replicas until all have ended.

    At each instant, steps end first, by ascending replica, and what they have prepared for another replica
    is queued there; then KV arrives; then replicas join or leave; then requests are sent, those of a closed
    loop that another's end lets go included, and admitted or rejected; then replicas plan, end requests that
    have waited for too long, and begin to fetch KV for those that they have given blocks. So the outcome
    depends neither on the order in which events were found, nor on whether a run of steps was taken at once.

    Parameters
    ----------
    placement : says where a request runs, and where it goes on.
    transfer : what lies between replicas; needed where requests go on.
    changes : (when, what is called then), by time: for replicas that begin or cease to get requests.
    """

    def __init__(
        self,
        clients: Clients,
        replicas: Sequence[VirtualReplica],
        placement: Placement,
        collector: Collector,
        *,
        transfer: KVTransfer | None = None,
        changes: Sequence[tuple[float, Callable[[], None]]] = (),
    ) -> None:
        self._clients = clients
        self._replicas = replicas
        self._placement = placement
        self._collector = collector
        self._transfer = transfer
        self._changes = deque(changes)
        self._steps: list[tuple[float, int]] = []
        """(when, replica); an entry counts only if it is the replica's `next_time`"""
        self._transfers: list[tuple[float, int, str, int]] = []
        """(when its KV has arrived, number of the transfer, request, replica that it goes to)"""
        self._num_transfers = 0
        self._sources: dict[str, int] = {}
        """Which replica keeps the KV of a request that has gone on to another."""

    def run(self) -> None:
        """Run to the end of the last request.

        Raises
        ------
        ConfigError : a request that no replica can ever run.
        """
        clients, steps, transfers, changes = self._clients, self._steps, self._transfers, self._changes
        while True:
            now = clients.next_time
            if steps and steps[0][0] < now:
                now = steps[0][0]
            if transfers and transfers[0][0] < now:
                now = transfers[0][0]
            if changes and changes[0][0] < now:
                now = changes[0][0]
            if now == inf:
                assert not clients.num_under_way, "nothing runs, but a request has not ended"
                return
            called = self._end_steps(now)
            while transfers and transfers[0][0] <= now:
                called += self._end_transfer(now)
            while changes and changes[0][0] <= now:
                changes.popleft()[1]()
            while clients.next_time <= now:
                called.append(self._send(now))
            for index in called if len(called) == 1 else sorted(set(called)):
                self._plan(index, now)

    def _end_steps(self, now: float) -> list[int]:
        """Call the replicas that wait for this instant; return who has something new to plan with."""
        steps, placement = self._steps, self._placement
        called: list[int] = []
        moved: list[tuple[int, OfferedRequest]] = []
        while steps and steps[0][0] <= now:
            index = heappop(steps)[1]
            replica = self._replicas[index]
            if replica.next_time != now:
                continue  # out of date
            finished = replica.end(now)
            called.append(index)
            if replica.started:
                placement.on_first_tokens(index, replica.started)
            for offered in finished:
                onward = placement.move_on(index, offered, now)
                if onward is None:
                    self._close(index, offered, now)
                else:
                    self._sources[offered.request.request_id] = index
                    moved.append(onward)
        for index, offered in moved:  # once no step of this instant is left to end
            self._add(index, offered, now)
            called.append(index)
        return called

    def _end_transfer(self, now: float) -> tuple[int, int]:
        """Let a request run whose KV has arrived, and free it where it came from; return both replicas."""
        _, _, request_id, index = heappop(self._transfers)
        source = self._sources.pop(request_id)
        self._replicas[source].scheduler.release_kv(request_id)
        self._replicas[index].scheduler.receive_kv(request_id)
        self._replicas[source].interrupt(now)
        self._replicas[index].interrupt(now)
        return source, index

    def _send(self, now: float) -> int:
        """Send a request; return the replica that was asked to take it."""
        sent = self._clients.send(now)
        index, offered = self._placement.send(sent)
        self._collector.on_request(sent)
        self._add(index, offered, now)
        return index

    def _add(self, index: int, offered: OfferedRequest, now: float) -> None:
        """Ask a replica to take a request."""
        try:
            self._replicas[index].add(offered, now)
        except RequestRejected as error:
            refuse(offered, error, self._replicas[index].name, now)
            self._close(index, offered, now)

    def _plan(self, index: int, now: float) -> None:
        """Start a step where the replica is free, and the transfers that its plan makes room for."""
        replica, next_arrival = self._replicas[index], self._clients.next_time
        if replica.next_time <= now:  # a run that was cut at this very instant; none of it ends
            replica.end(now)
        for offered in replica.start(now, next_arrival):
            self._close(index, offered, now)
        if replica.next_time < inf:
            heappush(self._steps, (replica.next_time, index))
        if self._transfer is None:
            return
        for fetch in replica.scheduler.take_kv_fetches():
            end = now + self._transfer.seconds(fetch.request.num_external_tokens)
            self._num_transfers += 1
            heappush(self._transfers, (end, self._num_transfers, fetch.request.request_id, index))

    def _close(self, index: int, offered: OfferedRequest, now: float) -> None:
        """Tell everybody of a request that ended, however it did."""
        self._clients.on_finish(now)
        self._placement.on_finish(index, offered)
        self._collector.on_finish(offered, now)
