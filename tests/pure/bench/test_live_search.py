"""What the live study reads off its runs, and how its page is kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.pages import middle
from benchmarks.serve.slo_live.search import (
    Capacity,
    Point,
    crossing,
    ramp_crossing,
    without_each_round,
)
from benchmarks.serve.slo_live.sections import replace_section

LEVEL = 0.9


def point(rate: float, good: int, *, of: int = 100, index: int = 0) -> Point:
    return Point(index, rate, of, good)


def test_the_crossing_lies_between_the_rates_on_both_sides() -> None:
    found = crossing([point(2.0, 98), point(4.0, 82)], level=LEVEL)

    assert found.rate == pytest.approx(2.0 * 2**0.5)
    assert found.bound == ""


def test_runs_of_one_rate_are_pooled_and_rises_are_chance() -> None:
    # 3.0 came out better than 2.0: together they keep 93 %, at about 2.45 requests/s.
    points = [point(2.0, 90), point(3.0, 96), point(4.0, 70, index=0), point(4.0, 80, index=1)]

    found = crossing(points, level=LEVEL)

    assert 6**0.5 < found.rate < 4.0
    assert found.bound == ""


@pytest.mark.parametrize(
    ("goods", "found"),
    [((95, 92), Capacity(3.0, "at least")), ((80, 60), Capacity(2.0, "at most"))],
)
def test_a_level_that_no_run_crossed_gives_a_bound(goods: tuple[int, int], found: Capacity) -> None:
    points = [point(2.0, goods[0]), point(3.0, goods[1])]

    capacity = crossing(points, level=LEVEL)

    assert capacity.rate == pytest.approx(found.rate)
    assert capacity.bound == found.bound


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 50)), min_size=1, max_size=12))
def test_the_crossing_stays_within_the_rates_that_were_run(runs: list[tuple[int, int]]) -> None:
    found = crossing([point(rate, good, of=50) for rate, good in runs], level=LEVEL)

    rates = [rate for rate, _ in runs]
    assert min(rates) - 1e-9 <= found.rate <= max(rates) + 1e-9


def test_no_runs_have_no_crossing() -> None:
    with pytest.raises(ValueError, match="no runs"):
        crossing([], level=LEVEL)


def test_leaving_out_each_round_shows_how_far_one_moves_it() -> None:
    points = [
        each
        for index, good in enumerate((84, 80, 70))
        for each in (point(2.0, 98, index=index), point(4.0, good, index=index))
    ]

    found = without_each_round(points, level=LEVEL)

    assert len(found) == 3
    assert found[2].rate == max(each.rate for each in found)
    assert without_each_round(points[:2], level=LEVEL) == []


def test_a_growing_load_shows_about_where_it_becomes_too_much() -> None:
    good = np.arange(200) < 120

    found = ramp_crossing(good, start_rate=1.0, end_rate=5.0, level=LEVEL)

    assert found == pytest.approx(1.0 + 4.0 * 120 / 200, rel=0.05)
    assert ramp_crossing(np.ones(9, dtype=bool), start_rate=1.0, end_rate=5.0, level=LEVEL) == 5.0


def test_a_section_is_replaced_and_the_others_are_left() -> None:
    page = "# Title\n\ntext\n\n## (i) One\n\nold\n\n### part\n\nx\n\n## Notes\n\nby hand\n"

    page = replace_section(page, "(ii) Two", "second")
    page = replace_section(page, "Yardstick: a step", "zeroth")
    page = replace_section(page, "(i) One", "new\n")

    assert page == (
        "# Title\n\ntext\n\n## Yardstick: a step\n\nzeroth\n\n## (i) One\n\nnew\n\n## (ii) Two\n\nsecond\n\n"
        "## Notes\n\nby hand\n"
    )
    assert replace_section(page, "(i) One", "new") == page


def test_the_middle_of_values() -> None:
    assert middle([3.0, None, 1.0, 2.0], 1) == "2.0 (1.0 to 3.0)"
    assert middle([None]) == "-"
