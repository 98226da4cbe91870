"""A minute of three times what a replica can do: nobody who is taken waits for much longer than the bound."""

from __future__ import annotations

import numpy as np
import pytest

from onbeat.core.slo import DEFAULT_QUEUE_SECONDS, SLO, ShedMode
from onbeat.metrics.attainment import good_requests
from onbeat.simulator.result import SimulationResult
from onbeat.simulator.simulate import simulate
from onbeat.workload.slo_classes import SLOClass
from tests.pure.simulator.loads import ShapeTime, make_config, make_load

OBJECTIVES = SLO(ttft=1.0, tbt=0.2)
SECONDS = 60.0


def overload(
    slo: SLO | None,
    bound: float | None,
    *,
    rate: float = 25.0,
    seconds: float = SECONDS,
    num_prompt: int = 4000,
    num_output: int = 10,
    step_seconds: float = 5e-3,
) -> SimulationResult:
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
    prompts = rng.integers(num_prompt // 2, num_prompt * 3 // 2, len(arrivals))
    load = make_load(prompts, np.full(len(arrivals), num_output), arrivals)
    if slo is not None:
        load = load.with_classes([SLOClass(name="all", slo=slo)], seed=0)
    config = make_config(
        "slo",
        scheduler={
            "num_blocks": 8192,
            "max_model_len": 8192,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 8192,
            "max_queue_seconds": bound,
        },
        shed=ShedMode.RELEGATE,
    )
    return simulate(load, config, ShapeTime(lambda shape: step_seconds + 2.7e-5 * shape.num_new_tokens))


def longest_wait(result: SimulationResult) -> float:
    return max(record.scheduled - record.arrival for record in result.records if record.scheduled is not None)


def num_good(result: SimulationResult) -> int:
    return int(good_requests(result.records, mode="stream").sum())


def test_without_a_bound_the_wait_grows_with_the_overload():
    assert longest_wait(overload(None, None)) > 1.7 * DEFAULT_QUEUE_SECONDS


@pytest.mark.parametrize(
    "load",
    [{"num_prompt": 4000}, {"num_prompt": 200, "num_output": 50, "rate": 18.0, "step_seconds": 0.05}],
    ids=["bound by prompts", "bound by slots"],
)
def test_without_objectives_the_longest_wait_is_the_bound(load):
    free, result = overload(None, None, **load), overload(None, DEFAULT_QUEUE_SECONDS, **load)
    assert longest_wait(free) > 1.5 * DEFAULT_QUEUE_SECONDS
    assert 0.9 * DEFAULT_QUEUE_SECONDS < longest_wait(result) < 1.2 * DEFAULT_QUEUE_SECONDS
    assert result.num_rejected > 0
    assert result.num_completed + result.num_rejected == result.num_requests
    refused = [record for record in result.records if record.is_rejected]
    assert min(record.arrival for record in refused) > 20.0, "none while the queue is short"


def test_with_objectives_goodput_is_kept():
    free, result = overload(OBJECTIVES, None), overload(OBJECTIVES, DEFAULT_QUEUE_SECONDS)
    assert longest_wait(free) > 1.7 * DEFAULT_QUEUE_SECONDS
    assert longest_wait(result) < 1.5 * DEFAULT_QUEUE_SECONDS + OBJECTIVES.ttft + 1.0
    assert num_good(result) >= 0.99 * num_good(free) > 200
    assert result.duration < 0.7 * free.duration


def test_an_overload_without_end_does_not_stretch_the_wait():
    result = overload(OBJECTIVES, 20.0, seconds=80.0)
    assert longest_wait(result) < 1.5 * 20.0 + OBJECTIVES.ttft + 1.0
    waits = [record.end - record.arrival for record in result.records if record.finish_reason == "expired"]
    assert max(waits) < 1.5 * 20.0 + OBJECTIVES.ttft + 1.0
    assert num_good(result) >= 0.99 * num_good(overload(OBJECTIVES, None, seconds=80.0))


@pytest.mark.parametrize("slo", [None, OBJECTIVES], ids=["no objective", "objective"])
def test_below_capacity_nobody_is_refused(slo):
    result = overload(slo, DEFAULT_QUEUE_SECONDS, rate=7.0)
    assert result.num_completed == result.num_requests
