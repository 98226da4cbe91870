"""Which prompts can all be in time."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.slo import ShedMode, ShedOrder
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.composer import StepRules
from onbeat.scheduler.triage import CostModel, DueWork, select_feasible
from tests.pure.scheduler.timed import FakeStepTime, make_config, make_request, make_state

sizes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 15)), max_size=8)
"""(deadline, seconds); whole numbers, so that sums are exact."""


def make_jobs(pairs, *, weights=None, shed=ShedMode.RELEGATE) -> list[DueWork[RequestState]]:
    jobs = []
    for index, (deadline, seconds) in enumerate(sorted(pairs)):
        weight = weights[index] if weights else 1.0
        request = make_request(f"r{index}", 10, 1, weight=weight, shed=shed)
        state = make_state(request, sort_key=(float(deadline), 0.0, index))
        jobs.append(DueWork(float(deadline), float(seconds), state))
    return jobs


def cost_of(job: DueWork[RequestState], order: ShedOrder = "most") -> float | None:
    cost_model = CostModel(FakeStepTime(), None)
    rules = StepRules(make_config(shed_order=order), cost_model, lambda state: state.request.weight)
    return rules.cost(job, 10.0)


def all_in_time(jobs, *, start: float = 0.0, share: float = 1.0) -> bool:
    """Whether they are when run by deadline; if any order works, this one does (Jackson 1955)."""
    end = start
    for job in jobs:
        end += job.seconds / share
        if end > job.deadline:
            return False
    return True


def most_in_time(jobs: list[DueWork[RequestState]], start: float, share: float) -> int:
    for count in range(len(jobs), 0, -1):
        if any(all_in_time(some, start=start, share=share) for some in combinations(jobs, count)):
            return count
    return 0


@given(sizes, st.integers(0, 10), st.sampled_from([1.0, 0.5, 0.25]))
def test_with_equal_worths_no_other_choice_has_more_in_time(pairs, start, share):
    jobs = make_jobs(pairs)
    kept, left_behind = select_feasible(jobs, start=start, share=share, cost=cost_of)
    assert all_in_time(kept, start=start, share=share)
    assert len(kept) == most_in_time(jobs, start, share)
    assert sorted(kept + left_behind, key=jobs.index) == jobs


weight_lists = st.lists(st.sampled_from([0.5, 1.0, 4.0]), min_size=8, max_size=8)


@given(sizes, weight_lists)
def test_whatever_the_weights_nobody_is_left_behind_without_need_or_twice(pairs, weights):
    jobs = make_jobs(pairs, weights=weights)
    kept, left_behind = select_feasible(jobs, start=0.0, share=1.0, cost=cost_of)
    assert sorted(kept + left_behind, key=jobs.index) == jobs
    assert [job.deadline for job in kept] == sorted(job.deadline for job in kept)
    assert all_in_time(kept)
    if all_in_time(jobs):
        assert not left_behind


@given(sizes.filter(bool), weight_lists, st.data())
def test_whoever_is_kept_would_be_kept_with_more_weight(pairs, weights, data):
    jobs = make_jobs(pairs, weights=weights)
    kept, _ = select_feasible(jobs, start=0.0, share=1.0, cost=cost_of)
    index = data.draw(st.integers(0, len(jobs) - 1))
    heavier = make_jobs(pairs, weights=[w * (8 if i == index else 1) for i, w in enumerate(weights)])
    kept_then, _ = select_feasible(heavier, start=0.0, share=1.0, cost=cost_of)
    if jobs[index] in kept:
        assert heavier[index] in kept_then


def test_of_two_alike_the_heavier_stays():
    for weights, stays in (((1.0, 3.0), "r1"), ((3.0, 1.0), "r0")):
        jobs = make_jobs([(10, 8), (10, 8)], weights=weights)
        kept, _ = select_feasible(jobs, start=0.0, share=1.0, cost=cost_of)
        assert [job.state.request_id for job in kept] == [stays]


def test_a_long_prompt_of_weight_can_outlast_short_ones():
    jobs = make_jobs([(10, 8), (10, 4)], weights=[3.0, 1.0])  # sorted: the 4 s one comes first
    kept, _ = select_feasible(jobs, start=0.0, share=1.0, cost=cost_of)
    assert [job.seconds for job in kept] == [4.0]
    jobs = make_jobs([(10, 4), (10, 8)], weights=[1.0, 3.0])
    kept, _ = select_feasible(jobs, start=0.0, share=1.0, cost=cost_of)
    assert [job.seconds for job in kept] == [8.0]


def test_several_of_little_worth_are_left_behind_for_one_of_much():
    jobs = make_jobs([(10, 3), (10, 4), (11, 9)], weights=[1.0, 1.0, 9.0])
    kept, _ = select_feasible(jobs, start=0.0, share=1.0, cost=cost_of)
    assert [job.seconds for job in kept] == [9.0]


@given(sizes, sizes, weight_lists)
def test_nobody_is_kept_in_vain_beside_those_whom_nobody_may_judge(fixed, others, weights):
    jobs = sorted(
        make_jobs(fixed, shed=ShedMode.OFF) + make_jobs(others, weights=weights),
        key=lambda job: job.deadline,
    )
    kept, _ = select_feasible(jobs, start=0.0, share=1.0, cost=cost_of)
    end = end_of_fixed = 0.0
    for job in kept:
        end += job.seconds
        if job.state.request.shed is ShedMode.OFF:
            end_of_fixed += job.seconds
            assert end <= job.deadline or end_of_fixed > job.deadline
        else:
            assert end <= job.deadline


def test_a_stream_that_was_preempted_is_never_left_behind():
    jobs = make_jobs([(1, 3), (10, 8), (10, 8)])
    state = jobs[0].state
    state.follow(state.num_tokens + 1, 0, 0)
    kept, left_behind = select_feasible(jobs, start=0.0, share=1.0, cost=cost_of)
    assert kept == jobs[:1]
    assert left_behind == jobs[1:]


def test_nobody_is_left_behind_for_one_that_is_late_without_the_others():
    (late,) = make_jobs([(10, 12)], shed=ShedMode.OFF)
    jobs = [*make_jobs([(9, 2), (10, 3)]), late]
    kept, left_behind = select_feasible(jobs, start=0.0, share=1.0, cost=cost_of)
    assert kept == jobs
    assert not left_behind


@given(sizes, sizes)
def test_those_whom_nobody_may_judge_are_never_left_behind(fixed, others):
    jobs = sorted(
        make_jobs(fixed, shed=ShedMode.OFF) + make_jobs(others, shed=ShedMode.REJECT),
        key=lambda job: job.deadline,
    )
    kept, left_behind = select_feasible(jobs, start=0.0, share=1.0, cost=cost_of)
    assert all(job.state.request.shed is not ShedMode.OFF for job in left_behind)
    assert sum(job.state.request.shed is ShedMode.OFF for job in kept) == len(fixed)


class TestLongestWait:
    """Of those that cannot all be in time, those stay that have waited longest."""

    def make_queue(self, *waits: tuple[float, float, float]) -> list[DueWork[RequestState]]:
        """(arrival, deadline, seconds) of each, by deadline."""
        jobs = []
        for index, (arrival, deadline, seconds) in enumerate(waits):
            request = make_request(f"r{index}", 10, 1, arrival=arrival, shed=ShedMode.RELEGATE)
            jobs.append(DueWork(deadline, seconds, make_state(request)))
        return jobs

    def kept(self, jobs: list[DueWork[RequestState]], order: ShedOrder) -> list[str]:
        kept, _ = select_feasible(jobs, start=10.0, share=1.0, cost=lambda job: cost_of(job, order))
        return [job.state.request_id for job in kept]

    def test_a_long_prompt_that_came_first_stays(self):
        jobs = self.make_queue((0.0, 20.0, 8.0), (5.0, 20.5, 3.0), (6.0, 20.6, 3.0), (7.0, 20.7, 3.0))
        assert self.kept(jobs, "longest-wait") == ["r0"]
        assert self.kept(jobs, "most") == ["r1", "r2", "r3"]

    def test_whoever_came_last_goes_first_though_it_is_due_first(self):
        jobs = self.make_queue((9.0, 18.0, 5.0), (0.0, 20.0, 5.0), (1.0, 21.0, 5.0))
        assert self.kept(jobs, "longest-wait") == ["r1", "r2"]

    def test_weight_counts_as_so_much_more_of_waiting(self):
        jobs = self.make_queue((4.0, 20.0, 8.0), (8.0, 20.0, 8.0))
        assert self.kept(jobs, "longest-wait") == ["r0"]
        heavy = make_request("r1", 10, 1, arrival=8.0, weight=4.0, shed=ShedMode.RELEGATE)
        jobs[1] = DueWork(20.0, 8.0, make_state(heavy))
        assert self.kept(jobs, "longest-wait") == ["r1"]

    @given(
        st.lists(st.tuples(st.integers(0, 9), st.integers(10, 40), st.integers(1, 15)), max_size=8),
    )
    def test_all_kept_are_in_time_and_nobody_goes_without_need(self, waits):
        jobs = self.make_queue(*sorted(waits, key=lambda each: each[1]))
        kept, left_behind = select_feasible(
            jobs, start=10.0, share=1.0, cost=lambda job: cost_of(job, "longest-wait")
        )
        assert all_in_time(kept, start=10.0)
        assert sorted(kept + left_behind, key=jobs.index) == jobs
        assert bool(left_behind) == (not all_in_time(jobs, start=10.0))

    @given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 15)), max_size=8, unique_by=lambda p: p[0]))
    def test_where_each_prompt_is_due_as_long_after_its_arrival_the_first_feasible_one_stays(self, pairs):
        """So a long prompt cannot be put off for ever by short ones that come later."""
        jobs = self.make_queue(*sorted((float(wait), wait + 50.0, float(size)) for wait, size in pairs))
        kept, _ = select_feasible(jobs, start=50.0, share=1.0, cost=lambda job: cost_of(job, "longest-wait"))
        first = next((job for job in jobs if 50.0 + job.seconds <= job.deadline), None)
        assert kept[:1] == ([] if first is None else [first])
