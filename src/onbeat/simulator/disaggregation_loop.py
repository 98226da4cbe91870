"""The event loop of two pools: arrivals, steps, and KV on its way from one pool to the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf, nan

from onbeat.core.errors import ConfigError, RequestRejected
from onbeat.core.request import Request
from onbeat.core.slo import ShedMode
from onbeat.scheduler.cluster.routers import LeastOutstanding, RoutingRequest
from onbeat.simulator.client import Clients, OfferedRequest
from onbeat.simulator.collector import Collector
from onbeat.simulator.kv_transfer import KVTransfer
from onbeat.simulator.refusal import REFUSALS, write_refusal
from onbeat.simulator.replica import VirtualReplica


@dataclass(slots=True)
class _Journey:
    """A request between its arrival and its end."""

    offered: OfferedRequest
    """As the client sent it."""
    routing: RoutingRequest
    prefill: int
    decode: int = -1
    scheduled: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


class DisaggregatedLoop:
    """Runs requests through a prefill replica, a KV transfer and a decode replica until all have ended.

    At each instant, steps end first, then transfers, then requests are sent, then replicas plan. Requests go
    to the prefill replica, and then to the decode replica, with the fewest requests (DistServe, OSDI 2024,
    section 4.3). A decode replica pulls KV as soon as its scheduler has given the request its blocks.

    Parameters
    ----------
    prefill, decode : the pools; replicas are numbered through both.
    """

    def __init__(
        self,
        clients: Clients,
        prefill: Sequence[VirtualReplica],
        decode: Sequence[VirtualReplica],
        transfer: KVTransfer,
        collector: Collector,
    ) -> None:
        self._clients = clients
        self._replicas = (*prefill, *decode)
        self._num_prefill = len(prefill)
        self._transfer = transfer
        self._collector = collector
        self._prefill_router = LeastOutstanding(len(prefill))
        self._decode_router = LeastOutstanding(len(decode))
        self._journeys: dict[str, _Journey] = {}
        self._steps: list[tuple[float, int]] = []
        """(when, replica); an entry counts only if it is the replica's `next_time`"""
        self._transfers: list[tuple[float, int, str]] = []
        """(when its KV has arrived, its number, request)"""
        self._num_transfers = 0

    def run(self) -> None:
        """Run to the end of the last request.

        Raises
        ------
        ConfigError : a request that no replica can ever run.
        """
        clients = self._clients
        while True:
            now = min(
                clients.next_time, *(heap[0][0] for heap in (self._steps, self._transfers) if heap), inf
            )
            if now == inf:
                return
            called = self._end_steps(now)
            called |= self._end_transfers(now)
            while clients.next_time <= now:
                called.add(self._send(now))
            for index in sorted(called):
                self._plan(index, now)

    def _end_steps(self, now: float) -> set[int]:
        """End the steps that are due; return the replicas that have something new to plan with."""
        heap = self._steps
        called: set[int] = set()
        finished: list[OfferedRequest] = []
        while heap and heap[0][0] <= now:
            index = heappop(heap)[1]
            replica = self._replicas[index]
            if replica.next_time == now:
                finished += replica.end(now, self._clients.next_time)
                called.add(index)
        for offered in finished:
            journey = self._journeys[offered.request.request_id]
            if journey.decode < 0:
                self._prefill_router.on_finish(journey.prefill, journey.routing)
                if offered.request.keeps_kv:
                    called.add(self._hand_over(journey, now))
                    continue
            self._finish(journey, now)
        return called

    def _end_transfers(self, now: float) -> set[int]:
        """Let requests run whose KV has arrived, and free it where it came from."""
        called = set()
        while self._transfers and self._transfers[0][0] <= now:
            request_id = heappop(self._transfers)[2]
            journey = self._journeys[request_id]
            self._replicas[journey.prefill].scheduler.release_kv(request_id)
            self._replicas[journey.decode].scheduler.receive_kv(request_id)
            for index in (journey.prefill, journey.decode):
                self._replicas[index].interrupt(now)
                called.add(index)
        return called

    def _send(self, now: float) -> int:
        """Send the next request to a prefill replica, which is asked for the first token alone."""
        offered = self._clients.send(now)
        request = offered.request
        routing = RoutingRequest(request.request_id)
        index = self._prefill_router.route(routing)
        journey = self._journeys[request.request_id] = _Journey(offered, routing, index)
        self._collector.on_request(offered)
        num_output_tokens = offered.record.offered_output_tokens
        assert num_output_tokens is not None
        first_token_alone = replace(request.sampling, max_tokens=1)
        request = replace(request, sampling=first_token_alone, keeps_kv=num_output_tokens > 1)
        try:
            self._add(index, OfferedRequest(offered.index, request, offered.record), now)
        except REFUSALS as refusal:
            write_refusal(offered.record, refusal, now)
            self._prefill_router.on_finish(index, routing)
            self._finish(journey, now)
        return index

    def _hand_over(self, journey: _Journey, now: float) -> int:
        """Queue a request that has its first token at a decode replica; return that replica."""
        offered, record = journey.offered, journey.offered.record
        journey.scheduled, journey.num_cached_tokens = record.scheduled, record.num_cached_tokens
        journey.num_preemptions = record.num_preemptions
        record.finish_reason, record.end = None, nan
        journey.decode = self._num_prefill + self._decode_router.route(journey.routing)
        request = _decode_request(offered.request, now)
        self._add(journey.decode, OfferedRequest(offered.index, request, record), now)
        return journey.decode

    def _finish(self, journey: _Journey, now: float) -> None:
        """Close a request that has all its tokens."""
        offered, record = journey.offered, journey.offered.record
        del self._journeys[offered.request.request_id]
        record.replica = str(journey.prefill)
        if journey.decode >= 0:
            self._decode_router.on_finish(journey.decode - self._num_prefill, journey.routing)
            record.replica = f"{journey.prefill}+{journey.decode}"
            record.scheduled, record.num_cached_tokens = journey.scheduled, journey.num_cached_tokens
            record.num_preemptions += journey.num_preemptions
        self._clients.on_finish(now)
        self._collector.on_finish(offered, now)

    def _add(self, index: int, offered: OfferedRequest, now: float) -> None:
        try:
            self._replicas[index].add(offered, now)
        except REFUSALS:
            raise
        except RequestRejected as error:
            raise ConfigError(f"request {offered.index} of the load can never run: {error}") from error

    def _plan(self, index: int, now: float) -> None:
        """Start a step where the replica is free, and the transfers that its plan makes room for."""
        replica, next_arrival = self._replicas[index], self._clients.next_time
        if replica.next_time <= now:  # a run that was cut at this very instant; none of it ends
            replica.end(now, next_arrival)
        for offered in replica.start(now, next_arrival):  # only who waits for a first token can wait in vain
            journey = self._journeys[offered.request.request_id]
            self._prefill_router.on_finish(journey.prefill, journey.routing)
            self._finish(journey, now)
        if replica.next_time < inf:
            heappush(self._steps, (replica.next_time, index))
        for pull in replica.scheduler.take_pulls():
            end = now + self._transfer.seconds(pull.request.num_external_tokens)
            self._num_transfers += 1
            heappush(self._transfers, (end, self._num_transfers, pull.request.request_id))


def _decode_request(request: Request, now: float) -> Request:
    """Return what is left of a request after its first token: all but that token is computed.

    Its TTFT objective is behind it, and it has been taken: it is not asked again.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    return replace(
        request,
        prompt_token_ids=range(num_prompt_tokens + 1),
        sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - 1),
        arrival=now,
        num_external_tokens=num_prompt_tokens,
        slo=None if request.slo is None else replace(request.slo, ttft=None, e2e=None),
        shed=ShedMode.OFF,
    )
