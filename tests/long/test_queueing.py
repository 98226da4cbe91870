"""Simulated waiting times against queueing theory: one server, one prompt a step, one output token."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import brentq

from onbeat.simulator.result import SimulationResult
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import SimulationConfig
from tests.pure.simulator.loads import ShapeTime, make_config, make_load

SEEDS = range(5)


def poisson(num_requests: int, rate: float, seed: int) -> np.ndarray:
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, num_requests))


def server(longest_prompt: int, *, pipeline: int = 1) -> SimulationConfig:
    """One prompt in a step, or in each of its stages."""
    limits = {
        "max_num_seqs": pipeline,
        "max_num_batched_tokens": longest_prompt,
        "max_model_len": longest_prompt + 16,
        "num_blocks": pipeline * (longest_prompt // 16 + 2),
    }
    return make_config(scheduler=limits, pipeline=pipeline)


def mean_ttft(result: SimulationResult) -> float:
    return float(np.mean([record.ttft for record in result.records]))


def equal_prompts(rate: float, *, service: float, num_requests: int, pipeline: int = 1) -> float:
    """Return the mean TTFT of equal prompts that take `service` seconds each, over five seeds."""
    config = server(2, pipeline=pipeline)
    model = ShapeTime(lambda shape: service)
    ones = np.ones(num_requests, dtype=np.int64)
    runs = [
        simulate(make_load(2 * ones, ones, poisson(num_requests, rate, seed)), config, model)
        for seed in SEEDS
    ]
    return float(np.mean([mean_ttft(run) for run in runs]))


def single_device(rate: float, service: float) -> float:
    """M/D/1: mean time from arrival to the end of service."""
    return service + rate * service**2 / (2 * (1 - rate * service))


def inter_op(rate: float, service: float) -> float:
    """Two pipeline stages of half the service time (Zhong et al., DistServe, OSDI 2024, section 3.1)."""
    return service + rate * service**2 / (4 * (2 - rate * service))


def test_mm1_waiting_time():
    """Exponential service times, by way of the prompt's length: its quantile of the distribution."""
    num_requests, rate, num_lengths = 6_000, 0.6, 400
    config = server(num_lengths)
    model = ShapeTime(lambda shape: -np.log(1 - (shape.num_new_tokens - 0.5) / num_lengths).item())
    waits = []
    for seed in SEEDS:
        prompts = np.random.default_rng([seed, 1]).integers(1, num_lengths + 1, num_requests)
        load = make_load(prompts, np.ones(num_requests), poisson(num_requests, rate, seed))
        result = simulate(load, config, model)
        waits.append(np.mean([record.scheduled - record.arrival for record in result.records]))
    assert np.mean(waits) == pytest.approx(rate / (1 - rate), rel=0.08)


@pytest.mark.slow  # with its like
@pytest.mark.parametrize(
    ("formula", "service", "pipeline", "means"),
    [
        (single_device, 1.0, 1, (1.2143, 1.75, 3.0)),
        (inter_op, 1.0, 2, (1.0441, 1.1071, 1.1667)),
        (single_device, 1 / 1.5, 1, (0.75, 0.8889, 1.0476)),
    ],
    ids=["one device", "two pipeline stages", "two devices that share each step, 1.5 times as fast"],
)
def test_equal_prompts(formula, service, pipeline, means):
    for rate, expected, tolerance in zip((0.3, 0.6, 0.8), means, (0.03, 0.03, 0.05), strict=True):
        assert formula(rate, service) == pytest.approx(expected, abs=1e-4)
        mean = equal_prompts(rate, service=service, num_requests=20_000, pipeline=pipeline)
        assert mean == pytest.approx(expected, rel=tolerance)


@pytest.mark.slow  # with its like
def test_two_devices_share_steps_at_low_rates_and_are_stages_at_high_ones():
    """With a speed-up of 1.6 by sharing, the crossing lies within 10 % of that of the formulas.

    Zhong et al., DistServe, OSDI 2024, section 3.1.
    """
    speed_up = 1.6
    crossing = brentq(lambda rate: single_device(rate, 1 / speed_up) - inter_op(rate, 1.0), 0.1, 1.5)
    assert crossing == pytest.approx(1.0949, abs=1e-4)
    for rate, share_is_better in ((0.9 * crossing, True), (1.1 * crossing, False)):
        shared = equal_prompts(rate, service=1 / speed_up, num_requests=2_000)
        stages = equal_prompts(rate, service=1.0, num_requests=2_000, pipeline=2)
        assert (shared < stages) is share_is_better


def test_littles_law():
    """Requests in the system, seen at any time, are on average rate x mean time in it."""
    rng = np.random.default_rng(5)
    num_requests = 2_000
    load = make_load(
        rng.integers(1, 200, num_requests), rng.integers(1, 50, num_requests), poisson(num_requests, 20, 5)
    )
    result = simulate(load, make_config(), ShapeTime(lambda shape: 2e-3 + 1e-5 * shape.num_new_tokens))
    arrivals = np.array([record.arrival for record in result.records])
    ends = np.array([record.end for record in result.records])
    instants = np.linspace(0, result.duration, 20_001)
    num_inside = np.searchsorted(arrivals, instants, "right") - np.searchsorted(
        np.sort(ends), instants, "right"
    )
    rate = num_requests / result.duration
    assert np.mean(num_inside) == pytest.approx(rate * np.mean(ends - arrivals), rel=0.01)
