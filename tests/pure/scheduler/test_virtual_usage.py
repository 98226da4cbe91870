"""What Llumnix counts as used, who is sent where by it, and who moves."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from benchmarks.policies.llumnix import HIGH_TARGET_TOKENS, FreenessRouter, freeness
from onbeat.core.errors import ConfigError
from onbeat.core.fleet import ReplicaLimits, ReplicaLoad
from onbeat.scheduler.cluster.events import (
    Arrived,
    Delivered,
    DrainAsked,
    Joined,
    MoveStep,
    Reported,
    RoutingRequest,
    ScaleAsked,
)
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.fleet_config import FleetConfig
from onbeat.scheduler.cluster.membership import FleetRules
from onbeat.scheduler.cluster.routers import make_router
from tests.owners import check_owners, owner_of

pytestmark = pytest.mark.usefixtures("comparators")

LIMITS = ReplicaLimits(
    max_model_len=8192, max_num_seqs=64, num_blocks=1000, block_size=16, moves_streams=True
)


def load_of(num_free: int = 900, num_running: int = 10, **changes: Any) -> ReplicaLoad:
    values = {"num_taken": 0, "num_free_blocks": num_free, "num_running": num_running, **changes}
    return ReplicaLoad(time=0.0, num_decodes=num_running, **values)


class TestFreeness:
    """By hand, from section 4.4 of the paper."""

    def test_free_blocks_are_shared_by_those_that_run(self) -> None:
        assert freeness(load_of(900, 10)) == 90
        assert freeness(load_of(900, 0)) == 900

    def test_the_first_in_the_queue_counts_with_all_that_it_wants(self) -> None:
        # It wants 150 blocks, 100 are free: 50 more than there are, shared by ten.
        assert freeness(load_of(100, 10, num_waiting=7, num_wanted_blocks=50)) == -5

    def test_high_priority_has_headroom_once_however_many_have_it(self) -> None:
        headroom = LIMITS.num_blocks - HIGH_TARGET_TOKENS // LIMITS.block_size
        assert freeness(load_of(950, 2), LIMITS, num_high=1) == (950 - headroom) / 2
        assert freeness(load_of(950, 2), LIMITS, num_high=2) == (950 - headroom) / 2
        # Filled up to the target and not beyond.
        assert freeness(load_of(900, 2), LIMITS, num_high=1) == 0

    def test_what_drains_is_infinitely_full(self) -> None:
        assert freeness(load_of(1000, 0), is_draining=True) == -inf

    def test_what_is_to_come_counts(self) -> None:
        assert freeness(load_of(900, 8), num_blocks=100, num_more=2) == 80


def request(name: str, num_tokens: int = 160, **fields: Any) -> RoutingRequest:
    return RoutingRequest(name, num_prompt_tokens=num_tokens, max_tokens=4000, **fields)


class TestRouter:
    def router(self, *loads: ReplicaLoad) -> FreenessRouter:
        router = FreenessRouter()
        for number, load in enumerate(loads):
            router.join(number, LIMITS)
            router.on_report(number, load, 0.0)
        return router

    def chosen(self, router: FreenessRouter, *requests: RoutingRequest) -> list[int]:
        choices = [router.route(each) for each in requests]
        return [each.replica for each in choices if each is not None]

    def test_the_freest_has_it(self) -> None:
        router = self.router(load_of(400, 10), load_of(500, 10), load_of(500, 30))
        assert self.chosen(router, request("a")) == [1]
        assert router.route(request("b"), excluded=(0, 1, 2)) is None

    def test_a_long_prompt_that_waits_keeps_others_away(self) -> None:
        router = self.router(load_of(500, 10, num_waiting=1, num_wanted_blocks=1), load_of(20, 30))
        assert self.chosen(router, request("a")) == [1]

    def test_what_was_sent_counts_until_a_report_does(self) -> None:
        router = self.router(load_of(500, 9), load_of(490, 9))
        assert self.chosen(router, request("a", 3200), request("b")) == [0, 1]
        router.on_report(0, load_of(500, 9), 0.0)  # it has not seen it yet
        assert self.chosen(router, request("c")) == [1]
        router.on_report(0, load_of(500, 9, num_taken=1), 0.0)
        assert self.chosen(router, request("d")) == [0]

    def test_requests_of_high_priority_share_headroom_that_keeps_others_away(self) -> None:
        router = self.router(load_of(1000, 0), load_of(600, 10))
        high = [request(f"h{number}", priority=-1) for number in range(2)]
        assert self.chosen(router, *high) == [0, 0], "one headroom does for both"
        assert self.chosen(router, request("a")) == [1]
        for each in high:
            router.on_finish(0, each)
        assert self.chosen(router, request("b")) == [0]

    def test_one_that_left_and_came_back_still_has_what_it_had(self) -> None:
        router = self.router(load_of(1000, 0), load_of(600, 10))
        high = request("h", priority=-1)
        assert self.chosen(router, high) == [0]
        router.leave(0)
        assert self.chosen(router, request("a")) == [1]
        router.join(0, LIMITS)
        assert self.chosen(router, request("b")) == [1]
        router.on_finish(0, high)
        assert self.chosen(router, request("c")) == [0]


class TestPairs:
    def fleet(self, num_replicas: int = 2, *, rule: str = "llumnix", **fields: Any) -> Fleet:
        """Return a fleet with three streams on each replica, the first of them the longest."""
        fleet = Fleet(make_router("round-robin"), FleetRules(move_rule=rule))
        fleet.on_event(ScaleAsked(num_replicas), 0.0)
        for number in range(num_replicas):
            fleet.on_event(Joined(f"r{number}", LIMITS), 0.0)
        for number in range(3 * num_replicas):
            name = f"q{number}"
            fleet.on_event(Arrived(request(name, 1600 - 16 * number, arrival=0.0, **fields)), 0.0)
            owner = owner_of(fleet, name)
            assert owner is not None
            fleet.on_event(Delivered(owner, name, 1, 0, is_finished=False), 0.0)
        return fleet

    def begun(self, fleet: Fleet, now: float, *loads: ReplicaLoad) -> list[tuple[str, str]]:
        """Return the moves that reports begin, once all have come: which request, and where to."""
        begun: list[tuple[str, str]] = []
        for time in (now, now + 1):
            for number, load in enumerate(loads):
                actions = fleet.on_event(Reported(f"r{number}", load), time)
                begun += [(each.request_id, each.replica) for each in actions if isinstance(each, MoveStep)]
        check_owners(fleet)
        return begun

    def test_the_least_free_is_paired_with_the_freest_and_the_next_with_the_next(self) -> None:
        fleet = self.fleet(4)
        loads = [load_of(20, 20), load_of(600, 10), load_of(2, 20), load_of(900, 10)]
        # The shortest of each: q8 of r0, and q10 of r2, which is the fuller of the two.
        assert self.begun(fleet, 1.0, *loads) == [("q10", "r3"), ("q8", "r1")]
        assert self.begun(fleet, 5.0, *loads) == [], "one at a time from each"

    def test_who_has_enough_keeps_its_streams_and_who_has_not_gets_none(self) -> None:
        assert self.begun(self.fleet(), 1.0, load_of(61, 20), load_of(900, 10)) == []
        assert self.begun(self.fleet(), 1.0, load_of(2, 20), load_of(59, 20)) == []

    def test_a_long_prompt_that_fits_nowhere_makes_room(self) -> None:
        full = load_of(100, 10, num_waiting=1, num_wanted_blocks=60)
        assert self.begun(self.fleet(), 1.0, full, load_of(900, 10)) == [("q4", "r1")]
        assert self.begun(self.fleet(rule="mend"), 1.0, load_of(100, 2), load_of(900, 10)) == []

    def test_low_priority_leaves_before_high(self) -> None:
        fleet = self.fleet()
        high = request("high", 16, priority=-1)
        fleet.on_event(Arrived(high), 0.5)
        assert owner_of(fleet, "high") == "r0"
        fleet.on_event(Delivered("r0", "high", 1, 0, is_finished=False), 0.5)
        # 500 blocks are free, but 900 are kept for it.
        assert self.begun(fleet, 1.0, load_of(500, 4), load_of(900, 10)) == [("q4", "r1")]

    def test_the_only_one_of_high_priority_stays(self) -> None:
        """Elsewhere it would take its headroom along, and nobody would be freer."""
        fleet = Fleet(make_router("round-robin"), FleetRules(move_rule="llumnix"))
        fleet.on_event(ScaleAsked(2), 0.0)
        for number in range(2):
            fleet.on_event(Joined(f"r{number}", LIMITS), 0.0)
        fleet.on_event(Arrived(request("high", 1616, priority=-1)), 0.0)
        fleet.on_event(Delivered("r0", "high", 1, 0, is_finished=False), 0.0)
        assert self.begun(fleet, 1.0, load_of(898, 1), load_of(1000, 0)) == []

    def test_what_drains_comes_first(self) -> None:
        fleet = self.fleet(3)
        for number in range(3):
            fleet.on_event(Reported(f"r{number}", load_of(900, 10)), 0.5)
        actions = fleet.on_event(DrainAsked("r0", 30.0, restarts=False), 1.0)
        leaving = [each for each in actions if isinstance(each, MoveStep)]
        assert {each.replica for each in leaving} <= {"r1", "r2"}
        assert len(leaving) == 2


def test_rules_that_nobody_has() -> None:
    with pytest.raises(ConfigError, match="pairs"):
        FleetConfig(move_rule="pairs")
