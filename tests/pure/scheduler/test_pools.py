"""Where a prompt is computed when prompts and tokens are on replicas of their own."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from benchmarks.policies.splitwise import MOST_QUEUED_TOKENS
from onbeat.core.fleet import PrefillCosts, ReplicaLimits, ReplicaLoad
from onbeat.core.handover import MoveVerb
from onbeat.scheduler.cluster.events import (
    Answered,
    Arrived,
    Delivered,
    Joined,
    Lost,
    MoveStep,
    Reported,
    RoutingRequest,
    ScaleAsked,
    Send,
    Stop,
)
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.membership import FleetRules
from onbeat.scheduler.cluster.routers import make_router
from tests.owners import check_owners

pytestmark = pytest.mark.usefixtures("comparators")

COSTS = PrefillCosts(token=1e-4, pair=0.0, step=0.01, decode=1e-4)
LIMITS = ReplicaLimits(
    max_model_len=8192, max_num_seqs=64, num_blocks=4096, block_size=16, moves_streams=True
)


def fleet_of(
    router: str = "slo",
    *,
    num_prefill: int = 1,
    num_replicas: int = 3,
    rule: str = "adaptive",
    **load: Any,
) -> Fleet:
    """Return a fleet of a prefill and two decode replicas, which report the same load."""
    fleet = Fleet(make_router(router), FleetRules(num_prefill=num_prefill, pool_rule=rule))
    fleet.on_event(ScaleAsked(num_replicas), 0.0)
    for name in (f"r{number}" for number in range(num_replicas)):
        fleet.on_event(Joined(name, LIMITS), 0.0)
        values = {"num_free_blocks": 4096, "costs": COSTS, **load}
        values["decode_seconds"] = COSTS.step + COSTS.decode * values.get("num_decodes", 0)
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
    check_owners(fleet)


def test_fewer_replicas_are_fewer_that_generate() -> None:
    fleet = fleet_of()
    actions = fleet.on_event(ScaleAsked(2), 1.0)
    assert [each.replica for each in actions if isinstance(each, Stop)] == ["r2"]


def test_roles_are_known_by_name() -> None:
    fleet = fleet_of()
    assert [fleet.role(name) for name in ("r0", "r1", "r2")] == ["prefill", "decode", "decode"]


class TestSplitwise:
    """Both replicas are chosen at arrival, and what one pool has no room for goes to the other."""

    LONG = MOST_QUEUED_TOKENS // 2

    def fleet(self, **load: Any) -> Fleet:
        return fleet_of("least-outstanding", num_prefill=2, num_replicas=4, rule="splitwise", **load)

    def arrive(self, fleet: Fleet, name: str, num_tokens: int) -> tuple[str, str]:
        """Return where a prompt is sent, and where its stream is to go; nothing where it stays."""
        request = RoutingRequest(name, (), num_prompt_tokens=num_tokens, max_tokens=50)
        actions = fleet.on_event(Arrived(request), 0.0)
        (send,) = [each for each in actions if isinstance(each, Send)]
        asked = [each for each in actions if isinstance(each, MoveStep)]
        assert send.stops == bool(asked)
        if not asked:
            return send.replica, ""
        assert (asked[0].replica, asked[0].verb, asked[0].num_blocks) == (send.replica, MoveVerb.HOLD, 1)
        answered = Answered(send.replica, asked[0].move, MoveVerb.HOLD, ok=True, num_blocks=1)
        (reserve,) = fleet.on_event(answered, 0.0)
        assert isinstance(reserve, MoveStep)
        assert reserve.verb is MoveVerb.RESERVE
        check_owners(fleet)
        return send.replica, reserve.replica

    def report(self, fleet: Fleet, replica: str, **values: Any) -> None:
        load = ReplicaLoad(time=0.0, num_taken=0, **{"num_free_blocks": 4096, "costs": COSTS, **values})
        fleet.on_event(Reported(replica, load), 0.0)

    def test_a_prompt_joins_the_shortest_queue_of_tokens_not_of_requests(self) -> None:
        fleet = self.fleet()
        assert self.arrive(fleet, "long", self.LONG)[0] == "r0"
        assert [self.arrive(fleet, f"short {i}", 100)[0] for i in range(3)] == ["r1"] * 3
        fleet.on_event(Delivered("r0", "long", 1, 0, is_finished=False), 0.0)
        assert self.arrive(fleet, "next", 100)[0] == "r0"

    def test_a_stream_goes_where_the_most_room_is_those_on_their_way_counted(self) -> None:
        fleet = self.fleet()
        self.report(fleet, "r2", num_free_blocks=4000)
        assert self.arrive(fleet, "a", 3200) == ("r0", "r3")
        assert self.arrive(fleet, "b", 160) == ("r1", "r2")

    def test_long_queues_send_prompts_to_one_that_generates_until_it_has_done_them(self) -> None:
        fleet = self.fleet()
        for name in ("a", "b", "c", "d"):
            self.arrive(fleet, name, self.LONG)
        assert self.arrive(fleet, "e", 1000) == ("r2", "")
        assert self.arrive(fleet, "f", 1000) == ("r2", ""), "it is mixed, and the other is not needed"
        assert self.arrive(fleet, "g", self.LONG + 3000) == ("r3", "")
        for name in ("e", "f"):
            fleet.on_event(Delivered("r2", name, 1, 0, is_finished=False), 0.0)
        for replica, name in (("r0", "a"), ("r1", "b")):
            fleet.on_event(Delivered(replica, name, 1, 0, is_finished=False), 0.0)
        assert self.arrive(fleet, "h", 1000)[0] == "r0", "there is room in the pool for prompts"

    def test_streams_for_which_nobody_has_room_go_to_one_for_prompts(self) -> None:
        fleet = self.fleet()
        for replica in ("r2", "r3"):
            self.report(fleet, replica, num_free_blocks=10)
        self.report(fleet, "r0", num_free_blocks=4000)
        self.report(fleet, "r1", num_free_blocks=300)
        assert self.arrive(fleet, "a", 1600) == ("r0", "")
        fleet.on_event(Delivered("r0", "a", 1, 0, is_finished=False), 0.0)
        self.report(fleet, "r0", num_free_blocks=100, num_decodes=1)
        assert self.arrive(fleet, "b", 160) == ("r1", "r0"), "it is mixed already: the other stays as it is"
        fleet.on_event(Delivered("r0", "a", 1, 0, is_finished=True), 0.0)
        assert self.arrive(fleet, "c", 160) == ("r0", "r1"), "of those for prompts, one with the most room"

    def test_a_stream_that_is_about_to_leave_makes_no_replica_mixed(self) -> None:
        fleet = self.fleet()
        assert self.arrive(fleet, "a", 160) == ("r0", "r2")
        self.report(fleet, "r0", num_decodes=1)  # with the step of its first token
        fleet.on_event(Delivered("r0", "a", 1, 0, is_finished=False), 0.0)
        self.arrive(fleet, "long", 1000)
        assert self.arrive(fleet, "next", 160)[0] == "r1", "r0 has the longer queue"
        assert self.arrive(fleet, "more", 1000)[0] == "r1"
        assert self.arrive(fleet, "last", 160)[0] == "r0", "r1 has"

    def test_nobody_has_room(self) -> None:
        fleet = self.fleet()
        for replica in ("r0", "r1", "r2", "r3"):
            self.report(fleet, replica, num_free_blocks=10)
        request = RoutingRequest("q", (), num_prompt_tokens=1600, max_tokens=50)
        (send,) = fleet.on_event(Arrived(request), 0.0)
        assert isinstance(send, Send)
        assert send.stops, "it is looked at again once it has its first token"
