"""The peak of KV memory, against a simulation of every step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onbeat.scheduler.replica.memory_forecast import fits, peak_tokens

Row = tuple[int, int]

row = st.tuples(st.integers(0, 60), st.integers(0, 40))
rows = st.lists(row, max_size=12)


def simulated_peak(rows: list[Row]) -> int:
    """Let all grow by a token a step until they end; look at every step."""
    last = max((remaining for _, remaining in rows), default=0)
    return max(sum(held + step for held, remaining in rows if remaining >= step) for step in range(last + 1))


@given(rows=rows)
def test_is_the_peak_of_a_simulation(rows: list[Row]) -> None:
    assert peak_tokens(rows) == simulated_peak(rows)


@given(rows=rows, newcomer=row, slack=st.integers(-5, 5))
def test_fits_exactly_while_the_peak_does(rows: list[Row], newcomer: Row, slack: int) -> None:
    peak = simulated_peak([*rows, newcomer])
    assert fits(rows, newcomer, peak + slack) == (slack >= 0)


@given(rows=rows, newcomer=row, capacity=st.integers(0, 3000))
def test_fits_at_any_capacity(rows: list[Row], newcomer: Row, capacity: int) -> None:
    assert fits(rows, newcomer, capacity) == (simulated_peak([*rows, newcomer]) <= capacity)


def test_a_request_that_ends_makes_room_before_the_others_have_grown() -> None:
    # 100 + 90 now, 110 + 100 when the second ends, 200 when the first does: never the 300 of both sums.
    assert peak_tokens([(100, 100), (90, 10)]) == 210
    assert fits([(100, 100)], (90, 10), 210)
    assert not fits([(100, 100)], (90, 10), 209)


def test_nothing_needs_nothing() -> None:
    assert peak_tokens([]) == 0
    assert fits([], (7, 3), 10)
    assert not fits([], (7, 3), 9)
