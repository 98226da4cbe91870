"""Intervals of paired ratios."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.intervals import geometric_mean, mean_interval, ratio_interval
from onbeat.core.errors import ConfigError

positive = st.floats(1e-3, 1e3)


def test_students_interval_of_a_known_sample() -> None:
    found = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    # t(4, 0.975) = 2.7764; standard error sqrt(2.5 / 5)
    assert (found.mean, found.low, found.high) == pytest.approx((3.0, 1.0368, 4.9632), abs=1e-3)


def test_one_value_says_nothing_of_the_spread() -> None:
    found = mean_interval([2.0])
    assert (found.mean, found.low, found.high) == (2.0, -inf, inf)
    ratio = ratio_interval([2.0], [1.0])
    assert (ratio.mean, ratio.low, ratio.high) == (2.0, 0.0, inf)


@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=8))
def test_a_ratio_turned_round_is_its_inverse(pairs: list[tuple[float, float]]) -> None:
    ahead = ratio_interval([a for a, _ in pairs], [b for _, b in pairs])
    back = ratio_interval([b for _, b in pairs], [a for a, _ in pairs])
    assert ahead.low <= ahead.mean * (1 + 1e-9)
    assert ahead.mean * back.mean == pytest.approx(1.0)
    if ahead.high < 1e200 and back.low > 1e-200:
        assert ahead.high * back.low == pytest.approx(1.0)


@given(shared=st.lists(positive, min_size=3, max_size=6), factor=st.floats(0.5, 2.0))
def test_what_pairs_share_cancels(shared: list[float], factor: float) -> None:
    found = ratio_interval([value * factor for value in shared], shared)
    assert found.low == pytest.approx(factor)
    assert found.high == pytest.approx(factor)


def test_the_interval_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    trials = [mean_interval(rng.normal(1.0, 0.3, 5).tolist()) for _ in range(1000)]
    covered = sum(each.low <= 1.0 <= each.high for each in trials)
    assert covered == pytest.approx(950, abs=25)


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0, 2.0]) == pytest.approx(2.0)


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [-1.0]])
def test_refuses_what_has_no_geometric_mean(values: list[float]) -> None:
    with pytest.raises(ConfigError, match="geometric mean"):
        geometric_mean(values)


def test_refuses_pairs_that_are_none() -> None:
    with pytest.raises(ConfigError, match=r"1 values.* 2"):
        ratio_interval([1.0], [1.0, 2.0])
    with pytest.raises(ConfigError, match="above 0"):
        ratio_interval([1.0, 0.0], [1.0, 2.0])
    with pytest.raises(ConfigError, match="least one"):
        mean_interval([])
