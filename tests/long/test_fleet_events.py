"""A million random events at fleets: nothing is lost, doubled or left over."""

from __future__ import annotations

import pytest

from onbeat.scheduler.cluster.routers import ROUTERS
from tests.pure.scheduler.carrier import run

NUM_EVENTS = 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("router", ROUTERS)
def test_a_million_random_events_lose_nothing(router):
    carrier = run(router, num_events=NUM_EVENTS // len(ROUTERS) + 1, seed=2, check_every=50)
    assert carrier.num_ended == carrier.num_arrived
    fleet = carrier.fleet
    assert all(each.num_outstanding == 0 for each in fleet.replicas())
