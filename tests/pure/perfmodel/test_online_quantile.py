"""Quantiles of the newest ratios."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.perfmodel.recent import OnlineQuantile


def observe_all(quantile: OnlineQuantile, ratios) -> OnlineQuantile:
    for ratio in ratios:
        quantile.observe(ratio)
    return quantile


def test_says_nothing_before_it_has_seen_enough():
    quantile = OnlineQuantile(ready_after=10)
    assert observe_all(quantile, [1.0] * 9).factor(0.5) is None
    assert observe_all(quantile, [1.0]).factor(0.5) == 1.0


@given(st.lists(st.floats(0.1, 10.0), min_size=8, max_size=8), st.floats(0.0, 1.0))
def test_is_one_of_the_ratios_with_about_so_many_below(ratios, q):
    quantile = observe_all(OnlineQuantile(window=8, ready_after=8), ratios)
    factor = quantile.factor(q)
    assert factor in ratios
    assert sum(ratio <= factor for ratio in ratios) >= q * len(ratios)
    assert sum(ratio < factor for ratio in ratios) <= q * len(ratios)


@given(st.lists(st.lists(st.floats(0.1, 10.0), max_size=90), max_size=8))
def test_many_at_once_are_as_one_after_the_other(runs):
    together, alone = OnlineQuantile(window=40, ready_after=10), OnlineQuantile(window=40, ready_after=10)
    for ratios in runs:
        together.observe_all(ratios)
        observe_all(alone, ratios)
        assert [together.factor(q) for q in (0.1, 0.5, 0.9)] == [alone.factor(q) for q in (0.1, 0.5, 0.9)]


@given(st.lists(st.floats(0.1, 10.0), min_size=10, max_size=200))
def test_the_window_is_that_of_the_last_look(ratios):
    """After 10 ratios, and then after every 32."""
    quantile = observe_all(OnlineQuantile(window=40, ready_after=10), ratios)
    num_seen = 10 + (len(ratios) - 10) // 32 * 32
    assert quantile.factor(0.0) == min(ratios[max(0, num_seen - 40) : num_seen])
    assert quantile.factor(1.0) == max(ratios[max(0, num_seen - 40) : num_seen])


@given(st.lists(st.floats(0.1, 10.0), min_size=64, max_size=200))
def test_a_higher_quantile_is_no_smaller(ratios):
    quantile = observe_all(OnlineQuantile(), ratios)
    factors = [quantile.factor(q) for q in (0.0, 0.1, 0.5, 0.9, 0.95, 1.0)]
    assert factors == sorted(factors)


def test_finds_the_quantiles_of_a_known_spread():
    rng = random.Random(1)
    quantile = observe_all(OnlineQuantile(window=4096), (rng.uniform(0.5, 1.5) for _ in range(4096)))
    for q in (0.05, 0.5, 0.95):
        assert quantile.factor(q) == pytest.approx(0.5 + q, abs=0.03)


def test_exact_predictions_have_quantiles_of_one():
    quantile = observe_all(OnlineQuantile(), [1.0] * 64)
    assert [quantile.factor(q) for q in (0.01, 0.5, 0.99)] == [1.0, 1.0, 1.0]


def test_what_lies_beyond_the_window_is_forgotten():
    quantile = observe_all(OnlineQuantile(window=64, ready_after=8), [5.0] * 64)
    assert quantile.factor(0.5) == 5.0
    observe_all(quantile, [1.0] * 128)
    assert quantile.factor(0.99) == 1.0


def test_who_asks_late_hears_of_the_last_look():
    quantile = observe_all(OnlineQuantile(ready_after=10), [1.0] * 10)
    observe_all(quantile, [9.0] * 31)
    assert quantile.factor(1.0) == 1.0
    assert observe_all(quantile, [9.0]).factor(1.0) == 9.0


def test_what_it_forgets_does_not_come_back():
    quantile = observe_all(OnlineQuantile(ready_after=10), [20.0] * 300)
    assert quantile.factor(0.5) == 20.0
    quantile.forget()
    assert quantile.factor(0.5) is None
    assert observe_all(quantile, [1.0] * 9).factor(0.5) is None
    assert observe_all(quantile, [1.0]).factor(1.0) == 1.0
