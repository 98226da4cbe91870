from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from onbeat.core.errors import ConfigError
from onbeat.workload.arrivals import (
    RateStep,
    constant_arrivals,
    gamma_arrivals,
    replay_arrivals,
    step_arrivals,
)


def gaps_of(offsets: np.ndarray) -> np.ndarray:
    return np.diff(offsets, prepend=0.0)


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_asked_mean_and_spread(burstiness: float) -> None:
    gaps = gaps_of(gamma_arrivals(20_000, rate=5.0, burstiness=burstiness, rng=rng()))

    assert gaps.mean() == pytest.approx(0.2, rel=1e-9)  # exact, because the sequence is rescaled
    assert gaps.std() / gaps.mean() == pytest.approx(1 / np.sqrt(burstiness), rel=0.05)


def test_the_usual_burstiness_is_that_of_poisson() -> None:
    np.testing.assert_array_equal(
        gamma_arrivals(50, rate=3.0, rng=rng()), gamma_arrivals(50, rate=3.0, burstiness=1.0, rng=rng())
    )


def test_the_last_arrival_falls_at_n_over_rate() -> None:
    assert gamma_arrivals(7, rate=2.0, burstiness=0.5, rng=rng())[-1] == pytest.approx(3.5)
    assert constant_arrivals(7, rate=2.0)[-1] == pytest.approx(3.5)


def test_constant_gaps_are_equal() -> None:
    np.testing.assert_allclose(gaps_of(constant_arrivals(10, rate=4.0)), 0.25)


def test_replay_starts_at_zero_and_scales_the_rate() -> None:
    np.testing.assert_allclose(replay_arrivals([12.0, 10.0, 16.0], rate_scale=2.0), [0.0, 1.0, 3.0])


def test_equal_seeds_give_equal_arrivals() -> None:
    np.testing.assert_array_equal(
        gamma_arrivals(9, rate=1.0, rng=rng()), gamma_arrivals(9, rate=1.0, rng=rng())
    )


def test_steps_have_their_rates_and_repeat() -> None:
    steps = (RateStep(2.0, 100.0), RateStep(0.0, 50.0), RateStep(20.0, 100.0))
    offsets = step_arrivals(22_000, steps=steps, burstiness=1.0, rng=rng())
    cycle, phase = np.divmod(offsets, 250.0)

    assert (np.diff(offsets) >= 0).all()
    assert cycle.max() == pytest.approx(10, abs=1)
    whole = phase[cycle < 9]
    assert (whole < 100.0).sum() / 9 == pytest.approx(200, rel=0.06)
    assert ((whole > 100.0) & (whole < 150.0)).sum() == 0
    assert (whole >= 150.0).sum() / 9 == pytest.approx(2000, rel=0.02)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RateStep(-1.0, 5.0),
        lambda: RateStep(1.0, 0.0),
        lambda: step_arrivals(5, steps=[RateStep(0.0, 5.0)], burstiness=1.0, rng=rng()),
    ],
)
def test_bad_shapes_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()
