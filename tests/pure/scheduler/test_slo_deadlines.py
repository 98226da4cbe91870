"""Deadlines of tokens, and when a promise is broken for good."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.slo import SLO, SLOMode
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.deadlines import (
    BEST_EFFORT_RANK,
    LATE_TOKENS_IN,
    USUAL_OUTPUT_TOKENS,
    EarliestDeadline,
    due_times,
    give_up,
    note_delivery,
    queue_rank,
    set_deadlines,
)
from tests.pure.scheduler.timed import make_request

ARRIVAL = 10.0


def make_state(slo: SLO | None, *, max_tokens: int = 10, max_model_len: int = 100_000) -> RequestState:
    request = make_request("r", 100, max_tokens, slo=slo, arrival=ARRIVAL)
    state = RequestState(request, sort_key=(0.0, ARRIVAL, 0), max_model_len=max_model_len)
    set_deadlines(state)
    return state


def deadlines_after(state: RequestState, mode: SLOMode, *times: float) -> list[float]:
    """Deliver tokens at these times; return the deadline after each."""
    result = []
    for time in times:
        note_delivery(state, time, mode)
        result.append(state.next_deadline)
    return result


class TestDueTimes:
    @pytest.mark.parametrize(
        ("slo", "expected"),
        [
            (None, (inf, inf)),
            (SLO(), (inf, inf)),
            (SLO(ttft=2.0), (12.0, inf)),
            (SLO(tbt=0.1), (inf, 0.1)),
            (SLO(ttft=2.0, tbt=0.1), (12.0, 0.1)),
        ],
    )
    def test_ttft_and_tbt_as_stated(self, slo, expected):
        assert due_times(make_request("r", 100, 10, slo=slo, arrival=ARRIVAL)) == expected

    def test_an_e2e_objective_alone_gives_half_to_the_prompt_and_half_to_the_tokens(self):
        request = make_request("r", 100, 40, slo=SLO(e2e=8.0), arrival=ARRIVAL)
        assert due_times(request) == (pytest.approx(ARRIVAL + 4.0), pytest.approx(0.1))

    def test_expected_lengths_are_better_than_the_most_that_is_allowed(self):
        request = make_request("r", 100, 40, slo=SLO(e2e=8.0), arrival=ARRIVAL)
        assert due_times(request, 8) == (pytest.approx(ARRIVAL + 4.0), pytest.approx(0.5))

    def test_a_request_that_may_go_on_for_ever_is_taken_to_be_usual(self):
        request = make_request("r", 100, 1_000_000, slo=SLO(e2e=8.0), arrival=ARRIVAL)
        assert due_times(request)[1] == pytest.approx(4.0 / USUAL_OUTPUT_TOKENS)

    def test_a_tighter_tbt_leaves_more_of_the_e2e_to_the_prompt(self):
        request = make_request("r", 100, 40, slo=SLO(tbt=0.05, e2e=8.0), arrival=ARRIVAL)
        assert due_times(request) == (pytest.approx(ARRIVAL + 8.0 - 40 * 0.05), 0.05)

    def test_of_two_deadlines_the_earlier_counts(self):
        ttft_first = SLO(ttft=1.0, tbt=5.0, e2e=8.0)
        e2e_first = SLO(ttft=7.0, tbt=0.19, e2e=8.0)
        assert due_times(make_request("r", 100, 40, slo=ttft_first)) == (1.0, pytest.approx(0.1))
        assert due_times(make_request("r", 100, 40, slo=e2e_first)) == (
            pytest.approx(4.0),
            pytest.approx(0.1),
        )

    @given(
        ttft=st.none() | st.floats(1e-3, 100),
        tbt=st.none() | st.floats(1e-3, 10),
        e2e=st.floats(1e-3, 1000),
        num_tokens=st.integers(1, 1000),
    )
    def test_a_request_that_keeps_each_deadline_keeps_its_e2e_objective(self, ttft, tbt, e2e, num_tokens):
        request = make_request("r", 10, num_tokens, slo=SLO(ttft=ttft, tbt=tbt, e2e=e2e), arrival=ARRIVAL)
        first, gap = due_times(request, num_tokens)
        assert first + gap * (num_tokens - 1) <= (ARRIVAL + e2e) * (1 + 1e-12)
        assert ttft is None or first <= ARRIVAL + ttft
        assert tbt is None or gap <= tbt


class TestStream:
    def test_a_first_token_that_comes_early_keeps_its_slack(self):
        state = make_state(SLO(ttft=2.0, tbt=0.1))
        assert state.next_deadline == 12.0
        assert deadlines_after(state, "stream", 10.5, 10.6, 12.1) == pytest.approx([12.1, 12.2, 12.3])

    def test_a_first_token_that_comes_late_ends_the_promise(self):
        state = make_state(SLO(ttft=2.0, tbt=0.1))
        assert note_delivery(state, 12.5, "stream")
        assert state.is_best_effort
        assert deadlines_after(state, "stream", 12.6) == [inf]

    def test_without_a_ttft_objective_deadlines_begin_with_the_first_token(self):
        state = make_state(SLO(tbt=0.1))
        assert deadlines_after(state, "stream", 50.0, 50.02) == pytest.approx([50.1, 50.2])
        assert not state.is_best_effort

    def test_without_a_tbt_objective_only_the_first_token_is_due(self):
        state = make_state(SLO(ttft=2.0))
        assert deadlines_after(state, "stream", 11.0, 99.0) == [inf, inf]
        assert not state.is_best_effort
        assert state.num_late_tokens == 0

    @given(
        ttft=st.floats(0.1, 5),
        tbt=st.floats(0.01, 1),
        first=st.floats(0.0, 1.0),
        count=st.integers(1, 50),
    )
    def test_token_k_is_due_k_intervals_after_the_first_deadline(self, ttft, tbt, first, count):
        state = make_state(SLO(ttft=ttft, tbt=tbt), max_tokens=100)
        start = state.ttft_deadline
        deadlines_after(state, "stream", *[ARRIVAL + first * ttft] * count)
        assert state.next_deadline == pytest.approx(start + count * tbt)


class TestGap:
    def test_each_token_is_due_an_interval_after_the_one_before(self):
        state = make_state(SLO(ttft=2.0, tbt=0.1))
        assert deadlines_after(state, "gap", 10.5, 10.55, 10.56) == pytest.approx([10.6, 10.65, 10.66])

    def test_a_late_token_does_not_make_the_next_ones_late(self):
        state = make_state(SLO(ttft=2.0, tbt=0.1), max_tokens=1000)
        assert deadlines_after(state, "gap", 10.5, 11.0) == pytest.approx([10.6, 11.1])
        assert state.num_late_tokens == 1
        assert not state.is_best_effort


class TestGivingUp:
    @pytest.mark.parametrize("mode", ["stream", "gap"])
    @pytest.mark.parametrize("max_tokens", [50, 100, 250, 1000])
    def test_one_token_in_a_hundred_may_be_late_and_no_more(self, mode, max_tokens):
        state = make_state(SLO(ttft=2.0, tbt=0.1), max_tokens=max_tokens)
        note_delivery(state, 11.0, mode)
        num_allowed = max_tokens // LATE_TOKENS_IN
        for _ in range(num_allowed):
            assert not note_delivery(state, state.next_deadline + 1.0, mode)
        assert not state.is_best_effort
        assert note_delivery(state, state.next_deadline + 1.0, mode), "this one breaks the promise"
        assert state.is_best_effort
        assert state.next_deadline == inf

    def test_a_promise_is_broken_once(self):
        state = make_state(SLO(ttft=2.0, tbt=0.1))
        assert [note_delivery(state, 50.0 + index, "stream") for index in range(4)] == [True] + 3 * [False]

    def test_the_context_bounds_the_tokens_that_may_be_late(self):
        state = make_state(SLO(ttft=2.0, tbt=0.1), max_tokens=1000, max_model_len=150)
        note_delivery(state, 11.0, "stream")
        assert note_delivery(state, 99.0, "stream"), "1 of 50 tokens is 2 %"

    def test_a_token_on_its_deadline_is_in_time(self):
        state = make_state(SLO(ttft=2.0, tbt=0.1))
        assert not note_delivery(state, 12.0, "stream")
        assert not note_delivery(state, state.next_deadline, "stream")
        assert state.num_late_tokens == 0


class TestQueueRank:
    def test_deadlines_come_first_and_best_effort_last_by_arrival(self):
        order = EarliestDeadline()
        tight, loose, none = (
            make_request("r", 9, 9, slo=slo) for slo in (SLO(ttft=1.0), SLO(ttft=9.0), None)
        )
        assert order.rank(tight) < order.rank(loose) < order.rank(none) == BEST_EFFORT_RANK

    def test_whoever_is_given_up_loses_its_place(self):
        state = make_state(SLO(ttft=2.0))
        assert queue_rank(state) == 12.0
        give_up(state)
        assert queue_rank(state) == BEST_EFFORT_RANK
