"""Routers of the benchmarks: what they choose, and that the scheduler takes them by their names."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from benchmarks.policies.routers import LeastWork, RandomRouter
from onbeat.cli.main import main
from onbeat.core.errors import ConfigError
from onbeat.core.fleet import PrefillCosts, ReplicaLoad
from onbeat.scheduler.cluster.events import RoutingRequest
from onbeat.scheduler.cluster.routers import ROUTERS, make_router
from onbeat.scheduler.cluster.routing import Router
from onbeat.simulator.simulate import simulate
from tests.pure.scheduler.test_routers import of_members
from tests.pure.simulator.loads import linear_time, make_config, random_load

OWN = {"random": RandomRouter, "least-work": LeastWork}


@pytest.fixture
def registered(monkeypatch):
    for name, make in OWN.items():
        monkeypatch.setitem(ROUTERS, name, make)


def request(request_id="r", prompt=0, output=0) -> RoutingRequest:
    return RoutingRequest(request_id, num_prompt_tokens=prompt, max_tokens=output)


def costing(token: float, decode: float) -> ReplicaLoad:
    costs = PrefillCosts(token=token, pair=0.0, step=0.0, decode=decode)
    return ReplicaLoad(time=0.0, num_taken=0, costs=costs)


def route(router: Router, request: RoutingRequest) -> int:
    choice = router.route(request)
    assert choice is not None
    return choice.replica


def test_random_choice_depends_on_the_id_alone():
    ids = [f"r{index}" for index in range(3000)]
    first = [route(of_members(4, RandomRouter()), request(each)) for each in ids]
    backwards = [route(of_members(4, RandomRouter()), request(each)) for each in reversed(ids)]
    assert first == backwards[::-1]
    assert all(650 < count < 850 for count in Counter(first).values())


def test_least_work_weighs_prompts_until_their_first_token():
    router = of_members(2, LeastWork())
    long = request("long", 5, 1)
    first, second, third = (request(each, 1, 2) for each in ("a", "b", "c"))
    assert route(router, long) == 0
    assert [route(router, each) for each in (first, second)] == [1, 1]  # 3 is less than 6
    router.on_first_token(0, long)
    assert route(router, third) == 0  # 1 is left there, 6 on the other


def test_least_work_counts_seconds_where_replicas_report_what_they_cost():
    router = of_members(2, LeastWork())
    router.on_report(0, costing(token=1e-3, decode=0.1), 0.0)
    assert route(router, request("prompt", 1000, 1)) == 0  # 1.1 s
    assert route(router, request("answer", 10, 20)) == 1  # 2.01 s
    assert route(router, request("another", 10, 20)) == 0


def test_least_work_forgets_rounding_errors_when_a_replica_is_idle():
    router = of_members(2, LeastWork())
    router.on_report(0, costing(token=0.1, decode=0.2), 0.0)
    for _ in range(1000):
        pair = [request(each, 1, 1) for each in "ab"]
        replicas = [route(router, each) for each in pair]
        assert sorted(replicas) == [0, 1]
        for replica, each in zip(replicas, pair, strict=True):
            router.on_first_token(replica, each)
            router.on_finish(replica, each)
    assert not router._left


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", sorted(OWN))
def test_they_choose_members_alone(name):
    router = of_members(4, make_router(name))
    chosen = Counter(route(router, request(str(index), 1, 1)) for index in range(200))
    assert set(chosen) == {0, 1, 2, 3}
    router.leave(1)
    found = [router.route(request(f"x{index}", 1, 1), 0.0, {0, 2}) for index in range(20)]
    assert {choice and choice.replica for choice in found} == {3}
    for replica in (0, 2, 3):
        router.leave(replica)
    assert router.route(request("nobody")) is None
    router.join(7)
    assert route(router, request("again")) == 7


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("router", ["least-outstanding", "least-work"])
def test_routers_that_look_at_load_beat_random_choice(router):
    load = random_load(1000, rate=150, seed=2, prompt=100, output=60)

    def p99_ttft(name):
        records = simulate(load, make_config(replicas=4, router=name), linear_time()).records
        return np.quantile([record.ttft for record in records], 0.99)

    assert p99_ttft(router) < 0.8 * p99_ttft("random")


@pytest.mark.parametrize("name", sorted(OWN))
def test_the_product_does_not_offer_them(name, capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--model", "meta-llama/Llama-3.1-8B", "--device", "h100-sxm", "--router", name])
    assert f"invalid choice: '{name}'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"router '{name}'; .* round-robin, "):
        make_router(name)
