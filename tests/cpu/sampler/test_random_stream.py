import math
from collections import Counter

import numpy as np
import pytest

from onbeat.engine.draw import locate
from onbeat.engine.random_stream import stream_start, uniform, uniforms


@pytest.mark.parametrize("seeds_vary", [True, False])
def test_uniform_over_consecutive_seeds_and_positions(seeds_vary: bool) -> None:
    num_draws, num_cells = 20_000, 16
    numbers = [uniform(i, 0) if seeds_vary else uniform(0, i) for i in range(num_draws)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    # Pairs of neighbours fill the square evenly: neither the numbers nor their succession is biased.
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    cells = Counter((int(a * num_cells), int(b * num_cells)) for a, b in pairs)
    expected = num_draws / 2 / num_cells**2
    chi_square = sum((cells[i, j] - expected) ** 2 / expected for i in range(16) for j in range(16))
    degrees = num_cells**2 - 1
    assert abs(chi_square - degrees) < 5 * math.sqrt(2 * degrees)


def test_neighbouring_streams_are_uncorrelated() -> None:
    streams = np.array([[uniform(seed, position) for position in range(2000)] for seed in range(8)])
    correlations = np.corrcoef(streams) - np.eye(8)
    assert np.abs(correlations).max() < 5 / math.sqrt(2000)


def test_any_integer_is_a_seed() -> None:
    assert uniform(-1, 3) == uniform(2**64 - 1, 3) != uniform(1, 3)
    assert 0.0 <= uniform(2**200, 10**6) < 1.0


def test_many_seeds_at_once_give_the_numbers_of_each() -> None:
    seeds = [0, 1, -1, 2**64 - 1, 2**200, 12345678901234567890]
    starts = np.array([stream_start(seed) for seed in seeds], np.uint64)
    for position in (0, 1, 77, 2**31, 2**40):
        numbers = uniforms(starts, np.full(len(seeds), position))
        assert numbers.tolist() == [uniform(seed, position) for seed in seeds]


def test_stream_is_pinned() -> None:
    """The same seed gives the same text in every release."""
    assert uniform(0, 0) == PINNED[0]
    assert uniform(1234, 56) == PINNED[1]


PINNED = (0.6524484863740322, 0.8755185207973469)


def test_locate_never_lands_on_weight_zero() -> None:
    cumulative = np.cumsum([0.0, 0.5, 0.0, 0.5, 0.0])
    assert locate(cumulative, 0.0) == 1
    assert locate(cumulative, 0.5) == 3
    assert locate(cumulative, 1.0) == 3
    assert locate(cumulative, 1.5) == 3
