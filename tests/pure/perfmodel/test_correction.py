"""Online factors and the drift alarm."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.perfmodel.correction import CorrectionConfig, DriftAlarm, OnlineCorrection
from tests.pure.perfmodel.shapes import batch, decodes


def test_a_bucket_waits_until_it_has_seen_enough() -> None:
    correction = OnlineCorrection(CorrectionConfig(ready_after=3))
    shape = decodes(4, 100)
    for _ in range(2):
        correction.observe(shape, 1.2)
    assert correction.factor(shape) == 1
    correction.observe(shape, 1.2)
    assert correction.factor(shape) == pytest.approx(1.2)


def test_buckets_are_powers_of_two_of_tokens_and_context() -> None:
    correction = OnlineCorrection(CorrectionConfig(ready_after=1))
    correction.observe(decodes(4, 100), 1.3)
    assert correction.factor(decodes(7, 60)) == pytest.approx(1.3)  # 4 to 7 tokens, 256 to 511 of context
    assert correction.factor(decodes(8, 50)) == 1
    assert correction.factor(decodes(4, 200)) == 1
    assert correction.factor(batch([(396, 4)])) == pytest.approx(1.3)


def test_it_follows_a_change() -> None:
    correction = OnlineCorrection()
    shape = decodes(4, 100)
    for _ in range(50):
        correction.observe(shape, 0.9)
    for _ in range(50):
        correction.observe(shape, 1.25)
    assert correction.factor(shape) == pytest.approx(1.25, rel=0.01)


@given(ratios=st.lists(st.floats(1e-6, 1e6), min_size=8, max_size=60))
def test_a_factor_never_leaves_its_bounds(ratios: list[float]) -> None:
    correction = OnlineCorrection()
    for ratio in ratios:
        correction.observe(decodes(4, 100), ratio)
    assert 0.5 - 1e-12 <= correction.factor(decodes(4, 100)) <= 2 + 1e-12


def test_one_stall_moves_a_factor_by_a_little() -> None:
    correction = OnlineCorrection()
    shape = decodes(4, 100)
    for _ in range(30):
        correction.observe(shape, 1.0)
    correction.observe(shape, 1000.0)
    assert correction.factor(shape) == pytest.approx(2**0.1)


def test_noise_averages_out_without_bias() -> None:
    correction = OnlineCorrection(CorrectionConfig(weight=0.02))
    shape = decodes(4, 100)
    for index in range(400):
        correction.observe(shape, 1.25 if index % 2 else 0.8)
    assert correction.factor(shape) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": 0.0},
        {"weight": 1.5},
        {"ready_after": 0},
        {"lowest": 0.0},
        {"lowest": 1.1},
        {"highest": math.inf},
    ],
)
def test_a_configuration_that_cannot_work_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CorrectionConfig(**wrong)


def test_the_alarm_waits_comes_on_and_goes_off_lower_than_it_came() -> None:
    alarm = DriftAlarm(on=1.3, off=1.15, memory=20)
    early = []
    for _ in range(20):
        early.append(alarm.state.is_alarming)
        alarm.observe(1.5)
    assert not any(early)
    assert alarm.state.is_alarming
    while alarm.state.ratio > 1.2:
        alarm.observe(1.0)
    assert alarm.state.is_alarming
    while alarm.state.ratio > 1.14:
        alarm.observe(1.0)
    assert not alarm.state.is_alarming


def test_the_alarm_hears_both_directions_and_ignores_noise() -> None:
    fast, noisy = DriftAlarm(), DriftAlarm()
    for index in range(200):
        fast.observe(0.6)
        noisy.observe(2.0 if index % 2 else 0.5)
    assert fast.state.is_alarming
    assert fast.state.ratio == pytest.approx(0.6)
    assert not noisy.state.is_alarming
    assert noisy.state.num_steps == 200


@pytest.mark.parametrize("wrong", [{"on": 1.1, "off": 1.2}, {"off": 1.0}, {"memory": 0}, {"on": math.nan}])
def test_an_alarm_that_cannot_work_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DriftAlarm(**wrong)
