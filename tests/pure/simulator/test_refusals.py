"""Requests that a replica rejects, or ends in the queue: none disappears, and clients go on."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError, SLOUnattainable
from onbeat.core.slo import SLO, Fate, ShedMode
from onbeat.metrics.attainment import good_requests
from onbeat.scheduler.cluster.routers import ROUTERS
from onbeat.scheduler.replica import scheduler as scheduler_module
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.simulator import simulation_config
from onbeat.simulator.simulate import simulate
from onbeat.workload.slo_classes import SLOClass
from tests.examples import examples
from tests.pure.simulator.loads import ShapeTime, StepByStep, linear_time, make_config, make_load, random_load
from tests.pure.simulator.shedding import PATIENCE, SheddingScheduler

pytestmark = pytest.mark.usefixtures("comparators")

CLASSES = (
    SLOClass(name="fast", slo=SLO(ttft=0.3, tbt=0.1), share=0.5, weight=2.0),
    SLOClass(name="slow", slo=SLO(ttft=1.0), share=0.5),
)


@pytest.fixture
def shedding(monkeypatch):
    monkeypatch.setattr(simulation_config, "Scheduler", SheddingScheduler)


def outcomes(result) -> Counter[str]:
    return Counter(record.finish_reason for record in result.records)


class TestHardCaps:
    def test_by_hand(self):
        """One runs, one waits, and the third finds the queue full."""
        load = make_load([8, 8, 8], [4, 4, 4], [0.0, 0.5, 0.6])
        config = make_config(scheduler={"max_num_seqs": 1, "max_num_queued_reqs": 1})
        result = simulate(load, config, ShapeTime(lambda shape: 1.0))
        assert [record.finish_reason for record in result.records] == ["length", "length", "rejected"]
        refused = result.records[2]
        assert refused.is_rejected
        assert not refused.is_completed
        assert refused.arrival == refused.end == 0.6
        assert refused.scheduled is refused.ttft is refused.predicted_wait is None
        assert refused.replica == "0"
        assert (result.num_completed, result.num_rejected) == (2, 1)
        assert result.duration == 8.0

    @pytest.mark.parametrize(("replicas", "num_refused"), [(1, 4), (2, 0)])
    def test_a_burst_fills_the_free_places_and_the_queue(self, replicas: int, num_refused: int):
        load = make_load([8] * 9, [4] * 9, [0.0] * 9)
        config = make_config(scheduler={"max_num_seqs": 4, "max_num_queued_reqs": 1}, replicas=replicas)
        assert simulate(load, config, ShapeTime(lambda shape: 1.0)).num_rejected == num_refused

    def test_a_text_of_the_whole_context_is_embedded(self):
        load = make_load([64, 65, 64], [0, 0, 1], [0.0, 10.0, 20.0])
        config = make_config(scheduler={"max_model_len": 64, "num_blocks": 4}, replicas=2)
        with pytest.raises(ConfigError, match=r"2 of.*3.*64 tokens"):
            simulate(load, config, ShapeTime(lambda shape: 1.0))
        result = simulate(load.take(np.array([0])), config, ShapeTime(lambda shape: 1.0))
        assert (result.num_completed, result.num_rejected) == (1, 0)

    def test_a_closed_loop_goes_on(self):
        load = make_load([8] * 20, [3] * 20)
        config = make_config(
            scheduler={"max_num_seqs": 1, "max_num_queued_reqs": 1}, max_concurrency=3, router="round-robin"
        )
        result = simulate(load, config, ShapeTime(lambda shape: 1.0))
        assert result.num_completed + result.num_rejected == 20
        assert result.num_rejected > 0

    @given(
        router=st.sampled_from([*ROUTERS, "freeness"]),
        num_replicas=st.integers(1, 3),
        pipeline=st.integers(1, 2),
        max_requests=st.sampled_from([None, 1, 4]),
        max_tokens=st.sampled_from([None, 50, 200]),
        concurrency=st.sampled_from([None, 6]),
        seed=st.integers(0, 1000),
        noise=st.sampled_from([0.0, 0.3]),
    )
    # A report of what is predicted, in the middle of steps that are taken at once.
    @example(
        router="slo",
        num_replicas=2,
        pipeline=1,
        max_requests=None,
        max_tokens=None,
        concurrency=6,
        seed=0,
        noise=0.3,
    )
    @examples(40)
    def test_all_that_was_offered_is_accounted_for(
        self, router, num_replicas, pipeline, max_requests, max_tokens, concurrency, seed, noise
    ):
        load = random_load(60, rate=150, seed=seed).with_classes(CLASSES, seed=seed)
        config = make_config(
            scheduler={
                "max_num_seqs": 4,
                "max_num_queued_reqs": max_requests,
                "max_num_queued_tokens": max_tokens,
            },
            router=router,
            replicas=num_replicas,
            pipeline=pipeline,
            max_concurrency=concurrency,
            step_noise=noise,
        )
        observer = StepByStep()
        result = simulate(load, config, linear_time(), observer=observer)
        assert [record.request_id for record in result.records] == [str(row) for row in range(60)]
        assert outcomes(result) == {
            reason: count
            for reason, count in (("length", result.num_completed), ("rejected", result.num_rejected))
            if count
        }
        assert len(observer.requests) == len(observer.finished) == 60
        assert sum(each.num_leaked_blocks for each in result.replicas) == 0
        assert simulate(load, config, linear_time()).records == result.records


@pytest.mark.usefixtures("shedding")
class TestShedding:
    @pytest.mark.parametrize("changes", [{}, {"pipeline": 2}, {"replicas": 3, "router": "least-outstanding"}])
    @pytest.mark.parametrize("concurrency", [None, 30])
    def test_all_that_was_offered_is_accounted_for(self, changes, concurrency):
        load = random_load(300, rate=300, seed=1).with_classes(CLASSES, seed=1)
        config = make_config(
            scheduler={"max_num_seqs": 2}, shed=ShedMode.REJECT, max_concurrency=concurrency, **changes
        )
        result = simulate(load, config, ShapeTime(lambda shape: 0.1))
        assert len(result.records) == 300
        assert outcomes(result)["length"] == result.num_completed
        assert outcomes(result)["rejected"] == result.num_rejected
        assert outcomes(result).keys() == {"length", "rejected", "expired"}
        assert min(outcomes(result).values()) > 0
        good = good_requests(result.records)
        for record, is_good in zip(result.records, good, strict=True):
            assert record.is_completed or not is_good
            if record.is_rejected:
                assert record.predicted_ttft == record.predicted_wait >= PATIENCE
                assert record.end == record.arrival
            elif record.finish_reason == "expired":
                assert record.predicted_ttft == 0.25
                assert record.end > record.arrival + record.slo.ttft
                assert record.scheduled is None
                assert not record.delivery_times
            else:
                assert record.predicted_ttft in (0.125, None)  # None: a single token
                assert record.predicted_wait is None
                assert (record.fate is Fate.RELEGATED) == (int(record.request_id) % 2 == 1)
        assert any(record.fate is Fate.RELEGATED for record in result.records)

    def test_an_observer_changes_nothing(self):
        load = random_load(300, rate=300, seed=1).with_classes(CLASSES, seed=1)
        config = make_config(scheduler={"max_num_seqs": 2}, shed=ShedMode.REJECT, replicas=3)
        model = ShapeTime(lambda shape: 0.1)
        watched = simulate(load, config, model, observer=StepByStep())
        alone = simulate(load, config, model)
        assert watched.records == alone.records
        assert len(outcomes(alone)) == 3

    def test_with_shedding_off_all_are_served(self):
        load = random_load(100, rate=300, seed=1).with_classes(CLASSES, seed=1)
        config = make_config(scheduler={"max_num_seqs": 2}, shed=ShedMode.OFF)
        assert outcomes(simulate(load, config, ShapeTime(lambda shape: 0.1))) == {"length": 100}


def test_requests_carry_their_objectives(monkeypatch):
    added = []

    class Listening(Scheduler):
        def add(self, request, now=None):
            added.append(request)
            super().add(request, now)

    monkeypatch.setattr(simulation_config, "Scheduler", Listening)
    load = random_load(40, rate=20, seed=0).with_classes(CLASSES, seed=0)
    simulate(load, make_config(shed=ShedMode.REJECT), linear_time())
    assert {(request.slo_class, request.slo, request.weight, request.shed) for request in added} == {
        ("fast", CLASSES[0].slo, 2.0, ShedMode.REJECT),
        ("slow", CLASSES[1].slo, 1.0, ShedMode.REJECT),
    }
    added.clear()
    simulate(random_load(3, rate=20, seed=0), make_config(shed=ShedMode.OFF), linear_time())
    assert {(request.slo_class, request.slo, request.weight, request.shed) for request in added} == {
        (None, None, 1.0, ShedMode.OFF)
    }


def test_a_router_forgets_the_work_of_requests_that_were_refused(monkeypatch):
    """With the work of the first still counted, those that refused it would hardly be asked again."""

    class Refusing(Scheduler):
        def add(self, request, now=None):
            raise SLOUnattainable("never", predicted_ttft=9.0)

    monkeypatch.setattr(simulation_config, "Scheduler", Refusing)
    load = make_load([200, *[10] * 5], [10] * 6, [float(second) for second in range(6)])
    config = make_config(router="least-outstanding", replicas=3)
    records = simulate(load, config, linear_time()).records
    assert [record.replica for record in records] == ["1", "0", "2"] * 2  # the second that each has tried


def test_the_schedulers_of_replicas_are_the_live_ones():
    assert simulation_config.Scheduler is scheduler_module.Scheduler
    config = replace(make_config().scheduler, max_num_queued_reqs=3)
    assert type(simulation_config.make_scheduler(config, linear_time())) is Scheduler
