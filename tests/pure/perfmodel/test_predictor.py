"""Predictions from any closure: quantiles, inflation, the inverse, learning, and their price."""

from __future__ import annotations

import math
import random
import timeit
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel, seconds_of_each
from onbeat.perfmodel.device_spec import find_device
from onbeat.perfmodel.inversion import MAX_CHUNK_TOKENS
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.predictor import OnlineCorrection, Predictor, ResidualModel
from onbeat.perfmodel.recent import DriftAlarm
from onbeat.perfmodel.shapes import ShapeRange
from tests.pure.perfmodel.shapes import (
    batch,
    decodes,
    linear_seconds,
    mixed_batches,
    rows,
    verified,
    verifies,
    with_chunk,
    with_verified,
)
from tests.pure.perfmodel.targets import make_step_time_model

RATIOS = [0.9 + 0.01 * index for index in range(30)]
RESIDUAL = ResidualModel(RATIOS)
SMALL_RANGE = ShapeRange(num_new_tokens=512, num_sequences=32, query_key_pairs=200_000, context_tokens=50_000)


def full_predictor() -> Predictor:
    """Everything on, with factors that are not 1."""
    predictor = Predictor(
        linear_seconds, ResidualModel(RATIOS), SMALL_RANGE, OnlineCorrection(), DriftAlarm()
    )
    for index, shape in enumerate(mixed_batches(400, seed=1)):
        predictor.observe(shape, linear_seconds(shape) * (1.1 if index % 3 else 0.95))
    return predictor


def test_it_is_a_step_time_model_and_costs_nothing_for_an_empty_batch() -> None:
    model: StepTimeModel = Predictor(linear_seconds)
    assert model.step_time(BatchShape()) == 0.0
    assert model.step_time(decodes(4, 100)) == linear_seconds(decodes(4, 100))


def test_a_quantile_scales_the_mean_by_that_of_the_residuals() -> None:
    predictor = Predictor(linear_seconds, ResidualModel(RATIOS))
    shape = decodes(8, 500)
    mean = predictor.step_time(shape)
    assert predictor.step_time(shape, 0.5) == pytest.approx(mean * 1.045)
    assert predictor.step_time(shape, 0.9) > predictor.step_time(shape, 0.5)
    assert predictor.step_time(shape, 0.9999) == pytest.approx(mean * RATIOS[-1])


