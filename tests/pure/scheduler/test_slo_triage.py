"""Which prompts can all be in time."""

from __future__ import annotations

from itertools import combinations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.slo import ShedMode
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.triage import Job, Worth, needed_share, select_feasible
from tests.pure.scheduler.timed import make_request

sizes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 15)), max_size=8)
"""(deadline, seconds); whole numbers, so that sums are exact."""


def make_jobs(pairs, *, weights=None, shed=ShedMode.RELEGATE) -> list[Job]:
    jobs = []
    for index, (deadline, seconds) in enumerate(sorted(pairs)):
        weight = weights[index] if weights else 1.0
        request = make_request(f"r{index}", 10, 1, weight=weight, shed=shed)
        state = RequestState(request, sort_key=(float(deadline), 0.0, index), max_model_len=100)
        jobs.append(Job(float(deadline), float(seconds), state))
    return jobs


def all_in_time(jobs, *, start: float = 0.0, share: float = 1.0) -> bool:
    """Whether they are when run by deadline; if any order works, this one does (Jackson 1955)."""
    end = start
    for job in jobs:
        end += job.seconds / share
        if end > job.deadline:
            return False
    return True


def most_in_time(jobs: list[Job], start: float, share: float) -> int:
    for count in range(len(jobs), 0, -1):
        if any(all_in_time(some, start=start, share=share) for some in combinations(jobs, count)):
            return count
    return 0


@given(sizes, st.integers(0, 10), st.sampled_from([1.0, 0.5, 0.25]))
def test_with_equal_worths_no_other_choice_has_more_in_time(pairs, start, share):
    jobs = make_jobs(pairs)
    kept, left_behind = select_feasible(jobs, start=start, share=share, worth=Worth())
    assert all_in_time(kept, start=start, share=share)
    assert len(kept) == most_in_time(jobs, start, share)
    assert sorted(kept + left_behind, key=jobs.index) == jobs


weight_lists = st.lists(st.sampled_from([0.5, 1.0, 4.0]), min_size=8, max_size=8)


@given(sizes, weight_lists)
def test_whatever_the_weights_nobody_is_left_behind_without_need_or_twice(pairs, weights):
    jobs = make_jobs(pairs, weights=weights)
    kept, left_behind = select_feasible(jobs, start=0.0, share=1.0, worth=Worth())
    assert sorted(kept + left_behind, key=jobs.index) == jobs
    assert [job.deadline for job in kept] == sorted(job.deadline for job in kept)
    assert all_in_time(kept)
    if all_in_time(jobs):
        assert not left_behind


@given(sizes.filter(bool), weight_lists, st.data())
def test_whoever_is_kept_would_be_kept_with_more_weight(pairs, weights, data):
    jobs = make_jobs(pairs, weights=weights)
    kept, _ = select_feasible(jobs, start=0.0, share=1.0, worth=Worth())
    index = data.draw(st.integers(0, len(jobs) - 1))
    heavier = make_jobs(pairs, weights=[w * (8 if i == index else 1) for i, w in enumerate(weights)])
    kept_then, _ = select_feasible(heavier, start=0.0, share=1.0, worth=Worth())
    if jobs[index] in kept:
        assert heavier[index] in kept_then


def test_of_two_alike_the_heavier_stays():
    for weights, stays in (((1.0, 3.0), "r1"), ((3.0, 1.0), "r0")):
        jobs = make_jobs([(10, 8), (10, 8)], weights=weights)
        kept, _ = select_feasible(jobs, start=0.0, share=1.0, worth=Worth())
        assert [job.state.request_id for job in kept] == [stays]


def test_a_long_prompt_of_weight_can_outlast_short_ones():
    jobs = make_jobs([(10, 8), (10, 4)], weights=[3.0, 1.0])  # sorted: the 4 s one comes first
    kept, _ = select_feasible(jobs, start=0.0, share=1.0, worth=Worth())
    assert [job.seconds for job in kept] == [4.0]
    jobs = make_jobs([(10, 4), (10, 8)], weights=[1.0, 3.0])
    kept, _ = select_feasible(jobs, start=0.0, share=1.0, worth=Worth())
    assert [job.seconds for job in kept] == [8.0]


def test_several_of_little_worth_are_left_behind_for_one_of_much():
    jobs = make_jobs([(10, 3), (10, 4), (11, 9)], weights=[1.0, 1.0, 9.0])
    kept, _ = select_feasible(jobs, start=0.0, share=1.0, worth=Worth())
    assert [job.seconds for job in kept] == [9.0]


@given(sizes, sizes, weight_lists)
def test_nobody_is_kept_in_vain_beside_those_whom_nobody_may_judge(fixed, others, weights):
    jobs = sorted(
        make_jobs(fixed, shed=ShedMode.OFF) + make_jobs(others, weights=weights),
        key=lambda job: job.deadline,
    )
    kept, _ = select_feasible(jobs, start=0.0, share=1.0, worth=Worth())
    end = end_of_fixed = 0.0
    for job in kept:
        end += job.seconds
        if job.state.request.shed is ShedMode.OFF:
            end_of_fixed += job.seconds
            assert end <= job.deadline or end_of_fixed > job.deadline
        else:
            assert end <= job.deadline


def test_nobody_is_left_behind_for_one_that_is_late_without_the_others():
    (late,) = make_jobs([(10, 12)], shed=ShedMode.OFF)
    jobs = [*make_jobs([(9, 2), (10, 3)]), late]
    kept, left_behind = select_feasible(jobs, start=0.0, share=1.0, worth=Worth())
    assert kept == jobs
    assert not left_behind


@given(sizes, sizes)
def test_those_whom_nobody_may_judge_are_never_left_behind(fixed, others):
    jobs = sorted(
        make_jobs(fixed, shed=ShedMode.OFF) + make_jobs(others, shed=ShedMode.REJECT),
        key=lambda job: job.deadline,
    )
    kept, left_behind = select_feasible(jobs, start=0.0, share=1.0, worth=Worth())
    assert all(job.state.request.shed is not ShedMode.OFF for job in left_behind)
    assert sum(job.state.request.shed is ShedMode.OFF for job in kept) == len(fixed)


class TestNeededShare:
    def test_of_nothing_is_nothing(self):
        assert needed_share([], 5.0) == 0.0

    @pytest.mark.parametrize("deadline", [3.0, 2.0])
    def test_is_infinite_where_a_deadline_has_passed(self, deadline):
        assert needed_share(make_jobs([(deadline, 1), (99, 1)]), 3.0) == inf

    def test_is_that_of_the_tightest_deadline(self):
        assert needed_share(make_jobs([(2, 1), (4, 1), (40, 2)]), 0.0) == 0.5
        assert needed_share(make_jobs([(2, 1), (4, 2), (40, 2)]), 0.0) == 0.75

    @given(sizes.filter(bool))
    def test_with_this_share_all_are_in_time_and_with_less_not(self, pairs):
        jobs = make_jobs(pairs)
        share = needed_share(jobs, 0.0)
        assert all_in_time(jobs, share=share * (1 + 1e-9))
        assert not all_in_time(jobs, share=share * (1 - 1e-6))
