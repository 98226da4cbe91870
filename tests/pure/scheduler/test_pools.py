"""Where a prompt is computed when prompts and tokens are on replicas of their own."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from onbeat.core.fleet import PrefillCosts, ReplicaLimits, ReplicaLoad
from onbeat.scheduler.cluster.events import Arrived, Joined, Lost, Reported, ScaleAsked, Send, Stop
from onbeat.scheduler.cluster.fleet import Fleet, FleetConfig
from onbeat.scheduler.cluster.routers import make_router
from onbeat.scheduler.cluster.routing import RoutingRequest

COSTS = PrefillCosts(token=1e-4, pair=0.0, step=0.01, decode=1e-4)
LIMITS = ReplicaLimits(
    max_model_len=8192, max_num_seqs=64, num_blocks=4096, block_size=16, moves_streams=True
)


def fleet_of(router: str = "slo", **load: Any) -> Fleet:
    """Return a fleet of a prefill and two decode replicas, which report the same load."""
    fleet = Fleet(make_router(router, 0), FleetConfig(num_prefill=1))
    fleet.on_event(ScaleAsked(3), 0.0)
    for name in ("r0", "r1", "r2"):
        fleet.on_event(Joined(name, LIMITS), 0.0)
        values = {"num_free_blocks": 4096, "costs": COSTS, **load}
        fleet.on_event(Reported(name, ReplicaLoad(time=0.0, num_taken=0, **values)), 0.0)
    return fleet


def sent_to(fleet: Fleet, name: str, num_tokens: int, hashes: tuple[int, ...] = ()) -> str:
    request = RoutingRequest(name, hashes, num_prompt_tokens=num_tokens, max_tokens=50)
    (send,) = [each for each in fleet.on_event(Arrived(request), 0.0) if isinstance(each, Send)]
    return send.replica


@pytest.mark.parametrize(
    ("num_tokens", "load", "is_sent_away"),
    [
        (80, {}, False),
        (120, {}, True),
        (120, {"num_decodes": 50, "tightest_tbt": inf}, False),
        (300, {"num_decodes": 50, "tightest_tbt": 0.05}, False),
        (400, {"num_decodes": 50, "tightest_tbt": 0.05}, True),
        (60, {"costs": None}, False),
        (70, {"costs": None}, True),
    ],
)
def test_a_prompt_stays_where_its_step_disturbs_nobody(num_tokens, load, is_sent_away) -> None:
    fleet = fleet_of(**load)
    assert (sent_to(fleet, "q", num_tokens) == "r0") == is_sent_away


def test_what_is_cached_need_not_be_computed() -> None:
    fleet = fleet_of(num_decodes=1)
    hashes = tuple(range(30))
    fleet._router.take(1, RoutingRequest("before", hashes, num_prompt_tokens=500))
    assert sent_to(fleet, "cached", 500, hashes) == "r1"
    assert sent_to(fleet, "new", 500, tuple(range(100, 130))) == "r0"


@pytest.mark.parametrize("router", ["slo", "least-outstanding", "round-robin"])
def test_where_a_pool_is_gone_the_other_does_all(router) -> None:
    fleet = fleet_of(router)
    fleet.on_event(Lost("r0", "killed"), 0.0)
    assert sent_to(fleet, "long", 2000) in ("r1", "r2")
    fleet.on_event(Joined("r0", LIMITS), 1.0)
    for name in ("r1", "r2"):
        fleet.on_event(Lost(name, "killed"), 1.0)
    assert sent_to(fleet, "short", 10) == "r0"
    fleet.check_invariants()


def test_fewer_replicas_are_fewer_that_generate() -> None:
    fleet = fleet_of()
    actions = fleet.on_event(ScaleAsked(2), 1.0)
    assert [each.replica for each in actions if isinstance(each, Stop)] == ["r2"]


def test_roles_are_known_by_name() -> None:
    fleet = fleet_of()
    assert [fleet.role(name) for name in ("r0", "r1", "r2")] == ["prefill", "decode", "decode"]
