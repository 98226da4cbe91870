"""Routers: which replica, and at what cost."""

from __future__ import annotations

from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import ReplicaLimits
from onbeat.core.request import Request, SamplingParams
from onbeat.core.slo import SLO, ShedMode
from onbeat.scheduler.cluster.events import RoutingRequest
from onbeat.scheduler.cluster.routers import (
    ROUTERS,
    LeastOutstanding,
    PrefixAffinity,
    RoundRobin,
    make_router,
)
from onbeat.scheduler.cluster.routing import Router

pytestmark = pytest.mark.usefixtures("comparators")

R = TypeVar("R", bound=Router)


def request(request_id="r", blocks=()) -> RoutingRequest:
    return RoutingRequest(request_id, blocks)


def limits(**changes) -> ReplicaLimits:
    values = {"max_model_len": 4096, "max_num_seqs": 64, "num_blocks": 1000, "block_size": 16, **changes}
    return ReplicaLimits(**values)


def of_members(num_replicas: int, router: R) -> R:
    for replica in range(num_replicas):
        router.join(replica)
    return router


def route(router: Router, request: RoutingRequest) -> int:
    choice = router.route(request)
    assert choice is not None
    return choice.replica


def test_a_router_is_told_what_a_request_may_have():
    asked = Request(
        request_id="r",
        prompt_token_ids=range(100),
        sampling=SamplingParams(max_tokens=8),
        arrival=1.0,
        slo=SLO(ttft=0.5, tbt=0.05),
        shed=ShedMode.REJECT,
        priority=3,
        resumes=False,
    )
    told = RoutingRequest.of(asked, (b"a" * 16,))
    assert (told.request_id, told.block_hashes, told.priority) == ("r", (b"a" * 16,), 3)
    assert (told.num_prompt_tokens, told.max_tokens, told.ttft_deadline) == (100, 8, 1.5)
    assert told.rather_refused
    assert not told.resumes


def test_round_robin_takes_turns():
    router = of_members(3, RoundRobin())
    assert [route(router, request()) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_least_outstanding_prefers_the_least_recently_chosen_of_equals():
    router = of_members(3, LeastOutstanding())
    assert [route(router, request()) for _ in range(4)] == [0, 1, 2, 0]
    router.on_finish(2, request())
    assert route(router, request()) == 2
    for replica in (1, 0, 0):
        router.on_finish(replica, request())
    assert route(router, request()) == 1  # empty as 0, but chosen longer ago


@given(
    num_replicas=st.integers(1, 6),
    actions=st.lists(st.tuples(st.booleans(), st.integers(0, 100)), max_size=300),
)
@settings(deadline=None)
def test_least_outstanding_always_takes_a_minimum(num_replicas, actions):
    router, outstanding = of_members(num_replicas, LeastOutstanding()), [0] * num_replicas
    for is_arrival, choice in actions:
        busy = [replica for replica, count in enumerate(outstanding) if count]
        if is_arrival or not busy:
            replica = route(router, request())
            assert outstanding[replica] == min(outstanding)
            outstanding[replica] += 1
        else:
            replica = busy[choice % len(busy)]
            router.on_finish(replica, request())
            outstanding[replica] -= 1


def test_prefix_affinity_follows_the_longest_known_prefix():
    router = of_members(3, PrefixAffinity())
    assert route(router, request(blocks=(1, 2, 3))) == 0
    assert route(router, request(blocks=(7, 8))) == 1
    assert route(router, request(blocks=(1, 2, 4))) == 0
    assert route(router, request(blocks=(7, 8, 9))) == 1
    assert route(router, request(blocks=(1, 9, 9, 9, 9))) == 2  # one block of five is too little
    assert route(router, request()) == 2  # nothing is known: the least outstanding


def test_prefix_affinity_leaves_an_overloaded_replica():
    router = PrefixAffinity()
    router.min_excess = 3 / 256
    of_members(2, router)
    choices = [route(router, request(blocks=(1, 2))) for _ in range(6)]
    assert choices == [0, 0, 0, 0, 1, 1]  # with 4 against 0 it moves, and so does the prefix


def test_prefix_affinity_remembers_a_bounded_number_of_blocks():
    router = PrefixAffinity()
    router.max_known_blocks = 4
    of_members(2, router)
    assert route(router, request(blocks=(1, 2))) == 0
    route(router, request(blocks=(3, 4, 5)))
    assert route(router, request(blocks=(1, 2))) == 0  # by load: its prefix is forgotten
    assert len(router._replica_of_block) == 4


@pytest.mark.parametrize("name", ["least-outstanding", "prefix-affinity"])
def test_a_router_does_not_grow_with_the_requests(name):
    router = of_members(8, make_router(name))
    for index in range(5000):
        replica = route(router, request(str(index)))
        router.on_first_token(replica, request())
        router.on_finish(replica, request())
    assert len(router.replicas._order) == 8


@pytest.mark.parametrize("name", [*ROUTERS, "freeness"])
def test_every_router_stays_within_the_replicas(name):
    router = of_members(5, make_router(name))
    chosen = {route(router, request(str(index), blocks=(index % 7, index))) for index in range(200)}
    assert chosen == set(range(5))


def test_unknown_routers_are_named():
    with pytest.raises(ConfigError, match=r"'sticky'.*round-robin"):
        make_router("sticky")


@pytest.mark.parametrize("name", [*ROUTERS, "freeness"])
def test_a_replica_that_left_is_chosen_no_more_until_it_joins_again(name):
    router = of_members(3, make_router(name))
    prompts = [request(f"{number}", blocks=(number % 7,)) for number in range(90)]
    before = [(route(router, each), each) for each in prompts[:30]]
    router.leave(1)
    assert {route(router, each) for each in prompts[30:60]} == {0, 2}
    for replica, each in before:  # it ends what it has
        router.on_first_token(replica, each)
        router.on_finish(replica, each)
    router.join(1)
    assert {route(router, each) for each in prompts[60:]} >= {1}
    assert {replica for replica, _ in before} == {0, 1, 2}


@pytest.mark.parametrize("name", [*ROUTERS, "freeness"])
def test_nothing_is_chosen_where_nobody_is_left(name):
    router = of_members(2, make_router(name))
    router.leave(0)
    assert router.route(request(), 0.0, {1}) is None
    assert route(router, request()) == 1
    router.leave(1)
    assert router.route(request()) is None
    router.join(7)
    assert route(router, request()) == 7


@pytest.mark.parametrize("name", [*ROUTERS, "freeness"])
def test_excluded_replicas_are_passed_over(name):
    router = of_members(4, make_router(name))
    for number in range(40):
        choice = router.route(request(str(number), blocks=(1, number)), 0.0, {0, 2})
        assert choice is not None
        assert choice.replica in (1, 3)
    assert {route(router, request(str(number))) for number in range(40, 90)} >= {0, 2}


def test_the_excess_that_affinity_bears_is_a_share_of_the_slots():
    def run(max_num_seqs: int) -> int:
        router = PrefixAffinity()
        for replica in range(2):
            router.join(replica, limits(max_num_seqs=max_num_seqs))
        choices = [route(router, request(blocks=(1, 2))) for _ in range(100)]
        return choices.index(1)

    assert (run(64), run(256)) == (9, 33)


def test_a_turn_passes_over_a_replica_that_left():
    router = of_members(3, RoundRobin())
    assert route(router, request()) == 0
    router.leave(1)
    assert [route(router, request()) for _ in range(3)] == [2, 0, 2]
    router.join(1)
    assert [route(router, request()) for _ in range(4)] == [0, 1, 2, 0]
