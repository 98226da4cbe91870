"""Online factors and the drift alarm."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.step import BatchShape
from onbeat.perfmodel.predictor import OnlineCorrection
from onbeat.perfmodel.recent import DriftAlarm
from tests.pure.perfmodel.shapes import batch, decodes, verifies


def learn(correction: OnlineCorrection, shape: BatchShape, ratio: float, times: int = 1) -> None:
    for _ in range(times):
        correction.observe(shape, ratio)


FACTORS = (1 / 50, 1 / 20, 1 / 5, 1 / 2, 2.0, 5.0, 20.0, 50.0)


def settled(*shapes: BatchShape, times: int = 100) -> OnlineCorrection:
    """A correction that has seen each of these batches take as long as predicted."""
    correction = OnlineCorrection()
    for _ in range(times):
        for shape in shapes:
            correction.observe(shape, 1.0)
    return correction


@pytest.mark.parametrize("factor", FACTORS)
def test_a_model_that_is_wrong_by_any_factor_is_right_within_some_tens_of_steps(factor: float) -> None:
    correction = OnlineCorrection()
    kinds = decodes(4, 100), batch([(0, 512)])
    learn(correction, kinds[0], factor, 20)
    for each in (*kinds, decodes(100, 500), verifies(4, 100, 3)):
        assert correction.factor(each) == pytest.approx(factor, rel=0.01)


def test_it_waits_until_it_has_seen_enough() -> None:
    correction, shape = OnlineCorrection(), decodes(4, 100)
    learn(correction, shape, 1.2, 7)
    assert correction.factor(shape) == 1
    assert correction.has_lost_pace
    learn(correction, shape, 1.2)
    assert correction.factor(shape) == pytest.approx(1.2)
    assert not correction.has_lost_pace


@given(st.lists(st.tuples(st.booleans(), st.floats(0.05, 20.0)), min_size=1, max_size=60))
def test_learning_tells_what_the_factor_was(steps: list[tuple[bool, float]]) -> None:
    correction = OnlineCorrection()
    for has_drafts, ratio in steps:
        shape = verifies(4, 100, 3) if has_drafts else decodes(4, 100)
        before = correction.factor(shape)
        assert correction.observe(shape, ratio) == before


def test_slow_first_steps_do_not_make_the_pace() -> None:
    correction, shape = OnlineCorrection(), decodes(4, 100)
    learn(correction, shape, 100.0, 3)
    learn(correction, shape, 1.2, 5)
    assert correction.factor(shape) == pytest.approx(1.2)


@pytest.mark.parametrize("factor", FACTORS)
def test_a_machine_that_changes_its_pace_is_followed_within_some_tens_of_steps(factor: float) -> None:
    kinds = decodes(4, 100), decodes(64, 100), batch([(0, 512)])
    correction = settled(*kinds)
    for _ in range(8):
        for kind in kinds:
            correction.observe(kind, factor)
    for each in (*kinds, decodes(16, 900), verifies(4, 100, 3)):
        assert correction.factor(each) == pytest.approx(factor, rel=0.15)


def test_a_change_of_pace_is_believed_of_batches_that_have_not_run_since() -> None:
    correction = OnlineCorrection()
    for _ in range(50):
        learn(correction, decodes(4, 100), 1.0)
        learn(correction, batch([(0, 512)]), 1.0)
    learn(correction, decodes(4, 100), 1.5, 20)
    for unseen in (decodes(4, 100), batch([(0, 512)]), decodes(100, 500), verifies(4, 100, 3)):
        assert correction.factor(unseen) == pytest.approx(1.5, rel=0.1)


def test_kinds_of_batches_are_powers_of_two_of_tokens_and_context() -> None:
    correction = OnlineCorrection()
    for _ in range(200):
        learn(correction, decodes(4, 100), 1.4)
        learn(correction, decodes(8, 100), 0.9)
    dear, cheap = correction.factor(decodes(4, 100)), correction.factor(decodes(8, 100))
    assert dear == pytest.approx(1.4, rel=0.05)
    assert cheap == pytest.approx(0.9, rel=0.05)
    assert correction.factor(decodes(7, 60)) == dear  # 4 to 7 tokens, 256 to 511 of context
    assert correction.factor(batch([(396, 4)])) == dear
    for other in (decodes(8, 30), decodes(4, 200)):  # like none of the two: in between
        assert cheap * 1.05 < correction.factor(other) < dear / 1.05


@pytest.mark.parametrize(
    ("paces", "last", "count", "error"), [((1.0, 1.4, 0.9), 1.4, 20, 0.05), ((1.0, 20.0), 1.0, 30, 0.1)]
)
def test_what_a_kind_takes_beside_others_outlasts_a_change_of_pace(
    paces: tuple[float, ...], last: float, count: int, error: float
) -> None:
    correction = OnlineCorrection()
    few, many = decodes(4, 100), decodes(64, 100)
    for pace in paces:
        for _ in range(100):
            learn(correction, few, 1.2 * pace)
            learn(correction, many, pace)
    learn(correction, many, last, count)
    assert correction.factor(few) / correction.factor(many) == pytest.approx(1.2, rel=error)


def test_what_drafts_take_beyond_their_prediction_comes_on_top_of_the_factor_of_their_rows() -> None:
    correction = OnlineCorrection()
    plain, drafted = decodes(4, 100), verifies(4, 100, 3)
    for _ in range(200):
        learn(correction, plain, 1.2)
        learn(correction, drafted, 1.2 * 1.1)
    assert correction.factor(plain) == pytest.approx(1.2, rel=0.02)
    assert correction.factor(drafted) / correction.factor(plain) == pytest.approx(1.1, rel=0.02)


def test_a_slow_spell_in_which_only_drafts_ran_does_not_make_them_dear() -> None:
    correction = OnlineCorrection()
    plain, drafted = decodes(4, 100), verifies(4, 100, 3)
    learn(correction, plain, 1.0, 50)
    learn(correction, drafted, 1.0, 50)
    learn(correction, drafted, 1.8, 40)
    assert correction.factor(drafted) / correction.factor(plain) < 1.1


def test_other_sizes_are_believed_to_be_alike_until_they_have_shown_otherwise() -> None:
    correction = OnlineCorrection()
    for _ in range(200):
        learn(correction, verifies(1, 100, 3), 1.0)
        learn(correction, verifies(20, 100, 3), 1.2)
    few, many = correction.factor(verifies(1, 100, 3)), correction.factor(verifies(20, 100, 3))
    assert few < many
    correction.observe(verifies(100, 100, 3), 1.0)
    assert few < correction.factor(verifies(100, 100, 3)) < many


def test_a_few_odd_steps_with_drafts_do_not_decide() -> None:
    correction = OnlineCorrection()
    plain, drafted = decodes(16, 100), verifies(16, 100, 2)
    learn(correction, plain, 1.0, 50)
    learn(correction, drafted, 0.8, 3)
    assert correction.factor(drafted) / correction.factor(plain) > 0.94


def test_with_drafts_a_batch_has_the_factor_of_the_same_rows_without() -> None:
    """The context of 500 and 8 drafts is in another bucket than that of 500."""
    correction = OnlineCorrection()
    for _ in range(200):
        learn(correction, decodes(1, 500), 0.7)
        learn(correction, decodes(32, 500), 1.1)
    for num_rows, num_drafts in ((1, 15), (32, 1)):
        assert correction.factor(verifies(num_rows, 500, num_drafts)) == correction.factor(
            decodes(num_rows, 500)
        )


def test_it_follows_a_change() -> None:
    correction = OnlineCorrection()
    shape = decodes(4, 100)
    for _ in range(50):
        correction.observe(shape, 0.9)
    for _ in range(50):
        correction.observe(shape, 1.25)
    assert correction.factor(shape) == pytest.approx(1.25, rel=0.01)


@given(ratios=st.lists(st.floats(1e-6, 1e6), min_size=8, max_size=60), last=st.floats(1e-6, 1e6))
def test_no_step_moves_a_factor_beyond_itself(ratios: list[float], last: float) -> None:
    """But for the last of the first steps, with which there is a pace."""
    correction, shape = OnlineCorrection(), decodes(4, 100)
    for ratio in ratios:
        correction.observe(shape, ratio)
    before = correction.factor(shape)
    correction.observe(shape, last)
    low, high = sorted((before, last))
    assert low / 1.05 <= correction.factor(shape) <= high * 1.05


@pytest.mark.parametrize("num_steps", [0, 1, 8, 30, 1000])
@pytest.mark.parametrize("stall", [100.0, 1e6, 0.01])
def test_one_stall_moves_a_factor_by_a_little(num_steps: int, stall: float) -> None:
    shape = decodes(4, 100)
    correction = settled(shape, times=num_steps)
    correction.observe(shape, stall)
    assert 1 / 1.1 < correction.factor(shape) < 1.1
    learn(correction, shape, 1.0, 10)
    assert correction.factor(shape) == pytest.approx(1.0, rel=0.03)


def test_stalls_among_other_steps_never_add_up() -> None:
    correction, shape = OnlineCorrection(), decodes(4, 100)
    for _ in range(50):
        learn(correction, shape, 1.0, 9)
        correction.observe(shape, 200.0)
        assert correction.factor(shape) < 1.15


@pytest.mark.parametrize("spell", [1.6, 2.5])
def test_a_slow_spell_is_followed_into_and_out_of_within_some_steps(spell: float) -> None:
    shape = decodes(4, 100)
    correction = settled(shape)
    learn(correction, shape, spell, 10)
    assert correction.factor(shape) == pytest.approx(spell, rel=0.15)
    assert not correction.has_lost_pace
    learn(correction, shape, 1.0, 10)
    assert correction.factor(shape) == pytest.approx(1.0, rel=0.2)


@pytest.mark.parametrize("spell", [1.6, 2.5])
def test_a_slow_spell_is_no_loss_of_pace(spell: float) -> None:
    shape = decodes(4, 100)
    correction = settled(shape)
    for ratio in [spell] * 30 + [1.0] * 30:
        correction.observe(shape, ratio)
        assert not correction.has_lost_pace


@pytest.mark.parametrize("factor", [1 / 20, 1 / 5, 5.0, 20.0])
def test_the_pace_is_lost_while_a_machine_that_has_changed_is_caught_up_with(factor: float) -> None:
    shape = decodes(4, 100)
    correction = settled(shape)
    was_lost = []
    for _ in range(30):
        correction.observe(shape, factor)
        was_lost.append(correction.has_lost_pace)
    assert any(was_lost)
    assert not was_lost[0]
    assert not was_lost[-1]
    assert correction.factor(shape) == pytest.approx(factor, rel=0.1)


def test_noise_averages_out_without_bias() -> None:
    correction = OnlineCorrection()
    shape = decodes(4, 100)
    factors = []
    for index in range(400):
        correction.observe(shape, 1.25 if index % 2 else 0.8)
        factors.append(math.log(correction.factor(shape)))
    assert sum(factors[-100:]) / 100 == pytest.approx(0.0, abs=0.01)


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


@pytest.mark.parametrize("factor", [20.0, 0.05])
def test_the_alarm_says_how_far_off_a_model_is(factor: float) -> None:
    alarm = DriftAlarm()
    for _ in range(64):
        alarm.observe(factor)
    assert alarm.state.ratio == pytest.approx(factor, rel=0.2)
    for _ in range(1000):
        alarm.observe(1.0)
    alarm.observe(1e6)
    assert alarm.state.ratio < 1.1
    assert not alarm.state.is_alarming
