"""What a simulation keeps and tells: tokens, blocks, order, progress, errors."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.core.request import Request
from onbeat.metrics.record import RequestRecord
from onbeat.scheduler.cluster.routers import ROUTERS
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.simulator.deliveries import Collector
from onbeat.simulator.simulate import simulate
from onbeat.simulator.virtual_clients import Clients, OfferedRequest
from tests.examples import examples
from tests.pure.simulator.loads import (
    HearsOfRequests,
    ShapeTime,
    StepByStep,
    linear_time,
    make_config,
    make_load,
    random_load,
)

pytestmark = pytest.mark.usefixtures("comparators")


def test_one_request_by_hand():
    """A prompt of 70 tokens in chunks of 32 takes three steps, then two decodes."""
    model = ShapeTime(lambda shape: 0.1 if shape.num_chunks else 0.01)
    [record] = simulate(make_load([70], [3], [2.0]), make_config(), model).records
    assert record.arrival == record.scheduled == 2.0
    assert list(record.delivery_times) == pytest.approx([2.3, 2.31, 2.32])
    assert list(record.delivery_sizes) == [1, 1, 1]
    assert record.num_output_tokens == record.offered_output_tokens == 3
    assert record.end == record.delivery_times[-1]
    assert (record.finish_reason, record.replica, record.request_id) == ("length", "0", "0")


def test_host_overhead_is_added_to_each_step():
    load = make_load([70], [3], [2.0])
    model = ShapeTime(lambda shape: 0.01)
    [record] = simulate(load, make_config(host_overhead=0.5), model).records
    assert list(record.delivery_times) == pytest.approx([3.53, 4.04, 4.55])


def test_requests_that_arrive_together_share_a_step():
    model = ShapeTime(lambda shape: 1.0)
    records = simulate(make_load([8, 8, 8], [1, 1, 1], [0.0, 0.0, 0.0]), make_config(), model).records
    assert [record.end for record in records] == [1.0, 1.0, 1.0]


def test_priorities_of_a_load_come_with_its_requests():
    """Three wait for the only slot; the last is to come first."""
    load = replace(make_load([8, 8, 8], [1, 1, 1], [0.0, 0.1, 0.1]), priorities=np.array([0, 0, -1]))
    config = make_config()
    scheduler = replace(config.scheduler, max_num_seqs=1, scheduling_policy="priority")
    records = simulate(load, replace(config, scheduler=scheduler), ShapeTime(lambda shape: 1.0)).records
    assert [record.end for record in records] == [1.0, 3.0, 2.0]
    with pytest.raises(ConfigError, match=r"3 prompt.*2 priorities"):
        replace(load, priorities=np.array([0, 0]))
    assert load.take([2]).priorities.tolist() == [-1]


def test_a_closed_loop_sends_the_next_request_when_one_ends():
    load = random_load(40, rate=1, seed=4).with_arrivals(None)
    records = simulate(load, make_config(max_concurrency=3), linear_time()).records
    ends = sorted(record.end for record in records)
    arrivals = [record.arrival for record in records]
    assert arrivals[:3] == [0.0] * 3
    assert arrivals[3:] == ends[: len(arrivals) - 3]


def test_a_limit_on_concurrency_holds_arrivals_back():
    model = ShapeTime(lambda shape: 1.0)
    load = make_load([8] * 3, [1] * 3, [0.0, 0.5, 7.0])
    records = simulate(load, make_config(max_concurrency=1), model).records
    assert [record.arrival for record in records] == [0.0, 1.0, 7.0]


@given(
    policy=st.sampled_from(sorted(POLICIES)),
    router=st.sampled_from([*ROUTERS, "freeness"]),
    num_replicas=st.integers(1, 4),
    pipeline=st.integers(1, 3),
    seed=st.integers(0, 1000),
    rate=st.sampled_from([1.0, 20.0, 400.0]),
)
@examples(30)
def test_tokens_and_blocks_are_conserved(policy, router, num_replicas, pipeline, seed, rate):
    load = random_load(40, rate=rate, seed=seed, prompt=150, output=90)
    config = make_config(
        policy,
        scheduler={"num_blocks": 24},
        router=router,
        replicas=num_replicas,
        pipeline=pipeline,
    )
    observer = StepByStep()
    result = simulate(load, config, linear_time(), observer=observer)
    assert result.is_complete
    assert [int(record.request_id) for record in result.records] == list(range(40))
    for record, wanted in zip(result.records, load.num_output_tokens.tolist(), strict=True):
        assert record.num_output_tokens == len(record.delivery_times) == sum(record.delivery_sizes) == wanted
        assert all(earlier < later for earlier, later in pairwise(record.delivery_times))
        assert record.arrival <= record.scheduled < record.delivery_times[0]
    assert sum(each.num_leaked_blocks for each in result.replicas) == 0
    assert all(each.peak_used_blocks <= 24 for each in result.replicas)
    assert result.total.num_preemptions == sum(record.num_preemptions for record in result.records)
    assert result.total.num_steps == len(observer.steps)
    if not result.total.num_preemptions and policy != "static":  # whose padding rows compute in vain
        num_computed = sum(stats.shape.num_new_tokens for _, stats in observer.steps)
        assert num_computed == int((load.num_prompt_tokens + load.num_output_tokens - 1).sum())


@pytest.mark.parametrize("router", [*ROUTERS, "freeness"])
def test_equal_arguments_give_equal_results(router):
    load = random_load(120, rate=80, seed=9)
    config = make_config(replicas=3, router=router, seed=1)
    first, second = (simulate(load, config, linear_time()) for _ in range(2))
    assert first.records == second.records
    assert first.replicas == second.replicas


def test_a_router_that_looks_at_load_beats_turns():
    load = random_load(1000, rate=150, seed=2, prompt=100, output=60)

    def p99_ttft(name):
        records = simulate(load, make_config(replicas=4, router=name), linear_time()).records
        return np.quantile([record.ttft for record in records], 0.99)

    assert p99_ttft("least-outstanding") < 0.9 * p99_ttft("round-robin")


def test_observers_hear_of_everything_in_order():
    load = random_load(30, rate=40, seed=6)
    watching, every = HearsOfRequests(), StepByStep()
    result = simulate(load, make_config(replicas=2), linear_time(), observer=every)
    assert simulate(load, make_config(replicas=2), linear_time(), observer=watching).records == result.records
    assert [record.request_id for record in every.requests] == [str(index) for index in range(30)]
    assert [record.end for record in every.finished] == sorted(record.end for record in result.records)
    ends = [stats.end for _, stats in every.steps]
    assert ends == sorted(ends)
    assert sum(stats.num_prefix_queries for _, stats in every.steps) == result.total.num_prefix_queries
    assert not watching.steps
    assert watching.finished == every.finished


def test_progress_is_rare_and_ends_with_all():
    seen = []
    simulate(
        random_load(300, rate=50, seed=1),
        make_config(),
        linear_time(),
        on_progress=lambda *progress: seen.append(progress),
    )
    assert seen[-1][:2] == (300, 300)
    assert len(seen) < 20


def test_progress_comes_at_most_ten_times_a_second():
    now, seen = [0.0], []
    collector = Collector(
        lambda _row, _record: None,
        100,
        on_progress=lambda *progress: seen.append((now[0], *progress)),
        clock=lambda: now[0],
    )
    request = Request(request_id="0", prompt_token_ids=range(1))
    offered = OfferedRequest(0, request, RequestRecord(request_id="0", arrival=0.0, num_prompt_tokens=1))
    for _ in range(100):
        now[0] += 0.03
        collector.on_finish(offered, now[0])
    collector.report()
    times = [each[0] for each in seen[:-1]]
    assert 20 < len(times) <= 30
    assert all(later - earlier >= 0.1 - 1e-9 for earlier, later in pairwise(times))
    assert seen[-1][1:] == (100, 100, pytest.approx(3.0))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_impossible_step_times_are_refused(seconds, pipeline):
    with pytest.raises(ConfigError, match=f" {seconds} s "):
        simulate(make_load([8], [2], [0.0]), make_config(pipeline=pipeline), ShapeTime(lambda shape: seconds))


def test_requests_beyond_the_context_are_refused():
    with pytest.raises(ConfigError, match="256 tokens"):
        simulate(make_load([200], [57], [0.0]), make_config(), linear_time())


def test_a_load_without_arrivals_needs_a_limit():
    with pytest.raises(ConfigError, match="closed loop"):
        simulate(make_load([8], [2]), make_config(), linear_time())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router": "fastest"}, "router 'fastest';"),
        ({"replicas": 0}, "replicas is 0"),
        ({"pipeline": 0}, "num_micro_batches is 0"),
        ({"max_concurrency": 0}, "max_concurrency is 0"),
        ({"host_overhead": -1.0}, "host_overhead_ms is -1000"),
    ],
)
def test_wrong_settings_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_config(**changes)


def test_an_interrupt_keeps_what_had_ended():
    linear = linear_time()

    def step_time(shape):
        if linear.num_predictions == 200:
            raise KeyboardInterrupt
        return linear.step_time(shape)

    result = simulate(random_load(100, rate=50, seed=2), make_config(), ShapeTime(step_time))
    assert not result.is_complete
    assert 0 < len(result.records) < 100
    assert all(np.isfinite(record.end) and record.finish_reason == "length" for record in result.records)


def test_each_request_names_its_tenant():
    clients = Clients(make_load([4, 4], [1, 1], [0.0, 1.0], tenants=("a", None)), make_config())
    assert [clients.send(now).request.tenant for now in (0.0, 1.0)] == ["a", None]
