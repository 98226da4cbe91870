"""Steps that take more or less than was predicted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import StepNoise
from tests.pure.simulator.loads import (
    HearsOfRequests,
    ShapeTime,
    StepByStep,
    linear_time,
    make_config,
    make_load,
    random_load,
)


@pytest.mark.parametrize("sigma", [0.05, 0.3])
def test_factors_are_log_normal_with_mean_one(sigma):
    noise = StepNoise(sigma, seed=3, replica=1)
    factors = np.array([noise.factor(step) for step in range(20_000)])
    assert factors.mean() == pytest.approx(1.0, abs=4 * sigma / np.sqrt(20_000))
    logs = np.log(factors)
    assert logs.std() == pytest.approx(sigma, rel=0.03)
    assert np.mean(logs < logs.mean() + sigma) == pytest.approx(0.8413, abs=0.01)
    assert abs(np.corrcoef(logs[1:], logs[:-1])[0, 1]) < 0.03


@given(seed=st.integers(0, 2**63), replica=st.integers(0, 10_000), step=st.integers(0, 2**62))
def test_factors_are_positive_and_depend_on_their_place_alone(seed, replica, step):
    noise = StepNoise(0.2, seed=seed, replica=replica)
    noise.factor(step + 1)
    assert noise.factor(step) == StepNoise(0.2, seed=seed, replica=replica).factor(step) > 0


def test_seeds_and_replicas_differ():
    factors = {
        StepNoise(0.1, seed=seed, replica=replica).factor(7) for seed in range(5) for replica in range(5)
    }
    assert len(factors) == 25


@pytest.mark.parametrize("changes", [{}, {"replicas": 3}, {"pipeline": 2}])
def test_runs_of_steps_equal_single_steps(changes):
    load = random_load(60, rate=40, seed=5)
    config = make_config(step_noise=0.2, seed=11, **changes)
    single = simulate(load, config, linear_time(), observer=StepByStep())
    assert (
        single.records
        == simulate(load, config, linear_time()).records
        == simulate(load, config, linear_time(), observer=HearsOfRequests()).records
    )
    assert single.records != simulate(load, make_config(seed=11, **changes), linear_time()).records
    other_seed = make_config(step_noise=0.2, seed=12, **changes)
    assert single.records != simulate(load, other_seed, linear_time()).records


def test_each_step_has_its_own_factor():
    load = make_load([8], [5], [0.0])
    [record] = simulate(load, make_config(step_noise=0.5, seed=2), ShapeTime(lambda shape: 1.0)).records
    noise = StepNoise(0.5, seed=2, replica=0)
    wanted = np.cumsum([noise.factor(step) for step in range(5)])
    assert list(record.delivery_times) == pytest.approx(wanted.tolist())


@pytest.mark.parametrize("noise", [-0.1, float("nan"), float("inf")])
def test_impossible_noise(noise):
    with pytest.raises(ConfigError, match="step_noise is"):
        make_config(step_noise=noise)
