"""The search on its own: any threshold is found, in few runs, and what is found is true."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.planner.objectives import Verdict
from onbeat.planner.search import Bracket, SearchOptions, Stopped, Trial, rate_interval, search_rate


def judge_below(threshold: float, rate: float) -> Verdict:
    return Verdict(is_met=rate <= threshold, reason=f"{rate:g} against {threshold:g}")


@given(threshold=st.floats(1e-2, 1e4), distance=st.floats(1e-2, 1e2), tolerance=st.floats(0.001, 0.3))
def test_finds_a_threshold_within_the_tolerance(threshold: float, distance: float, tolerance: float) -> None:
    options = SearchOptions(tolerance=tolerance)
    bracket = search_rate(
        lambda rate: judge_below(threshold, rate), start=threshold * distance, options=options
    )
    assert bracket.is_finished
    assert bracket.low <= threshold < bracket.high
    assert bracket.high - bracket.low <= tolerance * bracket.low
    assert bracket.limit == judge_below(threshold, bracket.high)
    assert len(bracket.trials) <= 30


def test_needs_few_runs_from_a_good_start() -> None:
    bracket = search_rate(lambda rate: judge_below(10.0, rate), start=8.0)
    assert len(bracket.trials) <= 8


def test_a_hopeless_case_costs_two_runs() -> None:
    bracket = search_rate(lambda rate: judge_below(0.0, rate), start=8.0)
    assert bracket.is_infeasible
    assert bracket.low == 0
    assert len(bracket.trials) == 2
    assert bracket.limit.reason.endswith("against 0")


def test_a_load_that_never_saturates_is_unbounded() -> None:
    bracket = search_rate(lambda rate: judge_below(inf, rate), start=8.0)
    assert bracket.is_finished
    assert bracket.high == inf
    assert bracket.low == 8.0 * 2**12


def test_a_stopped_search_keeps_what_it_found() -> None:
    rates: list[float] = []

    def judge(rate: float) -> Verdict:
        if len(rates) == 4:
            raise Stopped
        rates.append(rate)
        return judge_below(10.0, rate)

    bracket = search_rate(judge, start=3.0)
    assert not bracket.is_finished
    assert not bracket.is_infeasible
    assert (bracket.low, bracket.high) == (9.0, 12.0)


def test_tells_of_each_run() -> None:
    heard: list[Trial] = []
    bracket = search_rate(lambda rate: judge_below(10.0, rate), start=8.0, on_trial=heard.append)
    assert tuple(heard) == bracket.trials


@pytest.mark.parametrize("threshold", [3.0, 10.5, 15.0, 90.0])
def test_ends_that_are_known_are_not_run(threshold: float) -> None:
    options = SearchOptions(tolerance=0.105, growth=2**0.5)
    low, high = (0.0, 10.0) if threshold < 10 else (10.0, inf)
    start = 10.0 if threshold < 10 else 10.0 * 2**0.5
    bracket = search_rate(
        lambda rate: judge_below(threshold, rate), start=start, options=options, low=low, high=high
    )
    assert bracket.low <= threshold < bracket.high
    assert 10.0 not in [trial.rate for trial in bracket.trials]
    assert bracket.high - bracket.low <= 0.105 * bracket.low


@pytest.mark.parametrize("tolerance", [0.0, 1.0])
def test_refuses_options_that_never_end(tolerance: float) -> None:
    with pytest.raises(ConfigError):
        SearchOptions(tolerance=tolerance)


def make_bracket(low: float, high: float) -> Bracket:
    return Bracket(low=low, high=high, trials=(), is_finished=True)


def test_the_interval_of_one_repeat_is_its_bracket() -> None:
    assert rate_interval([make_bracket(4.0, 4.1)]) == (4.0, (4.0, 4.1))


def test_the_interval_of_repeats_is_students_t() -> None:
    rate, (low, high) = rate_interval([make_bracket(value, value) for value in (9.0, 10.0, 11.0)])
    assert rate == pytest.approx(10.0)
    assert 10.0 - low == pytest.approx(4.302653 / 3**0.5)  # t with 2 degrees of freedom, 97.5 %
    assert high - 10.0 == pytest.approx(10.0 - low)


def test_the_interval_covers_the_brackets() -> None:
    _, (low, high) = rate_interval([make_bracket(10.0, 10.2), make_bracket(10.0, 10.2)])
    assert low == 10.0
    assert high == pytest.approx(10.2)
