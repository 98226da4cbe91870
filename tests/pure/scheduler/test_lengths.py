"""Remaining output tokens by quantile of the history."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.scheduler.replica.tracker import MAX_CLASSES, MIN_SAMPLES, OutputLengths

NO_LIMIT = 10**9


def make_history(lengths, slo_class: str | None = "chat", window: int = 512) -> OutputLengths:
    history = OutputLengths(window)
    for length in lengths:
        history.observe(slo_class, length)
    return history


def test_quantile_of_those_that_were_longer() -> None:
    history = make_history(range(1, 101))
    assert history.remaining("chat", 0, q=0.5, limit=NO_LIMIT) == 51
    assert history.remaining("chat", 0, q=0.9, limit=NO_LIMIT) == 91
    assert history.remaining("chat", 50, q=0.5, limit=NO_LIMIT) == 26
    assert history.remaining("chat", 50, q=0.999, limit=NO_LIMIT) == 50


def test_never_above_the_limit_nor_below_one() -> None:
    history = make_history([500] * 50)
    assert history.remaining("chat", 100, q=0.5, limit=30) == 30
    assert history.remaining("chat", 499, q=0.5, limit=30) == 1
    assert history.remaining("chat", 100, q=0.5, limit=1) == 1
    assert history.remaining("chat", 100, q=0.5, limit=0) == 1


def test_each_class_has_its_own_history_and_a_new_one_that_of_all() -> None:
    history = make_history([1000] * 100)
    for _ in range(100):
        history.observe(None, 10)
    assert history.remaining("chat", 0, q=0.5, limit=NO_LIMIT) == 1000
    assert history.remaining(None, 0, q=0.5, limit=NO_LIMIT) == 10
    assert history.remaining("code", 0, q=0.4, limit=NO_LIMIT) == 10
    assert history.remaining("code", 0, q=0.6, limit=NO_LIMIT) == 1000
    # beyond all of its own class, those of the others that went on that long
    assert history.remaining(None, 10, q=0.5, limit=NO_LIMIT) == 990


def test_the_prior_answers_where_history_is_short() -> None:
    empty = OutputLengths()
    assert empty.remaining("chat", 0, q=0.5, limit=NO_LIMIT) == 213
    assert empty.remaining("chat", 0, q=0.75, limit=NO_LIMIT) == 512
    assert empty.remaining("chat", 488, q=0.75, limit=NO_LIMIT) == 1000
    assert make_history([7] * (MIN_SAMPLES - 1)).remaining("chat", 0, q=0.75, limit=NO_LIMIT) == 512
    assert make_history([7] * MIN_SAMPLES).remaining("chat", 0, q=0.75, limit=NO_LIMIT) == 7
    assert make_history([7] * MIN_SAMPLES).remaining("chat", 7, q=0.75, limit=NO_LIMIT) == 519


def test_old_requests_are_forgotten() -> None:
    history = make_history([1000] * 40 + [10] * 32, window=32)
    assert history.remaining("chat", 0, q=0.99, limit=NO_LIMIT) == 10


def test_classes_beyond_the_limit_share_a_history() -> None:
    history = OutputLengths()
    for index in range(MAX_CLASSES):
        history.observe(str(index), 1)
    for _ in range(100):
        history.observe("one more", 50)
    assert history.remaining("one more", 1, q=0.5, limit=NO_LIMIT) == 49


@given(
    lengths=st.lists(st.integers(1, 200), min_size=MIN_SAMPLES, max_size=120),
    so_far=st.integers(0, 100),
    q=st.floats(0.01, 0.99),
    window=st.integers(MIN_SAMPLES, 64),
)
def test_is_the_empirical_quantile_of_the_window(
    lengths: list[int], so_far: int, q: float, window: int
) -> None:
    longer = sorted(length for length in lengths[-window:] if length > so_far)
    remaining = make_history(lengths, window=window).remaining("chat", so_far, q=q, limit=NO_LIMIT)
    if len(longer) >= MIN_SAMPLES:
        rank = min(math.ceil(q * (len(longer) + 1)), len(longer))
        assert remaining == longer[rank - 1] - so_far
    else:
        assert remaining >= 1


@pytest.mark.parametrize("q", [0.5, 0.9])
def test_a_new_request_is_within_the_quantile_that_often(q: float) -> None:
    rng = random.Random(3)
    history, num_within, num_requests = OutputLengths(128), 0, 20_000
    for count in range(num_requests + 128):
        length = 1 + int(rng.lognormvariate(5.0, 1.0))
        if count >= 128:
            num_within += length <= history.remaining("chat", 0, q=q, limit=NO_LIMIT)
        history.observe("chat", length)
    assert q - 0.01 <= num_within / num_requests <= q + 0.02
