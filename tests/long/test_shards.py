"""Replicas that do not affect each other give the same result together, one by one and in processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from onbeat.core.errors import ConfigError, OnbeatError
from onbeat.core.slo import SLO
from onbeat.simulator.simulate import simulate
from onbeat.workload.slo_classes import SLOClass
from tests.pure.simulator.loads import (
    ShapeTime,
    StepByStep,
    linear_time,
    make_config,
    make_load,
    random_load,
)

CLASSES = (
    SLOClass(name="fast", slo=SLO(ttft=0.5), share=0.5, tenant="a"),
    SLOClass(name="slow", slo=SLO(), share=0.5),
)


@pytest.mark.parametrize("changes", [{}, {"pipeline": 2}])
def test_processes_change_nothing(changes):
    load = random_load(300, rate=60, seed=3).with_classes(CLASSES, seed=0)
    config = make_config(replicas=5, router="round-robin", seed=7, **changes)
    together = simulate(load, config, linear_time(), observer=StepByStep())
    one_by_one = simulate(load, config, linear_time())
    spread = simulate(load, config, linear_time(), jobs=2)
    assert len(spread.records) == 300
    assert together.records == one_by_one.records == spread.records
    assert together.replicas == one_by_one.replicas == spread.replicas
    assert {record.replica for record in spread.records} == {"0", "1", "2", "3", "4"}
    assert {(record.request_class, record.tenant) for record in spread.records} == {
        ("fast", "a"),
        ("slow", None),
    }


def test_more_replicas_than_requests():
    load = make_load([10, 10], [3, 3], [0.0, 1.0])
    result = simulate(load, make_config(replicas=4, router="round-robin"), linear_time(), jobs=2)
    assert [record.replica for record in result.records] == ["0", "1"]
    assert [each.num_steps for each in result.replicas] == [3, 3, 0, 0]


def test_progress_from_processes_adds_up():
    load = random_load(400, rate=100, seed=1)
    seen = []
    simulate(
        load,
        make_config(replicas=4, router="round-robin"),
        linear_time(),
        jobs=2,
        on_progress=lambda *progress: seen.append(progress),
    )
    assert seen[-1][:2] == (400, 400)
    assert [each[0] for each in seen] == sorted(each[0] for each in seen)


def test_an_error_in_a_process_reaches_the_caller():
    config, model = make_config(replicas=2, router="round-robin"), ShapeTime(lambda shape: float("nan"))
    with pytest.raises(ConfigError, match="predicts nan s"):
        simulate(random_load(20, rate=10, seed=0), config, model, jobs=2)


def test_a_process_that_dies_is_reported():
    config, model = make_config(replicas=2, router="round-robin"), ShapeTime(lambda shape: os._exit(3))
    with pytest.raises(OnbeatError, match="worker process of the simulation died"):
        simulate(random_load(20, rate=10, seed=0), config, model, jobs=2)


def test_an_interrupt_keeps_what_had_ended():
    load = random_load(400, rate=50, seed=2)
    linear, parent, num_predictions = linear_time(), os.getpid(), multiprocessing.Value("q", 0)

    def step_time(shape):
        with num_predictions.get_lock():
            num_predictions.value += 1
            if num_predictions.value == 300:
                os.kill(parent, signal.SIGINT)
        time.sleep(2e-4)
        return linear.step_time(shape)

    result = simulate(load, make_config(replicas=4, router="round-robin"), ShapeTime(step_time), jobs=2)
    assert not result.is_complete
    assert 0 < len(result.records) < 400
    complete = simulate(load, make_config(replicas=4, router="round-robin"), linear).records
    assert all(record == complete[int(record.request_id)] for record in result.records)


def test_an_interrupt_in_one_process_keeps_what_had_ended():
    load = random_load(100, rate=50, seed=2)
    linear = linear_time()

    def step_time(shape):
        if linear.num_predictions == 200:
            raise KeyboardInterrupt
        return linear.step_time(shape)

    result = simulate(load, make_config(), ShapeTime(step_time))
    assert not result.is_complete
    assert 0 < len(result.records) < 100
    assert all(np.isfinite(record.end) and record.finish_reason == "length" for record in result.records)
