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
from tests.pure.simulator.loads import linear_time, make_config, random_load

OWN = {
    "random": lambda num_replicas, seed: RandomRouter(num_replicas, seed=seed),
    "least-work": lambda num_replicas, _seed: LeastWork(num_replicas),
}


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


def test_random_choice_depends_on_seed_and_id_alone():
    ids = [f"r{index}" for index in range(3000)]
    first = [route(RandomRouter(4, seed=1), request(each)) for each in ids]
    backwards = [route(RandomRouter(4, seed=1), request(each)) for each in reversed(ids)]
    assert first == backwards[::-1]
    assert first != [route(RandomRouter(4, seed=2), request(each)) for each in ids]
    assert all(650 < count < 850 for count in Counter(first).values())


def test_least_work_weighs_prompts_until_their_first_token():
    router = LeastWork(2)
    long = request("long", 5, 1)
    first, second, third = (request(each, 1, 2) for each in ("a", "b", "c"))
    assert route(router, long) == 0
    assert [route(router, each) for each in (first, second)] == [1, 1]  # 3 is less than 6
    router.on_first_token(0, long)
    assert route(router, third) == 0  # 1 is left there, 6 on the other


def test_least_work_counts_seconds_where_replicas_report_what_they_cost():
    router = LeastWork(2)
    router.on_report(0, costing(token=1e-3, decode=0.1), 0.0)
    assert route(router, request("prompt", 1000, 1)) == 0  # 1.1 s
    assert route(router, request("answer", 10, 20)) == 1  # 2.01 s
    assert route(router, request("another", 10, 20)) == 0


def test_least_work_forgets_rounding_errors_when_a_replica_is_idle():
    router = LeastWork(2)
    router.on_report(0, costing(token=0.1, decode=0.2), 0.0)
    for _ in range(1000):
        pair = [request(each, 1, 1) for each in "ab"]
        replicas = [route(router, each) for each in pair]
        assert sorted(replicas) == [0, 1]
        for replica, each in zip(replicas, pair, strict=True):
            router.on_first_token(replica, each)
            router.on_finish(replica, each)
    assert len(router.replicas._heap) <= 4 * 2
    assert not router._left


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", sorted(OWN))
def test_they_choose_members_alone(name):
    router = make_router(name, 4)
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
def test_the_seed_matters_to_the_random_router():
    load = random_load(60, rate=80, seed=9)
    replicas = [
        [
            record.replica
            for record in simulate(
                load, make_config(replicas=3, router="random", seed=seed), linear_time()
            ).records
        ]
        for seed in (0, 1)
    ]
    assert replicas[0] != replicas[1]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("router", ["least-outstanding", "least-work"])
def test_routers_that_look_at_load_beat_random_choice(router):
    load = random_load(1000, rate=150, seed=2, prompt=100, output=60)

    def p99_ttft(name):
        records = simulate(load, make_config(replicas=4, router=name), linear_time()).records
        return np.quantile([record.ttft for record in records], 0.99)

    assert p99_ttft(router) < 0.8 * p99_ttft("random")


@pytest.mark.usefixtures("registered")
def test_replicas_behind_a_random_router_may_be_simulated_apart():
    load = random_load(200, rate=20.0, seed=4)
    config = make_config(router="random", replicas=3)
    alone = simulate(load, config, linear_time()).records
    assert (
        simulate(load, config, linear_time(), on_decision=lambda event, now, actions: None).records == alone
    )


@pytest.mark.parametrize("name", sorted(OWN))
def test_the_product_does_not_offer_them(name, capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--model", "meta-llama/Llama-3.1-8B", "--device", "h100-sxm", "--router", name])
    assert f"invalid choice: '{name}'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"unknown router '{name}'; choose one of round-robin, "):
        make_router(name, 2)
