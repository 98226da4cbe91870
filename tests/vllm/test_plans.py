"""vLLM carries out what is planned, in every step."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler")
from vllm.v1.request import RequestStatus

from onbeat.vllm import scheduler as plugin_module
from onbeat.vllm.surface import Surface
from onbeat.vllm.telemetry import refusal_in
from tests.vllm.chaos import let_chaos_plan
from tests.vllm.harness import (
    ALL_RUNNERS,
    Clock,
    Engine,
    check_ended,
    make_request,
    make_scheduler,
    model_folder,
)

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


def workload(num: int, rate: float, *, long_every: int = 10, start: float = 1000.0, **objectives):
    rng = random.Random(3)
    requests, now = [], start
    for index in range(num):
        now += rng.expovariate(rate)
        num_prompt = 1500 if long_every and index % long_every == 0 else rng.randrange(20, 300)
        requests.append(make_request(f"r{index}", num_prompt, rng.randrange(2, 120), now, **objectives))
    return requests


OBJECTIVES = {"slo_ttft_ms": 1000.0, "slo_tbt_ms": 50.0}


def serve(folder, requests, *, is_async=False, **settings):
    clock = Clock()
    scheduler = make_scheduler(folder, clock, is_async=is_async, **settings)
    engine = Engine(scheduler, clock, depth=2 if is_async else 1, noise=0.05)
    engine.add(*requests)
    engine.run()
    return engine


def check_planned(engine, *, faults=0):
    plugin = engine.scheduler.onbeat
    assert plugin.is_on
    assert plugin.num_faults == faults
    assert plugin.num_mismatches == 0
    assert plugin.num_planned > 0.9 * engine.num_steps


def check_any_plan(folder, seed, *, is_async, shares_prefixes=True, **settings):
    """Impose random plans on many requests in little memory: each is carried out, and all requests end."""
    clock = Clock()
    scheduler = make_scheduler(folder, clock, is_async=is_async, **settings)
    let_chaos_plan(scheduler, seed)
    engine = Engine(scheduler, clock, depth=2 if is_async else 1)
    requests = [
        make_request(
            f"r{index}",
            30 + 17 * (index % 23),
            1 + index % 40,
            1000.0 + 0.02 * index,
            prefix=f"p{index % 5}" if shares_prefixes else None,
        )
        for index in range(80)
    ]
    engine.add(*requests)
    engine.run()
    check_ended(engine, requests)
    check_planned(engine)
    assert sum(request.num_preemptions for request in requests) > 5


@pytest.mark.parametrize("how", ALL_RUNNERS)
@pytest.mark.parametrize("mode", ["stream", "gap"])
def test_every_step_is_as_planned(folder, how, mode):
    requests = workload(60, 4.0, **OBJECTIVES)
    engine = serve(folder, requests, **how, options={"mode": mode})
    check_ended(engine, requests)
    check_planned(engine)


@pytest.mark.parametrize("how", ALL_RUNNERS)
class TestTightPlaces:
    def test_shared_prefixes_are_found_and_planned_with(self, folder, how):
        requests = [
            make_request(f"r{index}", 400, 20, 1000.0 + 0.05 * index, prefix=f"p{index % 4}", **OBJECTIVES)
            for index in range(60)
        ]
        engine = serve(folder, requests, **how, prefix_caching=True)
        check_ended(engine, requests)
        check_planned(engine)
        assert engine.num_cached > 50 * 150

    @pytest.mark.parametrize("prefix_caching", [False, True])
    def test_where_memory_is_short_streams_are_preempted_and_end(self, folder, how, prefix_caching):
        requests = workload(60, 20.0, long_every=0, **OBJECTIVES)
        engine = serve(folder, requests, **how, num_blocks=90, prefix_caching=prefix_caching)
        check_ended(engine, requests)
        check_planned(engine)
        assert sum(request.num_preemptions for request in requests) > 0

    def test_more_than_can_be_served_is_refused_with_numbers(self, folder, how):
        requests = workload(150, 40.0, slo_shed="reject", **OBJECTIVES)
        engine = serve(folder, requests, **how)
        texts = {
            name: str(ends[0].stop_reason or ends[0].error.message)
            for name, ends in engine.ended.items()
            if is_refused(ends[0])
        }
        assert 10 < len(texts) < 140
        check_ended(engine, requests, refused=texts)
        check_planned(engine)
        for text in texts.values():
            refusal = refusal_in(text)
            assert refusal.code in ("slo_unattainable", "server_overloaded", "deadline_exceeded")
            assert refusal.reason

    def test_best_effort_is_served_under_overload(self, folder, how):
        requests = workload(120, 30.0, **OBJECTIVES) + [
            make_request(f"b{index}", 100, 30, 1000.0 + 0.1 * index) for index in range(20)
        ]
        engine = serve(folder, requests, **how)
        overloaded = [name for name, ends in engine.ended.items() if is_refused(ends[0])]
        assert len(overloaded) < 70
        check_ended(engine, requests, refused=overloaded)
        check_planned(engine)
        assert engine.scheduler.onbeat.steps.planner.num_relegated > 0

    def test_aborts_lose_nothing(self, folder, how):
        clock = Clock()
        scheduler = make_scheduler(folder, clock, **how, num_blocks=200)
        engine = Engine(scheduler, clock, depth=2 if how["is_async"] else 1)
        requests = workload(40, 20.0, long_every=0, **OBJECTIVES)
        for request in requests:
            scheduler.add_request(request)
        for request in requests[::2]:
            for _ in range(2):
                engine.step()
            scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        engine.run()
        check_ended(engine, requests[1::2])
        assert not scheduler.onbeat.steps.table.states
        assert not scheduler.onbeat.steps.table.requests
        check_planned(engine)

    @pytest.mark.parametrize("prefix_caching", [False, True])
    @pytest.mark.parametrize("seed", range(3))
    def test_any_plan_is_carried_out(self, folder, how, prefix_caching, seed):
        check_any_plan(folder, seed, **how, num_blocks=400, prefix_caching=prefix_caching)


@pytest.mark.parametrize("how", ALL_RUNNERS)
class TestVersionThatNobodyHasTried:
    @pytest.fixture(autouse=True)
    def version(self, monkeypatch):
        monkeypatch.setattr(plugin_module, "engine_version", lambda: "0.34.0")

    def test_it_is_planned_as_long_as_steps_are_as_planned(self, folder, how):
        requests = workload(60, 4.0, **OBJECTIVES)
        engine = serve(folder, requests, **how)
        check_ended(engine, requests)
        check_planned(engine)

    @pytest.mark.parametrize("lever", ["limiting", "only_waiting"])
    def test_a_lever_without_effect_ends_the_plans_and_no_request(self, folder, how, lever, monkeypatch):
        monkeypatch.setattr(Surface, lever, lambda *_: nullcontext())
        requests = workload(60, 20.0, **OBJECTIVES)
        engine = serve(folder, requests, **how, options={"mode": "gap"})
        check_ended(engine, requests)
        assert not engine.scheduler.onbeat.is_on
        assert engine.scheduler.onbeat.num_planned <= 50


def is_refused(output) -> bool:
    return str(output.finish_reason) != "length"
