"""Between the clients and the replicas: which replica runs a request, or which runs which part of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import nan
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from onbeat.metrics.record import RequestRecord
from onbeat.scheduler.cluster.disaggregation import PoolRouter, decode_part, prompt_part
from onbeat.scheduler.cluster.routing import Router, RoutingRequest
from onbeat.scheduler.cluster.work import WorkEstimate, describe
from onbeat.simulator.client import OfferedRequest
from onbeat.workload.offered import OfferedLoad


class Placement(Protocol):
    """Where requests run, as the event loop asks for it."""

    def send(self, offered: OfferedRequest) -> tuple[int, OfferedRequest]:
        """Return the replica for a request that is sent now, and what it is sent."""
        ...

    def move_on(self, replica: int, offered: OfferedRequest, now: float) -> tuple[int, OfferedRequest] | None:
        """Return where a request goes on that a replica has run; None where it has all its tokens."""
        ...

    def on_first_tokens(self, replica: int, started: Iterable[OfferedRequest]) -> None:
        """Hear of prompts that are done."""
        ...

    def on_finish(self, replica: int, offered: OfferedRequest) -> None:
        """Hear of a request that ended, perhaps before its first token."""
        ...


class Dispatcher:
    """Asks a router where each request goes, which then runs there to its end.

    Parameters
    ----------
    router : None where there is one replica only.
    work : predicts work, for a router that looks at it.
    """

    def __init__(self, router: Router | None, work: WorkEstimate | None = None) -> None:
        self._router = router
        self._work = work
        self._is_told = router is not None and not router.ignores_state

    def send(self, offered: OfferedRequest) -> tuple[int, OfferedRequest]:
        """Return the replica for a request that is sent now, and the request."""
        if self._router is None:
            return 0, offered
        offered.routing = describe(offered.request, self._work)
        choice = self._router.route(offered.routing)
        assert choice is not None, "the last member never leaves"
        return choice.replica, offered

    def move_on(self, replica: int, offered: OfferedRequest, now: float) -> None:
        """Return None: a replica runs the whole request."""

    def on_first_tokens(self, replica: int, started: Iterable[OfferedRequest]) -> None:
        """Tell the router of prompts that are done."""
        if self._is_told:
            assert self._router is not None
            for offered in started:
                assert offered.routing is not None
                self._router.on_first_token(replica, offered.routing)

    def on_finish(self, replica: int, offered: OfferedRequest) -> None:
        """Tell the router of a request that ended, perhaps before its first token."""
        if self._is_told:
            assert self._router is not None
            assert offered.routing is not None
            if not offered.record.delivery_times:
                self._router.on_first_token(replica, offered.routing)
            self._router.on_finish(replica, offered.routing)


@dataclass(frozen=True, slots=True)
class _PromptPart:
    """What a prefill replica did for a request that has gone on to a decode replica."""

    replica: int
    scheduled: float | None
    num_cached_tokens: int
    num_preemptions: int

    def add_to(self, record: RequestRecord, decode: int) -> None:
        """Make one record of both parts, which has that of the decode replica so far."""
        record.replica = f"{self.replica}+{decode}"
        record.scheduled, record.num_cached_tokens = self.scheduled, self.num_cached_tokens
        record.num_preemptions += self.num_preemptions


class PoolDispatcher:
    """Sends the prompt of each request to one pool, and what is left of it to the other.

    Parameters
    ----------
    router : knows both pools.
    """

    def __init__(self, router: PoolRouter) -> None:
        self._router = router
        self._sent: dict[str, OfferedRequest] = {}
        """Requests whose prompt has not run, as their clients sent them."""
        self._prompts: dict[str, _PromptPart] = {}

    def send(self, offered: OfferedRequest) -> tuple[int, OfferedRequest]:
        """Return a prefill replica for a request that is sent now, and its prompt."""
        request, record = offered.request, offered.record
        self._sent[request.request_id] = offered
        routing = RoutingRequest(request.request_id)
        num_output_tokens = record.offered_output_tokens
        assert num_output_tokens is not None
        part = prompt_part(request, num_output_tokens=num_output_tokens)
        return self._router.route_prompt(routing), OfferedRequest(offered.index, part, record, routing)

    def move_on(self, replica: int, offered: OfferedRequest, now: float) -> tuple[int, OfferedRequest] | None:
        """Return a decode replica for a prompt that is done, and the part of the request that is left."""
        if not offered.request.keeps_kv:
            return None
        request_id, record, routing = offered.request.request_id, offered.record, offered.routing
        assert routing is not None
        self._prompts[request_id] = _PromptPart(
            replica, record.scheduled, record.num_cached_tokens, record.num_preemptions
        )
        record.finish_reason, record.end = None, nan
        part = decode_part(self._sent.pop(request_id).request, now)
        self._router.on_finish(replica, routing)
        return self._router.route_decodes(routing), OfferedRequest(offered.index, part, record, routing)

    def on_first_tokens(self, replica: int, started: Iterable[OfferedRequest]) -> None:
        """Nothing is kept: a prefill replica has ended with a request then."""

    def on_finish(self, replica: int, offered: OfferedRequest) -> None:
        """Tell the router of a request that ended, and close its record over both pools."""
        request_id = offered.request.request_id
        assert offered.routing is not None
        self._router.on_finish(replica, offered.routing)
        if self._router.is_decode(replica):
            self._prompts.pop(request_id).add_to(offered.record, replica)
        else:
            del self._sent[request_id]


def assign(router: Router, load: OfferedLoad) -> NDArray[np.int32]:
    """Return the replica of each request of a load, by a router that ignores the replicas' state."""
    assert router.ignores_state

    def replica_of(index: int) -> int:
        choice = router.route(RoutingRequest(str(index)))
        assert choice is not None, "there is a member"
        return choice.replica

    return np.fromiter(map(replica_of, range(len(load))), np.int32, len(load))
