"""A fleet, told of events one by one."""

from __future__ import annotations

from onbeat.core.fleet import ReplicaLimits
from onbeat.core.slo import SLO
from onbeat.scheduler.cluster.events import (
    Arrived,
    Delivered,
    FleetAction,
    Joined,
    RoutingRequest,
    ScaleAsked,
    Send,
)
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.membership import FleetRules, ReplicaState
from onbeat.scheduler.cluster.routers import make_router
from tests.owners import check_owners


def limits(**changes) -> ReplicaLimits:
    values = {"max_model_len": 4096, "max_num_seqs": 64, "num_blocks": 1000, "block_size": 16, **changes}
    return ReplicaLimits(**values)


def request(request_id: str, *, ttft: float | None = None, arrival: float = 0.0, **changes) -> RoutingRequest:
    slo = None if ttft is None else SLO(ttft=ttft)
    values = {"num_prompt_tokens": 10, "max_tokens": 10, **changes}
    return RoutingRequest(request_id, arrival=arrival, slo=slo, **values)


class Driven:
    """A fleet whose invariants are checked after every event."""

    def __init__(self, num_replicas: int = 2, *, router: str = "least-outstanding", **config) -> None:
        self.fleet = Fleet(make_router(router), FleetRules(**config))
        self.now = 0.0
        self.on(ScaleAsked(num_replicas))
        for number in range(num_replicas):
            self.on(Joined(f"r{number}", limits()))

    def on(self, event, *, after: float = 0.0) -> list[FleetAction]:
        self.now += after
        actions = self.fleet.on_event(event, self.now)
        check_owners(self.fleet)
        return actions

    def send(self, *request_ids: str, **changes) -> None:
        for request_id in request_ids:
            self.on(Arrived(request(request_id, arrival=self.now, **changes)))

    def state(self, replica: str) -> ReplicaState:
        return self.fleet.state(replica)

    def first(self, replica: str, request_id: str, num_tokens: int = 1) -> list[FleetAction]:
        return self.on(Delivered(replica, request_id, num_tokens, 0, is_finished=False))

    def end(self, replica: str, request_id: str) -> list[FleetAction]:
        return self.on(Delivered(replica, request_id, 1, 0, is_finished=True))


def places(actions) -> list[tuple[str, str]]:
    return [(each.request_id, each.replica) for each in actions if isinstance(each, Send)]
