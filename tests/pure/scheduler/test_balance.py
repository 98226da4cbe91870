"""Moves that mend what is about to go wrong on a replica, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from onbeat.core.fleet import PrefillCosts, ReplicaLimits, ReplicaLoad
from onbeat.core.slo import SLO
from onbeat.scheduler.cluster.events import (
    Arrived,
    Delivered,
    Joined,
    MoveStep,
    Reported,
    RoutingRequest,
    ScaleAsked,
    Send,
    Withdraw,
)
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.migration import has_spare_capacity, is_worth_it, trouble
from onbeat.scheduler.cluster.routers import make_router
from tests.owners import check_owners, owner_of

COSTS = PrefillCosts(token=1e-4, pair=0.0, step=0.01, decode=1e-4)
LIMITS = ReplicaLimits(
    max_model_len=8192, max_num_seqs=64, num_blocks=1000, block_size=16, moves_streams=True
)


def load_of(**changes: Any) -> ReplicaLoad:
    values = {"num_free_blocks": 900, "num_decodes": 8, "num_running": 8, "costs": COSTS, **changes}
    values = {"decode_seconds": COSTS.step + COSTS.decode * max(values["num_decodes"], 1), **values}
    return ReplicaLoad(time=0.0, num_taken=0, **values)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"num_free_blocks": 40}, "memory"),
        ({"num_free_blocks": 3, "costs": None}, "memory"),
        ({"num_wanted_blocks": 20}, "queue"),
        ({"tightest_tbt": 0.010}, "steps"),
        ({"tightest_tbt": 0.010, "num_decodes": 1}, ""),
        ({"tightest_tbt": 0.05}, ""),
    ],
)
def test_what_is_about_to_go_wrong(changes, expected) -> None:
    assert trouble(load_of(**changes), LIMITS) == expected


def test_room_to_spare_is_more_than_room() -> None:
    assert has_spare_capacity(load_of(), LIMITS, num_blocks=100, num_more=1)
    assert not has_spare_capacity(load_of(num_free_blocks=150), LIMITS, num_blocks=100, num_more=1)
    assert not has_spare_capacity(load_of(num_waiting=1), LIMITS, num_blocks=100, num_more=1)
    idle = {"num_running": 0, "num_decodes": 0}
    assert has_spare_capacity(load_of(num_free_blocks=101, **idle), LIMITS, num_blocks=100, num_more=1)
    assert not has_spare_capacity(load_of(num_free_blocks=101, **idle), LIMITS, num_blocks=100, num_more=2)
    assert not has_spare_capacity(load_of(num_free_blocks=99, **idle), LIMITS, num_blocks=100, num_more=1)


def test_short_streams_are_computed_again_sooner_than_they_are_moved() -> None:
    assert not is_worth_it(load_of(), 300)
    assert is_worth_it(load_of(), 600)
    assert is_worth_it(load_of(), 300, num_steps=4), "it would wait for blocks, besides"


def fleet_of(*, num_tokens: int = 800, **fields: Any) -> Fleet:
    """Return a fleet of two, with three streams on each."""
    fleet = Fleet(make_router("round-robin"))
    fleet.on_event(ScaleAsked(2), 0.0)
    for name in ("r0", "r1"):
        fleet.on_event(Joined(name, LIMITS), 0.0)
    for number in range(6):
        request = RoutingRequest(
            f"q{number}", num_prompt_tokens=num_tokens, max_tokens=200, arrival=float(number), **fields
        )
        fleet.on_event(Arrived(request), 6.0)
        owner = owner_of(fleet, f"q{number}")
        assert owner is not None
        fleet.on_event(Delivered(owner, f"q{number}", 1, 0, is_finished=False), 6.0)
    return fleet


def begun(fleet: Fleet, now: float, r0: ReplicaLoad, r1: ReplicaLoad) -> list[tuple[str, str]]:
    """Return the moves that two reports begin: which request, and where to."""
    actions = [
        *fleet.on_event(Reported("r1", r1), now),
        *fleet.on_event(Reported("r0", r0), now),
    ]
    return [(each.request_id, each.replica) for each in actions if isinstance(each, MoveStep)]


def test_the_last_to_come_moves_from_a_replica_that_runs_out_of_memory() -> None:
    fleet = fleet_of()
    assert begun(fleet, 7.0, load_of(num_free_blocks=10), load_of()) == [("q4", "r1")]
    assert begun(fleet, 7.1, load_of(num_free_blocks=10), load_of()) == [], "one at a time"
    check_owners(fleet)


def test_short_streams_move_where_they_would_wait_for_blocks() -> None:
    fleet = fleet_of(num_tokens=50)
    assert begun(fleet, 7.0, load_of(tightest_tbt=0.010), load_of()) == []
    assert begun(fleet, 8.0, load_of(num_free_blocks=10), load_of()) == [("q4", "r1")]


@pytest.mark.parametrize("has_tokens", [True, False])
def test_a_request_that_lacks_blocks_begins_elsewhere(has_tokens: bool) -> None:
    fleet = fleet_of()
    if not has_tokens:
        fleet.on_event(Arrived(RoutingRequest("new", num_prompt_tokens=80, max_tokens=20, arrival=6.0)), 6.5)
    name = "q0" if has_tokens else "new"
    full = load_of(num_free_blocks=2, num_wanted_blocks=50, blocked=name)
    fleet.on_event(Reported("r1", load_of()), 7.0)
    actions = fleet.on_event(Reported("r0", full), 7.0)
    assert actions == [Withdraw("r0", name), Send("r1", name, "moved")]
    check_owners(fleet)
    fleet.on_event(Reported("r1", load_of(num_free_blocks=2, num_wanted_blocks=50, blocked=name)), 8.0)
    assert owner_of(fleet, name) == "r1", "it does not go to and fro"


def test_a_stream_that_is_not_to_be_resumed_waits_for_blocks_where_it_is() -> None:
    fleet = fleet_of(resumes=False)
    full = load_of(num_free_blocks=2, num_wanted_blocks=50, blocked="q0")
    fleet.on_event(Reported("r1", load_of()), 7.0)
    assert fleet.on_event(Reported("r0", full), 7.0)[:1] != [Withdraw("r0", "q0")]


def test_a_request_that_lacks_blocks_stays_where_nobody_has_room() -> None:
    fleet = fleet_of()
    full = load_of(num_free_blocks=2, num_wanted_blocks=50, blocked="q0")
    busy = (load_of(num_waiting=1), load_of(num_free_blocks=30), load_of(tightest_tbt=0.01))
    for now, load in enumerate(busy, start=7):
        fleet.on_event(Reported("r1", load), now)
        assert fleet.on_event(Reported("r0", full), now) == []
    fleet.on_event(Reported("r1", load_of()), 20.0)
    assert fleet.on_event(Reported("r0", replace(full, blocked="gone")), 20.0)[:1] != [Withdraw("r0", "gone")]
    assert fleet.on_event(Reported("r0", full), 21.0)[:1] == [Withdraw("r0", "q0")]


def test_nothing_moves_where_all_is_well_or_nobody_can_help() -> None:
    fleet = fleet_of()
    assert begun(fleet, 7.0, load_of(), load_of()) == []
    assert begun(fleet, 8.0, load_of(num_free_blocks=10), load_of(num_free_blocks=70)) == []
    assert begun(fleet, 9.0, load_of(num_free_blocks=10), load_of(tightest_tbt=0.01)) == []


def test_a_stream_does_not_move_to_where_its_own_objective_is_missed() -> None:
    fleet = fleet_of(slo=SLO(tbt=0.0108))
    assert begun(fleet, 7.0, load_of(num_free_blocks=10), load_of(num_decodes=8)) == []
    assert begun(fleet, 8.0, load_of(num_free_blocks=10), load_of(num_decodes=2)) == [("q4", "r1")]
