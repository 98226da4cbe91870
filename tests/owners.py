"""Each request of a fleet has one owner, also those that move."""

from __future__ import annotations

from onbeat.core.fleet import ReplicaId
from onbeat.metrics.fleet_counts import FleetCounts
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.membership import ReplicaState


def check_owners(fleet: Fleet) -> None:
    """Assert that each request has one owner, and that only replicas that can have some do."""
    members, requests = fleet._members, fleet._requests
    owned = dict(requests.waiting)
    for replica in members.replicas.values():
        has_some = replica.state in (ReplicaState.READY, ReplicaState.DRAINING)
        assert has_some or not replica.open, f"{replica.replica_id} is {replica.state}, but has requests"
        for request_id, each in replica.open.items():
            assert request_id not in owned, f"{request_id} has two owners"
            assert each.replica == replica.replica_id
            owned[request_id] = each
    assert owned.keys() == members.open.keys(), "a request has no owner, or has ended and has one"
    waiting = list(requests.waiting.values())
    assert all(each.replica is None for each in waiting)
    for state, known in members.by_state.items():
        assert all(each.state is state for each in known.values()), "a replica is in two states"
    all_refused = bool(members.ready) and all(each.refused_by for each in waiting)
    can_wait = not waiting or all_refused or members.is_one_coming
    assert can_wait, "requests wait, but no replica is coming"


def owner_of(fleet: Fleet, request_id: str) -> ReplicaId | None:
    """Return the replica that has a request; None where it waits in the fleet, or has ended."""
    open_request = fleet._members.open.get(request_id)
    return None if open_request is None else open_request.replica


def num_moved(counts: FleetCounts) -> int:
    """Return how many requests went on elsewhere with their KV."""
    return sum(count for (_, outcome), count in counts.moves.items() if outcome == "moved")
