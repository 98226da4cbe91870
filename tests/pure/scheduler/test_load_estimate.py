"""Arrival rate and service time, against arrivals that are drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.scheduler.replica.slo.load_estimate import LoadEstimate

SERVICE_TIMES = {
    "constant": lambda rng, n: np.full(n, 1.0),
    "exponential": lambda rng, n: rng.exponential(size=n),
    "gamma, twice as variable": lambda rng, n: rng.gamma(0.25, 4.0, size=n),
}


@pytest.mark.parametrize("utilisation", [0.3, 0.7])
@pytest.mark.parametrize("name", SERVICE_TIMES)
def test_estimates_are_those_that_arrivals_were_drawn_with(name: str, utilisation: float) -> None:
    rng = np.random.default_rng(1)
    num_requests = 20_000
    services = SERVICE_TIMES[name](rng, num_requests)
    arrivals = np.cumsum(rng.exponential(1 / utilisation, size=num_requests))
    estimate = LoadEstimate(time_constant=10_000.0)
    for now, service in zip(arrivals.tolist(), services.tolist(), strict=True):
        estimate.on_arrival(now, service)
    now = float(arrivals[-1])
    assert estimate.arrival_rate(now) == pytest.approx(utilisation, rel=0.03)
    assert estimate.mean_service == pytest.approx(1.0, rel=0.03)
    assert estimate.utilisation(now) == pytest.approx(utilisation, rel=0.04)


@pytest.mark.parametrize("watched", [5.0, 30.0, 300.0])
def test_the_rate_has_no_bias_however_short_the_watch(watched: float) -> None:
    rng = np.random.default_rng(2)
    rates = []
    for _ in range(1_000):
        estimate = LoadEstimate(time_constant=30.0)
        arrivals = np.cumsum(rng.exponential(0.5, size=1_000))
        arrivals -= arrivals[0]
        for now in arrivals[arrivals <= watched].tolist():
            estimate.on_arrival(now, 1.0)
        rates.append(estimate.arrival_rate(watched))
    assert np.mean(rates) == pytest.approx(2.0, rel=0.04)


def test_the_rate_falls_while_nobody_comes_and_the_service_time_stays() -> None:
    estimate = LoadEstimate(time_constant=10.0)
    for second in range(100):
        estimate.on_arrival(float(second), 0.5)
    rate = estimate.arrival_rate(99.0)
    assert estimate.arrival_rate(109.0) == pytest.approx(rate / math.e, rel=1e-3)
    assert estimate.arrival_rate(1e6) == pytest.approx(0.0, abs=1e-12)
    assert estimate.mean_service == pytest.approx(0.5)


def test_follows_a_change_of_the_load() -> None:
    estimate = LoadEstimate(time_constant=10.0)
    for second in range(100):
        estimate.on_arrival(float(second), 0.1)
    for tick in range(1000):
        estimate.on_arrival(100 + tick * 0.1, 0.3)
    assert estimate.arrival_rate(200.0) == pytest.approx(10.0, rel=0.01)
    assert estimate.mean_service == pytest.approx(0.3, rel=0.01)


def test_knows_nothing_before_the_second_arrival() -> None:
    estimate = LoadEstimate()
    assert (estimate.arrival_rate(5.0), estimate.mean_service) == (0.0, 0.0)
    estimate.on_arrival(5.0, 2.0)
    assert (estimate.arrival_rate(5.0), estimate.mean_service) == (0.0, 2.0)


def test_a_burst_at_the_very_start_counts_over_a_tenth_of_the_time_constant() -> None:
    estimate = LoadEstimate(time_constant=30.0)
    for _ in range(31):
        estimate.on_arrival(0.0, 1.0)
    assert estimate.arrival_rate(0.0) == pytest.approx(10.0, rel=0.06)


@given(
    arrivals=st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 100)), max_size=30),
    later=st.floats(0, 1e6),
)
def test_estimates_are_finite_and_lie_within_what_was_seen(
    arrivals: list[tuple[float, float]], later: float
) -> None:
    estimate = LoadEstimate()
    for now, service in arrivals:
        estimate.on_arrival(now, service)
    now = max((each[0] for each in arrivals), default=0.0) + later
    assert 0 <= estimate.arrival_rate(now) < math.inf
    if arrivals:
        services = [service for _, service in arrivals]
        assert min(services) - 1e-9 <= estimate.mean_service <= max(services) + 1e-9
    assert estimate.utilisation(now) == estimate.arrival_rate(now) * estimate.mean_service


@pytest.mark.parametrize("time_constant", [0.0, -1.0, math.inf, math.nan])
def test_refuses_a_time_constant_that_is_none(time_constant: float) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        LoadEstimate(time_constant)
