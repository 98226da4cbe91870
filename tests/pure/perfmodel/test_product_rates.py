"""Rates of matrix products by their rows, and the steps that are predicted with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.step import BatchShape
from onbeat.perfmodel.device_spec import (
    ROW_COUNTS,
    DeviceSpec,
    Parallelism,
    ProductRates,
    best_rates,
    cpu_device,
    product_rates,
    row_costs,
)
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.models import StepTimeDescription, description_from_json
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.predictor import Predictor
from onbeat.perfmodel.shapes import shape_matrix
from tests.pure.perfmodel.shapes import batch, decodes
from tests.pure.perfmodel.targets import make_roofline, roofline_seconds

MODEL = find_model_spec("SmolLM2-135M")
SLOW, FAST = 2e11, 1.6e12
BANDWIDTH = 4e11  # of a machine whose arithmetic decides at every number of rows


def tiled_seconds(rows: float, flops_per_row: float = 1.0) -> float:
    """Return the time of an engine with quick tiles of 16 rows, full or not, and slow vectors of one row.

    It takes what is quicker, so that from few rows to 16 its rate jumps by eight.
    """
    return flops_per_row * min(rows / SLOW, max(rows, 16.0) / FAST)


def measured(flops_per_row: float = 1e7, disturbed: tuple[int, ...] = ()) -> ProductRates:
    seconds = {rows: tiled_seconds(rows, flops_per_row) for rows in ROW_COUNTS}
    seconds |= {rows: 50 * seconds[rows] for rows in disturbed}
    return product_rates(seconds, flops_per_row=flops_per_row, reading_seconds=0.0, peak=FAST)


def device(rates: ProductRates = (), peak: float = FAST) -> DeviceSpec:
    return cpu_device(
        memory_bandwidth=BANDWIDTH,
        peak_flops=peak,
        memory_bytes=1e10,
        product_rates=rates,
        architecture="cpu-native",
    )


def true_seconds(shape: BatchShape) -> float:
    """Return what the engine takes: the roofline's own parts with the true time of this many rows."""
    rows = shape.num_new_tokens
    rate = rows / tiled_seconds(rows)
    exact = device(tuple((n, n / tiled_seconds(n)) for n in range(1, 2049)))
    assert row_costs(exact.product_rates, FAST)[rows] == pytest.approx(rows * FAST / rate)
    return make_roofline(MODEL, exact)(shape)


STEPS = [decodes(n, 256) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)] + [
    batch([(0, n)]) for n in (64, 100, 200, 512, 900, 1500)
]


def errors(predict: Callable[[BatchShape], float]) -> list[float]:
    return [abs(predict(shape) / true_seconds(shape) - 1) for shape in STEPS]


def test_the_curve_follows_a_rate_that_jumps_where_no_single_one_can() -> None:
    assert max(errors(make_roofline(MODEL, device(measured())))) <= 0.10
    of_few = make_roofline(MODEL, device(peak=SLOW))
    assert max(errors(of_few)) > 1.0
    between = make_roofline(MODEL, device(peak=(SLOW * FAST) ** 0.5))
    assert max(errors(between)) > 0.5


@pytest.mark.parametrize("disturbed", [(1,), (8,), (64,), (1, 2, 4, 8), (4, 512)])
def test_a_disturbed_measurement_is_set_right_by_the_others(disturbed: tuple[int, ...]) -> None:
    predict = make_roofline(MODEL, device(measured(disturbed=disturbed)))
    clean = make_roofline(MODEL, device(measured()))
    assert max(abs(predict(shape) / clean(shape) - 1) for shape in STEPS[5:]) <= 1.0
    assert predict(decodes(64, 10)) <= 2.1 * clean(decodes(64, 10))


times = st.lists(st.floats(1e-6, 1.0), min_size=len(ROW_COUNTS), max_size=len(ROW_COUNTS))


@given(times, st.floats(0.0, 0.1))
def test_more_rows_never_take_less_time(seconds: list[float], reading: float) -> None:
    by_rows = dict(zip(ROW_COUNTS, seconds, strict=True))
    peak = max(rows * 1e6 / value for rows, value in by_rows.items())
    rates = product_rates(by_rows, flops_per_row=1e6, reading_seconds=reading, peak=peak)
    costs = np.asarray(row_costs(rates, peak))
    assert len(costs) == ROW_COUNTS[-1] + 1
    assert (np.diff(costs) >= -1e-9 * costs[1:]).all()
    assert (costs >= np.arange(len(costs)) * (1 - 1e-9)).all(), "no rate is above the peak"


def test_the_longest_chunk_within_a_budget_is_exact() -> None:
    predictor = Predictor(make_roofline(MODEL, device(measured())))
    for shape in (BatchShape(), decodes(3, 50), decodes(14, 50)):
        for budget in (0.002, 0.005, 0.02, 0.3):
            longest = predictor.max_chunk_tokens(shape, 0, budget)

            def seconds(num_tokens: int, shape: BatchShape = shape) -> float:
                longer = shape.copy()
                longer.add(0, num_tokens, samples=True)
                return predictor.step_time(longer)

            assert longest == 0 or seconds(longest) <= budget
            assert seconds(longest + 1) > budget


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 1500)), min_size=1, max_size=40))
def test_both_forms_of_the_roofline_know_the_rates(rows: list[tuple[int, int]]) -> None:
    shape = batch(rows)
    its = device(measured())
    together = roofline_seconds(shape_matrix([shape]), MODEL, its)
    assert together[0] == pytest.approx(make_roofline(MODEL, its)(shape), rel=1e-12)


def test_what_reading_takes_is_not_counted_twice() -> None:
    """Weights that no cache holds: few rows take what reading does, and the memory's part has it already."""
    reading = 1e-3
    seconds = {rows: (reading**3 + (rows * 1e-5) ** 3) ** (1 / 3) for rows in ROW_COUNTS}
    rates = product_rates(seconds, flops_per_row=1e7, reading_seconds=reading, peak=1e12)
    assert [rate for _, rate in rates] == pytest.approx([1e12] * len(rates), rel=1e-3)
    cached = product_rates(seconds, flops_per_row=1e7, reading_seconds=2 * reading, peak=1e12)
    assert cached[0][1] == pytest.approx(1e10, rel=1e-3), (
        "memory would have taken longer: they were in a cache"
    )


def test_the_better_of_two_measurements_counts() -> None:
    first, second = ((1, 5.0), (2, 9.0)), ((1, 6.0), (2, 8.0), (4, 7.0))
    assert best_rates(first, second) == ((1, 6.0), (2, 9.0), (4, 7.0))
    assert row_costs((), 1.0) == ()


def test_beyond_the_measured_rows_the_last_rate_holds() -> None:
    costs = row_costs(((1, 1.0), (4, 2.0)), 4.0)
    assert costs == pytest.approx((0.0, 4.0, 4 * 2**0.5, 4 * 3**0.5, 8.0))
    predict = make_roofline(MODEL, replace(device(((1, FAST / 2),)), memory_bandwidth=1e20))
    one, many = predict(batch([(0, 512)])), predict(batch([(0, 1024)]))
    assert 1.9 < many / one < 2.3


def test_a_description_keeps_the_rates() -> None:
    description = StepTimeDescription(
        model=MODEL, device=device(measured()), parallelism=Parallelism(), precision=Precision()
    )
    values = description.as_json()
    assert description_from_json(values) == replace(
        description, device=replace(description.device, peak_flops=dict(description.device.peak_flops))
    )
    del values["device"]["product_rates"]
    older = description_from_json(values)
    assert isinstance(older, StepTimeDescription)
    assert older.device.product_rates == ()
