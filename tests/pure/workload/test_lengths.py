from __future__ import annotations

import numpy as np
import pytest

from onbeat.workload.arrivals import Lengths, LogNormalLength, UniformLength


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def test_uniform_covers_exactly_its_range() -> None:
    drawn = UniformLength(10, 0.25).draw(5000, rng())

    assert set(drawn.tolist()) == set(range(7, 14))  # floor(7.5) .. ceil(12.5)
    assert drawn.mean() == pytest.approx(10, rel=0.02)


def test_uniform_without_range_is_fixed() -> None:
    assert set(UniformLength(10, 0.0).draw(100, rng()).tolist()) == {10}


def test_lognormal_has_the_asked_mean_and_stays_in_bounds() -> None:
    drawn = LogNormalLength(mean=300, sigma=0.8, low=4, high=5000).draw(50_000, rng())

    assert drawn.mean() == pytest.approx(300, rel=0.03)
    assert np.log(drawn).std() == pytest.approx(0.8, rel=0.03)
    assert drawn.min() >= 4
    assert drawn.max() <= 5000


def test_all_satisfy_the_protocol() -> None:
    kinds: list[Lengths] = [
        UniformLength(4, 0.5),
        LogNormalLength(mean=5, sigma=1),
    ]

    assert all(len(lengths.draw(6, rng())) == 6 for lengths in kinds)
