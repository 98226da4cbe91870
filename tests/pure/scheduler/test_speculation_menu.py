"""The best n drafts of a step, and the n with the largest goodput: as full enumeration has them."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.scheduler.replica.speculation.menu import LEVELS, DraftMenu, Ranking, kind_of
from onbeat.scheduler.replica.speculation.search import GoodputSearch
from tests.examples import examples

offers = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, LEVELS - 1), st.sampled_from([1.0, 2.0])),
    min_size=1,
    max_size=5,
)


def make_menu(rows: list[tuple[int, int, float]]) -> DraftMenu:
    return DraftMenu([(most, kind_of((level + 0.5) / LEVELS, worth)) for most, level, worth in rows])


def gain_of(rows: list[tuple[int, int, float]], shares: list[int]) -> float:
    return sum(
        worth * sum(((level + 0.5) / LEVELS) ** j for j in range(1, share + 1))
        for (_, level, worth), share in zip(rows, shares, strict=True)
    )


class Curve:
    """Time by the number of drafts alone."""

    def __init__(self, times: list[float]) -> None:
        self.times = times
        self.num_asked = 0

    def seconds(self, num_drafts: int, num_rows: int, num_passes: int) -> float:
        self.num_asked += 1
        return self.times[num_drafts]


@examples(40)
@given(offers)
def test_the_first_n_are_the_best_n(rows):
    menu = make_menu(rows)
    ranking = menu.ranking(menu.deepest)
    assert len(ranking) == sum(most for most, _, _ in rows)
    best: dict[int, float] = {}
    for shares in product(*(range(most + 1) for most, _, _ in rows)):
        num = sum(shares)
        best[num] = max(best.get(num, 0.0), gain_of(rows, list(shares)))
    for num in range(1, len(ranking) + 1):
        gain, num_rows = ranking.first(num)
        shares = menu.split(ranking, num)
        assert gain == pytest.approx(best[num])
        assert gain_of(rows, shares) == pytest.approx(best[num])
        assert sum(shares) == num
        assert sum(share > 0 for share in shares) == num_rows
        assert all(share <= most for share, (most, _, _) in zip(shares, rows, strict=True))


def test_rows_that_are_alike_are_served_in_their_order():
    menu = make_menu([(2, 12, 1.0)] * 4)
    ranking = menu.ranking(menu.deepest)
    assert menu.split(ranking, 3) == [1, 1, 1, 0]
    assert menu.split(ranking, 6) == [2, 2, 1, 1]


def test_a_stream_that_is_behind_comes_first():
    menu = make_menu([(2, 16, 1.0), (2, 16, 2.0)])
    assert menu.split(menu.ranking(menu.deepest), 2) == [0, 2]


def test_an_empty_menu_has_no_drafts():
    menu = make_menu([(0, 16, 1.0)])
    assert menu.deepest == 0
    assert len(menu.ranking(menu.deepest)) == 0
    assert GoodputSearch(Ranking([]), Curve([1.0]), value=1.0, num_passes=0).best(0) is None


@examples(100)
@given(
    most=st.integers(1, 16),
    level=st.integers(0, LEVELS - 1),
    num_rows=st.integers(1, 40),
    fixed=st.sampled_from([0.0, 0.2, 1.0]),
    per_draft=st.sampled_from([0.0, 0.003, 0.02, 0.2]),
    bend=st.sampled_from([0.0, 1e-4, 1e-2]),
)
def test_search_finds_the_peak_behind_a_fixed_cost(most, level, num_rows, fixed, per_draft, bend):
    ranking = make_menu([(most, level, 1.0)] * num_rows).ranking(most)
    curve = Curve([1.0] + [1.0 + fixed + per_draft * n + bend * n**2 for n in range(1, len(ranking) + 1)])
    choice = GoodputSearch(ranking, curve, value=float(num_rows), num_passes=0).best(len(ranking))
    goodputs = [(num_rows + ranking.first(num)[0]) / curve.times[num] for num in range(1, len(ranking) + 1)]
    assert choice is not None
    assert choice.goodput == pytest.approx(max(goodputs), rel=2e-3)
    assert goodputs[choice.num_drafts - 1] == pytest.approx(choice.goodput)
    assert curve.num_asked <= 4 * len(ranking).bit_length() + 4


def test_search_stays_within_what_the_budget_allows():
    ranking = make_menu([(8, 22, 1.0)] * 10).ranking(8)
    curve = Curve([1.0] + [1.0 if n <= 37 else inf for n in range(1, 81)])
    choice = GoodputSearch(ranking, curve, value=10.0, num_passes=0).best(80)
    assert choice is not None
    assert choice.num_drafts == 37
    assert GoodputSearch(ranking, Curve([1.0] + [inf] * 80), value=10.0, num_passes=0).best(80) is None
