"""Deadlines of tokens, and when an objective is missed for good."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.slo import SLO, SLO_MODES, SLOMode
from onbeat.scheduler.replica.request_state import (
    BEST_EFFORT_RANK,
    LATE_TOKENS_IN,
    USUAL_OUTPUT_TOKENS,
    SLOState,
    deadline_and_pace,
    first_deadline,
)
from onbeat.scheduler.replica.steady import note_deliveries
from tests.pure.scheduler import timed
from tests.pure.scheduler.timed import make_request

ARRIVAL = 10.0


def make_state(
    slo: SLO | None, mode: SLOMode = "stream", *, max_tokens: int = 10, max_model_len: int = 100_000
) -> SLOState:
    request = make_request("r", 100, max_tokens, slo=slo, arrival=ARRIVAL)
    return timed.make_state(request, mode=mode, max_model_len=max_model_len).slo


def deadlines_after(state: SLOState, *times: float) -> list[float]:
    """Deliver tokens at these times; return the deadline after each."""
    result = []
    for time in times:
        state.note_delivery(time)
        result.append(state.next_deadline)
    return result


@given(
    slo=st.sampled_from(
        [
            None,
            SLO(ttft=1.0),
            SLO(tbt=0.1),
            SLO(ttft=1.0, tbt=0.1),
            SLO(e2e=20.0),
            SLO(ttft=1.0, e2e=20.0),
            SLO(ttft=1.0, tbt=0.5, e2e=4.0),
        ]
    ),
    mode=st.sampled_from(SLO_MODES),
    gaps=st.lists(st.sampled_from([0.0, 0.03, 0.1, 0.17, 0.9, 3.0]), min_size=2, max_size=30),
    num_before=st.integers(1, 3),
    max_tokens=st.sampled_from([30, 400]),
)
def test_a_run_of_tokens_counts_as_its_tokens_one_by_one(slo, mode, gaps, num_before, max_tokens):
    at_once, one_by_one = (make_state(slo, mode, max_tokens=max_tokens) for _ in range(2))
    times = [ARRIVAL + sum(gaps[: index + 1]) for index in range(len(gaps))]
    num_before = min(num_before, len(times) - 1)
    missed = [one_by_one.note_delivery(time) for time in times]
    missed_at_once = [at_once.note_delivery(time) for time in times[:num_before]]
    missed_at_once.append(note_deliveries(at_once, times[num_before:]))
    assert at_once.deadlines() == one_by_one.deadlines()
    assert sum(missed_at_once) == sum(missed)


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
        assert deadline_and_pace(make_request("r", 100, 10, slo=slo, arrival=ARRIVAL)) == expected

    def test_an_e2e_objective_alone_gives_a_third_to_the_prompt_and_two_thirds_to_the_tokens(self):
        request = make_request("r", 100, 41, slo=SLO(e2e=6.0), arrival=ARRIVAL)
        assert deadline_and_pace(request) == (pytest.approx(ARRIVAL + 2.0), pytest.approx(0.1))

    def test_a_single_token_may_take_all_of_the_e2e_objective(self):
        request = make_request("r", 100, 1, slo=SLO(e2e=6.0), arrival=ARRIVAL)
        assert deadline_and_pace(request)[0] == pytest.approx(ARRIVAL + 6.0)

    def test_what_the_tokens_of_a_short_answer_cannot_need_is_the_prompts(self):
        request = make_request("r", 100, 5, slo=SLO(e2e=6.0), arrival=ARRIVAL)
        assert deadline_and_pace(request, longest_pace=0.1) == (pytest.approx(ARRIVAL + 5.6), 0.1)

    def test_expected_lengths_are_better_than_the_most_that_is_allowed(self):
        request = make_request("r", 100, 40, slo=SLO(e2e=6.0), arrival=ARRIVAL)
        assert deadline_and_pace(request, 9) == (pytest.approx(ARRIVAL + 2.0), pytest.approx(0.5))

    def test_a_request_that_may_go_on_for_ever_is_taken_to_be_usual(self):
        request = make_request("r", 100, 1_000_000, slo=SLO(e2e=6.0), arrival=ARRIVAL)
        assert deadline_and_pace(request)[1] == pytest.approx(4.0 / (USUAL_OUTPUT_TOKENS - 1))

    def test_a_tighter_tbt_leaves_more_of_the_e2e_to_the_prompt(self):
        request = make_request("r", 100, 41, slo=SLO(tbt=0.05, e2e=8.0), arrival=ARRIVAL)
        assert deadline_and_pace(request) == (pytest.approx(ARRIVAL + 8.0 - 40 * 0.05), 0.05)

    def test_of_two_deadlines_the_earlier_counts(self):
        ttft_first = SLO(ttft=1.0, tbt=5.0, e2e=6.0)  # the answer has the 5 s behind it
        e2e_first = SLO(ttft=7.0, tbt=0.14, e2e=6.0)
        assert deadline_and_pace(make_request("r", 100, 41, slo=ttft_first)) == (1.0, pytest.approx(0.125))
        assert deadline_and_pace(make_request("r", 100, 41, slo=e2e_first)) == (
            pytest.approx(2.0),
            pytest.approx(0.1),
        )

    @pytest.mark.parametrize("tbt", [None, 0.125])
    def test_tokens_are_due_no_sooner_than_is_asked_for_however_soon_they_could_come(self, tbt):
        request = make_request("r", 100, 41, slo=SLO(ttft=1.0, tbt=tbt, e2e=6.0), arrival=ARRIVAL)
        assert deadline_and_pace(request, longest_pace=0.01) == (ARRIVAL + 1.0, 0.125)

    @given(
        ttft=st.none() | st.floats(1e-3, 100),
        tbt=st.none() | st.floats(1e-3, 10),
        e2e=st.floats(1e-3, 1000),
        num_tokens=st.integers(1, 1000),
        longest_pace=st.just(inf) | st.floats(1e-3, 10),
    )
    def test_a_request_that_keeps_each_deadline_keeps_its_e2e_objective(
        self, ttft, tbt, e2e, num_tokens, longest_pace
    ):
        request = make_request("r", 10, num_tokens, slo=SLO(ttft=ttft, tbt=tbt, e2e=e2e), arrival=ARRIVAL)
        first, gap = deadline_and_pace(request, num_tokens, longest_pace)
        assert first + gap * (num_tokens - 1) <= (ARRIVAL + e2e) * (1 + 1e-12)
        assert ttft is None or first <= ARRIVAL + ttft
        assert tbt is None or gap <= tbt


class TestStream:
    def test_a_first_token_that_comes_early_keeps_its_slack(self):
        state = make_state(SLO(ttft=2.0, tbt=0.1))
        assert state.next_deadline == 12.0
        assert deadlines_after(state, 10.5, 10.6, 12.1) == pytest.approx([12.1, 12.2, 12.3])

    def test_a_first_token_that_comes_late_misses_the_objective(self):
        state = make_state(SLO(ttft=2.0, tbt=0.1))
        assert state.note_delivery(12.5)
        assert state.is_best_effort
        assert deadlines_after(state, 12.6) == [inf]

    def test_without_a_ttft_objective_deadlines_begin_with_the_first_token(self):
        state = make_state(SLO(tbt=0.1))
        assert deadlines_after(state, 50.0, 50.02) == pytest.approx([50.1, 50.2])
        assert not state.is_best_effort

    def test_without_a_tbt_objective_only_the_first_token_is_due(self):
        state = make_state(SLO(ttft=2.0))
        assert deadlines_after(state, 11.0, 99.0) == [inf, inf]
        assert not state.is_best_effort

    @given(
        ttft=st.floats(0.1, 5),
        tbt=st.floats(0.01, 1),
        first=st.floats(0.0, 1.0),
        count=st.integers(1, 50),
    )
    def test_token_k_is_due_k_intervals_after_the_first_deadline(self, ttft, tbt, first, count):
        state = make_state(SLO(ttft=ttft, tbt=tbt), max_tokens=100)
        start = state.ttft_deadline
        deadlines_after(state, *[ARRIVAL + first * ttft] * count)
        assert state.next_deadline == pytest.approx(start + count * tbt)


class TestGap:
    def test_each_token_is_due_an_interval_after_the_one_before(self):
        state = make_state(SLO(ttft=2.0, tbt=0.1), "gap")
        assert deadlines_after(state, 10.5, 10.55, 10.56) == pytest.approx([10.6, 10.65, 10.66])

    def test_a_late_token_does_not_make_the_next_ones_late(self):
        state = make_state(SLO(ttft=2.0, tbt=0.1), "gap", max_tokens=100)
        assert deadlines_after(state, 10.5, 11.0, 11.1) == pytest.approx([10.6, 11.1, 11.2])
        assert not state.is_best_effort, "one in a hundred may be late"
        assert state.note_delivery(11.3), "this is the second"

    def test_several_tokens_at_once_are_one_gap(self):
        state = make_state(SLO(ttft=2.0, tbt=0.1), "gap", max_tokens=100)
        state.note_delivery(10.5)
        assert not state.note_delivery(20.0, 50)
        assert state.next_deadline == pytest.approx(20.1)


class TestDueWithTokensInFlight:
    """`due`: the deadline of the token that the step to plan will sample."""

    slo = SLO(ttft=2.0, tbt=0.1)

    @pytest.mark.parametrize("mode", SLO_MODES)
    def test_without_any_it_is_the_next_deadline_whenever_the_step_starts(self, mode):
        state = make_state(self.slo, mode)
        assert state.deadline_after(0, 10.0) == state.deadline_after(0, 99.0) == 12.0
        state.note_delivery(10.5)
        assert state.deadline_after(0, 10.0) == state.deadline_after(0, 99.0) == state.next_deadline

    @pytest.mark.parametrize("num_in_flight", [1, 2, 3])
    def test_in_stream_mode_each_moves_it_on_by_an_interval(self, num_in_flight):
        state = make_state(self.slo, "stream")
        assert deadlines_after(state, 10.5) == pytest.approx([12.1])
        assert state.deadline_after(num_in_flight, 10.52) == pytest.approx(12.1 + 0.1 * num_in_flight)

    @pytest.mark.parametrize("num_in_flight", [1, 2, 3])
    def test_in_gap_mode_it_is_an_interval_after_those_have_come_however_early_they_are(self, num_in_flight):
        state = make_state(self.slo, "gap")
        assert deadlines_after(state, 10.5) == pytest.approx([10.6])
        assert state.deadline_after(num_in_flight, 10.52) == pytest.approx(10.62)
        assert state.deadline_after(num_in_flight, 10.7) == pytest.approx(10.8), (
            "though the one in flight will be late"
        )

    @given(first=st.floats(0.0, 2.0), seconds=st.floats(1e-3, 0.2), tbt=st.floats(1e-3, 0.5))
    def test_in_gap_mode_it_is_what_it_will_be_once_the_token_in_flight_has_come(self, first, seconds, tbt):
        state = make_state(SLO(ttft=2.0, tbt=tbt), "gap", max_tokens=1000)
        state.note_delivery(ARRIVAL + first)
        end = ARRIVAL + first + seconds
        expected = state.deadline_after(1, end)
        state.note_delivery(end)
        assert state.next_deadline == pytest.approx(expected)

    @given(first=st.floats(0.0, 2.0), seconds=st.floats(1e-3, 0.2), tbt=st.floats(1e-3, 0.5))
    def test_in_stream_mode_too(self, first, seconds, tbt):
        state = make_state(SLO(ttft=2.0, tbt=tbt), "stream", max_tokens=1000)
        state.note_delivery(ARRIVAL + first)
        expected = state.deadline_after(1, ARRIVAL + first + seconds)
        state.note_delivery(ARRIVAL + first + seconds)
        assert state.next_deadline == pytest.approx(expected)

    @pytest.mark.parametrize("mode", SLO_MODES)
    def test_nothing_is_due_of_best_effort_or_without_an_objective(self, mode):
        state = make_state(self.slo, mode)
        state.relegate()
        assert state.deadline_after(1, 10.0) == make_state(None, mode).deadline_after(1, 10.0) == inf
        no_tbt = make_state(SLO(ttft=2.0), mode)
        no_tbt.note_delivery(11.0)
        assert no_tbt.deadline_after(1, 12.0) == inf


class TestGivingUp:
    @pytest.mark.parametrize("mode", ["stream", "gap"])
    @pytest.mark.parametrize("max_tokens", [50, 100, 250, 1000])
    def test_one_token_in_a_hundred_may_be_late_and_no_more(self, mode, max_tokens):
        state = make_state(SLO(ttft=2.0, tbt=0.1), mode, max_tokens=max_tokens)
        state.note_delivery(11.0)
        num_allowed = max_tokens // LATE_TOKENS_IN
        for _ in range(num_allowed):
            assert not state.note_delivery(state.next_deadline + 1.0)
        assert not state.is_best_effort
        assert state.note_delivery(state.next_deadline + 1.0), "this one misses the objective"
        assert state.is_best_effort
        assert state.next_deadline == inf

    def test_an_objective_is_missed_once(self):
        state = make_state(SLO(ttft=2.0, tbt=0.1))
        assert [state.note_delivery(50.0 + index) for index in range(4)] == [True] + 3 * [False]

    def test_the_context_bounds_the_tokens_that_may_be_late(self):
        state = make_state(SLO(ttft=2.0, tbt=0.1), max_tokens=1000, max_model_len=150)
        state.note_delivery(11.0)
        assert state.note_delivery(99.0), "1 of 50 tokens is 2 %"

    def test_a_token_on_its_deadline_is_in_time(self):
        state = make_state(SLO(ttft=2.0, tbt=0.1))
        assert not state.note_delivery(12.0)
        assert not state.note_delivery(state.next_deadline), "none of 10 may be late"


class TestQueueRank:
    def test_deadlines_come_first_and_best_effort_last_by_arrival(self):
        tight, loose, none = (
            make_request("r", 9, 9, slo=slo) for slo in (SLO(ttft=1.0), SLO(ttft=9.0), None)
        )
        assert first_deadline(tight) < first_deadline(loose) < first_deadline(none) == BEST_EFFORT_RANK

    def test_whoever_is_given_up_loses_its_place(self):
        state = make_state(SLO(ttft=2.0))
        assert state.rank == 12.0
        state.relegate()
        assert state.rank == BEST_EFFORT_RANK

    def test_whoever_waits_again_goes_by_its_next_token(self):
        state = make_state(SLO(ttft=2.0, tbt=0.1))
        state.note_delivery(11.0)
        assert state.rank == pytest.approx(12.1)


class TestLeftOver:
    def test_is_who_has_no_objective_or_has_missed_it(self):
        assert make_state(None).runs_as_best_effort
        assert make_state(SLO()).runs_as_best_effort
        for slo in (SLO(ttft=1.0), SLO(tbt=0.1), SLO(e2e=1.0)):
            state = make_state(slo)
            assert not state.runs_as_best_effort
            state.relegate()
            assert state.runs_as_best_effort


def test_the_pace_of_an_answer_is_what_its_end_leaves_to_the_tokens_still_expected():
    state = make_state(SLO(e2e=6.0), "gap", max_tokens=41)
    state.note_delivery(ARRIVAL + 0.5)
    assert (state.tbt, state.next_deadline) == (
        pytest.approx(5.5 / 40),
        pytest.approx(ARRIVAL + 0.5 + 5.5 / 40),
    )
    state.num_left = 101.0  # it is longer than was thought
    state.note_delivery(ARRIVAL + 0.6)
    assert state.tbt == pytest.approx(5.4 / 100)
    state.note_delivery(ARRIVAL + 5.9)
    assert not state.is_best_effort, "late by its pace, but it may end in time"
    assert state.note_delivery(ARRIVAL + 6.1), "nothing can make up for that"
    assert make_state(SLO(tbt=0.1, e2e=6.0), "gap").tbt == 0.1


class TestTbtBesideE2e:
    """An answer of usual length in 15 s is a token in 58 ms, which nobody has stated: 0.1 s is."""

    SLO = SLO(ttft=2.0, tbt=0.1, e2e=15.0)

    @pytest.mark.parametrize("mode", SLO_MODES)
    def test_what_the_answer_asks_for_is_a_pace(self, mode):
        state = make_state(self.SLO, mode, max_tokens=4000)
        assert state.tbt < 0.06
        assert state.tbt_objective == 0.1

    def test_a_tighter_tbt_is_what_counts(self):
        state = make_state(self.SLO, max_tokens=100)
        assert (state.tbt, state.tbt_objective) == (0.1, 0.1)

    @pytest.mark.parametrize("mode", SLO_MODES)
    def test_one_that_cannot_go_at_the_pace_goes_on_by_its_tbt(self, mode):
        state = make_state(self.SLO, mode, max_tokens=4000)
        times = [ARRIVAL + 0.5 + 0.09 * k for k in range(150)]
        assert not any(state.note_delivery(time) for time in times)
        assert state.objective_deadline == pytest.approx(
            ARRIVAL + 17.0 if mode == "stream" else times[-1] + 0.1
        )
        assert state.num_late_tokens == 0

    def test_it_goes_on_so_on_another_replica(self):
        there, here = (make_state(self.SLO, "gap", max_tokens=4000) for _ in range(2))
        for k in range(150):
            there.note_delivery(ARRIVAL + 0.5 + 0.09 * k)
        here.go_on(there.deadlines())
        here.note_delivery(ARRIVAL + 14.0)
        assert (here.objective_deadline, here.is_best_effort) == (ARRIVAL + 14.1, False)

    def test_who_has_no_tbt_is_best_effort_then(self):
        state = make_state(SLO(e2e=15.0), max_tokens=4000)
        missed = [state.note_delivery(ARRIVAL + 0.5 + 0.5 * k) for k in range(60)]
        assert sum(missed) == 1
        assert state.is_best_effort


def test_a_stream_that_moves_may_have_as_many_late_tokens_as_where_it_was():
    """Where it goes nothing is known of the lengths of its class."""
    there, here = (make_state(SLO(tbt=0.1), max_tokens=50 * LATE_TOKENS_IN) for _ in range(2))
    request = make_request("r", 100, 50 * LATE_TOKENS_IN, slo=SLO(tbt=0.1), arrival=ARRIVAL)
    there.begin(
        request,
        "stream",
        now=ARRIVAL,
        max_output_tokens=LATE_TOKENS_IN,
    )
    there.note_delivery(ARRIVAL + 0.1)
    here.go_on(there.deadlines())
    missed = [here.note_delivery(ARRIVAL + 5.0) for _ in range(2)]
    assert missed == [False, True]