@pytest.mark.parametrize("q", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_a_quantile_must_lie_between_0_and_1(q: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        Predictor(linear_seconds, ResidualModel(RATIOS)).step_time(decodes(1, 1), q)


def test_a_quantile_needs_a_measured_error() -> None:
    with pytest.raises(ConfigError, match="never measured"):
        Predictor(linear_seconds).step_time(decodes(1, 1), 0.9)


def test_quantiles_of_an_unmeasured_model_are_log_normal() -> None:
    residual = ResidualModel.log_normal(0.2)
    assert residual.factor(0.5) == pytest.approx(1)
    assert residual.factor(0.975) == pytest.approx(math.exp(0.2 * 1.96), rel=1e-4)
    assert residual.factor(0.025) == pytest.approx(1 / residual.factor(0.975))


def test_quantiles_cover_new_steps_as_often_as_they_say() -> None:
    """Of 19 ratios the 95 % quantile is the largest: a 20th exceeds it once in 20 times."""
    residual = ResidualModel([1 + index / 100 for index in range(19)])
    assert residual.factor(0.95) == pytest.approx(1.18)
    assert residual.factor(0.05) == pytest.approx(1.0)


@pytest.mark.parametrize("ratios", [[], [1.0, 0.0], [1.0, math.nan], [math.inf]])
def test_residuals_must_be_positive(ratios: list[float]) -> None:
    with pytest.raises(ConfigError):
        ResidualModel(ratios)


def test_inside_the_range_nothing_is_added_and_each_doubling_outside_adds_a_tenth() -> None:
    predictor = Predictor(linear_seconds, shape_range=SMALL_RANGE)
    inside = batch([(0, 512)])
    assert predictor.step_time(inside) == linear_seconds(inside)
    twice, fourfold = decodes(64, 10), decodes(128, 10)
    assert predictor.step_time(twice) == pytest.approx(1.1 * linear_seconds(twice))
    assert predictor.step_time(fourfold) == pytest.approx(1.21 * linear_seconds(fourfold))


def test_work_that_was_never_measured_is_outside() -> None:
    only_decodes = ShapeRange.of([decodes(8, 1000)])
    assert only_decodes.inflation(decodes(8, 1000)) == 1
    assert only_decodes.inflation(batch([(0, 8)])) > 1.1
    only_chunks = ShapeRange.of([batch([(0, 64)])])
    assert only_chunks.inflation(decodes(1, 1)) >= 1.1


def test_a_range_needs_a_measurement() -> None:
    with pytest.raises(ConfigError, match="range"):
        ShapeRange.of([])


@given(
    rows=rows,
    drafts=verified,
    cached=st.integers(0, 20_000),
    budget=st.floats(1e-3, 2.0),
    q=st.sampled_from((None, 0.9)),
)
def test_the_inverse_is_exact(
    rows: list[tuple[int, int]],
    drafts: list[tuple[int, int]],
    cached: int,
    budget: float,
    q: float | None,
) -> None:
    predictor = full_predictor_once()
    shape = with_verified(batch(rows), drafts)
    before = replace(shape)
    longest = predictor.max_chunk_tokens(shape, cached, budget, q)
    assert shape == before
    if longest:
        assert predictor.step_time(with_chunk(shape, cached, longest), q) <= budget
    assert longest == MAX_CHUNK_TOKENS or (
        predictor.step_time(with_chunk(shape, cached, longest + 1), q) > budget
    )


@given(rows=rows, length=st.integers(2, 20_000), cached=st.integers(0, 20_000))
def test_the_inverse_of_a_step_time_is_the_chunk_itself(
    rows: list[tuple[int, int]], length: int, cached: int
) -> None:
    """Where each token costs something, whatever the kinks."""
    predictor = Predictor(lambda shape: linear_seconds(shape) + 1e-7 * shape.num_new_tokens)
    shape = batch(rows)
    assert (
        predictor.max_chunk_tokens(shape, cached, predictor.step_time(with_chunk(shape, cached, length)))
        == length
    )


def test_the_inverse_at_its_ends() -> None:
    predictor = Predictor(linear_seconds)
    assert predictor.max_chunk_tokens(decodes(1, 1), 0, 0.0) == 0
    assert predictor.max_chunk_tokens(decodes(1, 1), 0, math.nan) == 0
    assert predictor.max_chunk_tokens(decodes(1, 1), 0, math.inf) == MAX_CHUNK_TOKENS
    assert Predictor(lambda shape: 1.0).max_chunk_tokens(BatchShape(), 0, 1.0) == MAX_CHUNK_TOKENS


def test_the_inverse_needs_few_trials() -> None:
    """Forty microseconds at two a prediction."""
    calls = 0

    def counted(shape: BatchShape) -> float:
        nonlocal calls
        calls += 1
        return linear_seconds(shape)

    predictor = Predictor(counted, shape_range=SMALL_RANGE)
    trials = []
    for budget in (0.006, 0.008, 0.012, 0.02, 0.03, 0.05, 0.1, 0.2):
        calls = 0
        predictor.max_chunk_tokens(decodes(32, 1000), 700, budget)
        trials.append(calls)
    assert max(trials) <= 14
    assert sum(trials) / len(trials) <= 10


def test_it_learns_what_the_machine_does_and_says_when_that_is_far_off() -> None:
    fixed = Predictor(linear_seconds)
    predictor = fixed.with_learning(DriftAlarm())
    shape = decodes(16, 800)
    for _ in range(100):
        fixed.observe(shape, 1.5 * linear_seconds(shape))
        predictor.observe(shape, 1.5 * linear_seconds(shape))
    assert predictor.step_time(shape) == pytest.approx(1.5 * linear_seconds(shape))
    assert predictor.drift is not None
    assert predictor.drift.is_alarming
    assert predictor.drift.ratio == pytest.approx(1.5)
    assert fixed.step_time(shape) == linear_seconds(shape)


def noisy_steps(count: int, factor: float, seed: int) -> list[tuple[BatchShape, float]]:
    rng = random.Random(seed)
    shapes = mixed_batches(count, seed)
    return [(shape, linear_seconds(shape) * factor * rng.lognormvariate(0.0, 0.05)) for shape in shapes]


@pytest.mark.parametrize("num_before", [0, 600])
@pytest.mark.parametrize("factor", [1 / 20, 1 / 5, 5.0, 20.0])
def test_quantiles_are_right_again_once_the_machine_has_changed(num_before: int, factor: float) -> None:
    predictor = Predictor(linear_seconds, ResidualModel.log_normal(0.1)).with_learning()
    for shape, seconds in noisy_steps(num_before, 1.0, seed=1):
        predictor.observe(shape, seconds)
    shape = decodes(16, 800)
    num_over = 0
    for index, (shape, seconds) in enumerate(noisy_steps(500, factor, seed=2)):
        if index >= 40:
            mean, high = predictor.step_time(shape), predictor.step_time(shape, 0.99)
            assert mean == pytest.approx(factor * linear_seconds(shape), rel=0.35)
            assert 1.02 < high / mean < 1.6
            num_over += seconds > high
        predictor.observe(shape, seconds)
    assert num_over / 460 < 0.03


def test_slow_spells_count_in_the_quantiles() -> None:
    predictor = Predictor(linear_seconds, ResidualModel.log_normal(0.01)).with_learning()
    shape = decodes(16, 800)
    for index in range(600):
        spell = 2.0 if index % 100 >= 90 else 1.0
        predictor.observe(shape, linear_seconds(shape) * spell)
    assert predictor.step_time(shape, 0.99) > 1.6 * predictor.step_time(shape)
    assert predictor.step_time(shape, 0.5) < 1.1 * predictor.step_time(shape)


def test_what_was_inflated_is_learned_too() -> None:
    predictor = Predictor(linear_seconds, shape_range=SMALL_RANGE, correction=OnlineCorrection())
    shape = decodes(128, 10)
    for _ in range(20):
        predictor.observe(shape, linear_seconds(shape))
    assert predictor.step_time(shape) == pytest.approx(linear_seconds(shape))


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_cannot_be_teaches_nothing(seconds: float) -> None:
    predictor = Predictor(linear_seconds, correction=OnlineCorrection(), alarm=DriftAlarm())
    for _ in range(20):
        predictor.observe(decodes(4, 4), seconds)
    predictor.observe(BatchShape(), 1.0)
    assert predictor.step_time(decodes(4, 4)) == linear_seconds(decodes(4, 4))
    assert predictor.drift is not None
    assert predictor.drift.num_steps == 0


@given(
    st.lists(st.tuples(st.floats(0.2, 5.0), st.integers(1, 40)), min_size=1, max_size=12),
    st.booleans(),
    st.floats(1.0, 8.0),
    st.sampled_from([math.inf, 0.02, 0.011]),
)
def test_a_run_of_steps_teaches_what_its_steps_do(
    runs: list[tuple[float, int]], has_alarm: bool, later: float, limit: float
) -> None:
    """Both models then answer alike to the last digit, whatever the pace was and wherever runs are cut."""
    alarm = (DriftAlarm(), DriftAlarm()) if has_alarm else (None, None)
    one, other = (Predictor(linear_seconds, RESIDUAL).with_learning(each) for each in alarm)
    now = 0.0
    for pace, num_steps in runs:
        shape, same = decodes(7, 900), decodes(7, 900)
        ends = []
        end = now
        for step in range(num_steps):
            end += pace * (later if step % 17 == 3 else 1.0) * 0.01
            ends.append(end)
        is_within = one.is_within(shape, now, ends, limit)
        learnt = one.observe_run(shape, now, ends, limit)
        assert learnt == StepTimeModel.observe_run(other, same, now, ends, limit)
        assert not is_within or learnt == (num_steps, True)
        assert shape == same
        now = end
        for q in (None, 0.5, 0.99):
            assert one.step_time(shape, q) == other.step_time(shape, q)
            assert one.step_time(decodes(3, 50), q) == other.step_time(decodes(3, 50), q)


@given(
    st.lists(st.tuples(st.floats(0.3, 4.0), st.integers(1, 40)), min_size=1, max_size=6),
    st.lists(st.floats(0.3, 4.0), max_size=20),
)
def test_a_copy_learns_what_the_model_would_and_the_model_nothing_of_it(
    before: list[tuple[float, int]], later: list[float]
) -> None:
    model, same, never = (Predictor(linear_seconds, RESIDUAL).with_learning() for _ in range(3))
    for pace, num_steps in before:
        for each in (model, same, never):
            for step in range(num_steps):
                each.observe(decodes(7, 900 + 7 * step), pace * 0.01)
    copied = deepcopy(model)
    for pace in later:
        copied.observe(decodes(5, 500), pace * 0.02)
        same.observe(decodes(5, 500), pace * 0.02)
    for q in (None, 0.5, 0.99):
        for shape in (decodes(7, 900), decodes(5, 500), decodes(3, 50)):
            assert copied.step_time(shape, q) == same.step_time(shape, q)
            assert model.step_time(shape, q) == never.step_time(shape, q)


def test_steps_that_follow_one_another_are_timed_as_one_by_one() -> None:
    model = roofline_model()
    for predictor in (model, model.with_learning(), full_predictor(), Predictor(linear_seconds)):
        for shape in (decodes(7, 900), decodes(1, 0), verifies(4, 100, 3), *mixed_batches(5, seed=3)):
            before, first = replace(shape), shape.decode_context_tokens
            contexts = [first + step * shape.num_lm_head_rows for step in range(9)]
            one_by_one = seconds_of_each(predictor.step_time, shape, contexts)
            assert list(predictor.step_times(shape, contexts)) == one_by_one
            assert list(predictor.step_times(shape, [first])) == [predictor.step_time(shape)]
            assert shape == before


def roofline_model() -> Predictor:
    spec, device = find_model_spec("meta-llama/Llama-3.1-8B"), find_device("h100-sxm")
    model = make_step_time_model("roofline", model=spec, device=device, profile=None)
    assert isinstance(model, Predictor)
    return model


def test_equal_calls_give_equal_answers() -> None:
    first, second = full_predictor(), full_predictor()
    for shape in mixed_batches(50, seed=2):
        assert first.step_time(shape, 0.9) == second.step_time(shape, 0.9)
        assert first.max_chunk_tokens(shape, 100, 0.02, 0.9) == second.max_chunk_tokens(shape, 100, 0.02, 0.9)


def test_without_an_alarm_there_is_no_drift() -> None:
    assert Predictor(linear_seconds).drift is None


def test_everything_on_costs_little_more_than_plain_arithmetic() -> None:
    """Counted in multiples of 30 multiplications and additions on this machine: about a microsecond."""
    predictor, shape = full_predictor(), decodes(16, 800)

    def arithmetic() -> float:
        total = 1.0
        for factor in (1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0) * 3:
            total = total * factor + 0.5
        return total

    def best(function: object) -> float:
        return min(timeit.repeat(function, number=2000, repeat=7))  # type: ignore[arg-type]

    assert best(lambda: predictor.step_time(shape, 0.9)) < 3 * best(arithmetic)


_FULL: list[Predictor] = []


def full_predictor_once() -> Predictor:
    """One for all examples: building it takes longer than what is tested."""
    if not _FULL:
        _FULL.append(full_predictor())
    return _FULL[0]
