"""The integer program of the cheapest mix: a published example, proven optima, and what must always hold."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.planner.mix_search import MixProblem, lower_bound, solve_mix
from tests.examples import examples


def problem_of(rates: Any, costs: Any, demand: Any, **fields: Any) -> MixProblem:
    """Return a problem from (units, buckets) requests/s of a unit and requests/s of each bucket."""
    with np.errstate(divide="ignore"):
        loads = np.asarray(demand, dtype=float)[:, None] / np.asarray(rates, dtype=float).T
    return MixProblem(costs=tuple(costs), loads=loads, **fields)


def melange(**fields: Any) -> MixProblem:
    """Return the example of Mélange's own code: an A10G and an A100, 30 requests/s in four buckets."""
    rates = [[2, 1, 5, 2], [20, 20, 40, 20]]
    return problem_of(rates, (1.01, 3.67), 30 * np.array([0.2, 0.1, 0.5, 0.2]), slices=1, **fields)


def cost_of(problem: MixProblem, counts: Sequence[int]) -> float:
    return float(np.dot(problem.costs, counts))


def test_the_example_of_melange() -> None:
    mix = solve_mix(melange())
    assert mix is not None
    assert mix == (3, 1)
    assert cost_of(melange(), mix) == pytest.approx(6.70)


@pytest.mark.parametrize(("unit", "count", "cost"), [(0, 12, 12.12), (1, 2, 7.34)])
def test_the_example_of_melange_with_one_type(unit: int, count: int, cost: float) -> None:
    other = ("a10g", "a100")[1 - unit]
    mix = solve_mix(melange(types=("a10g", "a100"), devices=(1, 1), available=((other, 0),)))
    assert mix is not None
    assert mix[unit] == count
    assert cost_of(melange(), mix) == pytest.approx(cost)


def test_cuts_leave_out_mixes_and_all_that_are_no_better() -> None:
    cheapest = solve_mix(melange(), too_small=[(3, 1)])
    assert cheapest is not None
    assert cost_of(melange(), cheapest) == pytest.approx(7.34)
    assert cheapest == (0, 2)
    assert solve_mix(melange(), too_small=[(3, 1)], below=7.34) is None


def test_a_load_that_nothing_serves_has_no_mix() -> None:
    assert solve_mix(problem_of([[0.0, 1.0]], (1.0,), (1.0, 1.0))) is None
    assert (
        solve_mix(problem_of([[1.0]], (1.0,), (9.0,), types=("l4",), devices=(2,), available=(("l4", 17),)))
        is None
    )


def test_next_to_no_load_takes_a_replica() -> None:
    problem = problem_of([[1.0], [2.0]], (3.0, 2.0), (1e-9,))
    mix = solve_mix(problem)
    assert mix is not None
    assert mix == (0, 1)
    assert lower_bound(problem) == pytest.approx(2.0)


def test_480_slices_on_four_types_take_a_moment() -> None:
    random = np.random.default_rng(0)
    sizes = np.outer(np.geomspace(1, 12, 10), np.geomspace(1, 6, 6)).ravel()
    rates = [speed / sizes * random.uniform(0.8, 1.2, 60) for speed in (4, 6, 28, 60)]
    problem = problem_of(rates, (0.70, 1.01, 3.67, 7.516), 32 * random.dirichlet(np.ones(60)))
    started = time.process_time()
    mix = solve_mix(problem, time_limit=100)
    assert time.process_time() - started < 10
    assert mix is not None
    assert cost_of(problem, mix) >= lower_bound(problem) - 1e-6


tables = st.integers(0, 2**32 - 1)


@examples(60)
@given(tables)
def test_a_mix_costs_no_more_than_one_type_and_no_less_than_the_bound(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_units, num_buckets = int(random.integers(1, 4)), int(random.integers(1, 5))
    rates = random.uniform(0.3, 6.0, (num_units, num_buckets))
    rates[random.random(rates.shape) < 0.1] = 0.0
    costs = random.uniform(0.5, 8.0, num_units)
    demand = random.uniform(0.1, 3.0, num_buckets)
    whole, sliced = (problem_of(rates, costs, demand, slices=slices) for slices in (1, 8))
    mix, coarse = solve_mix(sliced), solve_mix(whole)
    assert (mix is None) == (coarse is None) == (not (rates > 0).any(axis=0).all())
    if mix is None or coarse is None:
        return
    cost = cost_of(sliced, mix)
    assert cost <= cost_of(whole, coarse) + 1e-6
    assert cost >= lower_bound(sliced) - 1e-6
    with np.errstate(divide="ignore"):
        alone = costs * np.ceil((demand / rates).sum(axis=1) - 1e-9)
    assert cost <= alone.min() + 1e-6
