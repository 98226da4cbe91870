"""A switch that does not flicker."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.scheduler.replica.hysteresis import Hysteresis


@given(ratios=st.lists(st.floats(0.8, 0.95, exclude_max=True)), is_on=st.booleans())
def test_a_ratio_between_the_levels_flips_nothing(ratios: list[float], is_on: bool) -> None:
    switch = Hysteresis()
    assert switch.update(2.0 if is_on else 0.0) is is_on
    assert all(switch.update(ratio) is is_on for ratio in ratios)


def test_comes_on_at_the_upper_level_and_goes_off_below_the_lower() -> None:
    switch = Hysteresis(enter=0.9, leave=0.5)
    ratios = [0.0, 0.89, 0.9, 0.6, 0.5, 0.49, 0.89, math.inf]
    assert [switch.update(ratio) for ratio in ratios] == [False, False, True, True, True, False, False, True]
    assert switch.is_on


def test_with_equal_levels_it_is_a_plain_comparison() -> None:
    switch = Hysteresis(enter=1.0, leave=1.0)
    assert [switch.update(ratio) for ratio in (0.99, 1.0, 0.99, 1.0)] == [False, True, False, True]


def test_refuses_levels_in_the_wrong_order() -> None:
    with pytest.raises(ConfigError, match=r"enter=0\.5, leave=0\.6"):
        Hysteresis(enter=0.5, leave=0.6)
