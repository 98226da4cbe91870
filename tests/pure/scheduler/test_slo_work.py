"""What prompts cost, and what steps with them take."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.slo import SLO
from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.deadlines import set_deadlines
from onbeat.scheduler.replica.slo.prefill_work import PrefillWork, chunk_seconds
from onbeat.scheduler.replica.slo.step_times import StepTimes
from onbeat.scheduler.replica.slo.view import RunningView
from tests.examples import examples
from tests.pure.scheduler.timed import FakeStepTime, make_request

models = st.builds(
    FakeStepTime,
    fixed=st.sampled_from([0.0, 1e-4, 2e-3, 2e-2]),
    per_token=st.sampled_from([1e-6, 1e-5, 1e-4]),
    per_context=st.sampled_from([0.0, 1e-7, 1e-6]),
    per_pair=st.sampled_from([0.0, 1e-9, 1e-7]),
    spread=st.sampled_from([0.0, 0.3]),
)


def work_of(model: FakeStepTime, q: float | None = None) -> PrefillWork:
    work = PrefillWork()
    work.refresh(model, q)
    return work


def times_of(model: FakeStepTime, q: float | None = None) -> StepTimes:
    return StepTimes(model, work_of(model, q), q)


def decodes(count: int, context: int = 500) -> BatchShape:
    shape = BatchShape()
    for _ in range(count):
        shape.add(context, 1, samples=True)
    return shape


class TestPrefillWork:
    """`FakeStepTime` is linear in tokens, quadratic in prompts, with a fixed cost a step."""

    model = FakeStepTime(per_context=0.0)

    @pytest.mark.parametrize("num_cached", [0, 100, 2048, 10_000])
    @pytest.mark.parametrize("num_tokens", [32, 500, 4096])
    def test_finds_the_cost_of_a_model_with_linear_and_quadratic_parts(self, num_tokens, num_cached):
        work = work_of(self.model)
        exact = chunk_seconds(self.model, num_cached, num_tokens, None)
        assert work.idle_seconds(num_tokens, num_cached) == pytest.approx(exact, rel=0.02, abs=1e-5)
        assert work.seconds(num_tokens, num_cached) == pytest.approx(exact - self.model.fixed, rel=0.02)
        assert work.recompute_seconds(num_cached, num_tokens) == work.idle_seconds(num_tokens, num_cached)

    def test_finds_what_a_step_and_a_decode_cost(self):
        model = FakeStepTime()
        work = work_of(model)
        assert work.step_seconds == pytest.approx(model.fixed, rel=0.01)
        assert work.shortest_step == pytest.approx(model.smallest_step)
        assert work.decode_seconds == pytest.approx(model.per_token + 1025 * model.per_context)

    def test_times_are_those_of_the_quantile(self):
        mean, high = work_of(FakeStepTime(spread=0.4)), work_of(FakeStepTime(spread=0.4), 0.5)
        assert high.seconds(300, 50) == pytest.approx(1.2 * mean.seconds(300, 50))
        assert high.step_seconds == pytest.approx(1.2 * mean.step_seconds)
        assert high.shortest_step == pytest.approx(1.2 * mean.shortest_step)

    @pytest.mark.parametrize("ratio", [1, 10, 100])
    def test_a_chunk_is_efficient_where_its_tokens_cost_next_to_the_least(self, ratio):
        model = FakeStepTime(fixed=1e-4 * ratio, per_token=1e-5, per_pair=0.0)
        chunk = work_of(model).efficient_chunk
        per_token = chunk_seconds(model, 0, chunk, None) / chunk
        best = chunk_seconds(model, 0, 4096, None) / 4096
        assert per_token <= 1.05 * best
        assert chunk == 32 or chunk_seconds(model, 0, chunk // 2, None) / (chunk // 2) > 1.05 * best

    @given(models, st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 5000))
    @examples(50)
    def test_a_prompt_in_two_pieces_costs_what_it_costs_whole(self, model, num_cached, first, second):
        work = work_of(model)
        pieces = work.seconds(first, num_cached) + work.seconds(second, num_cached + first)
        assert pieces == pytest.approx(work.seconds(first + second, num_cached))
        assert work.seconds(first, num_cached) >= 0

    def test_a_model_that_learns_is_asked_again(self):
        model = FakeStepTime()
        work = work_of(model)
        before = work.seconds(1000, 0)
        model.per_token *= 2
        model.per_pair *= 2
        for _ in range(40):
            work.refresh(model, None)
        assert work.seconds(1000, 0) == pytest.approx(2 * before, rel=0.01)


class TestStepTimes:
    @given(models, st.integers(0, 300), st.floats(0.0, 10.0) | st.just(inf))
    @examples(100)
    def test_the_share_of_prompts_is_a_share(self, model, num_decodes, budget):
        assert 0.0 <= times_of(model).prefill_share(decodes(num_decodes), budget) <= 1.0

    def test_the_share_is_what_decodes_and_the_step_leave(self):
        model = FakeStepTime(per_pair=0.0, per_context=0.0)
        times, shape = times_of(model), decodes(10)
        assert times.prefill_share(shape, 0.1) == pytest.approx(1 - model.step_time(shape) / 0.1, rel=1e-6)
        assert times.prefill_share(shape, model.step_time(shape)) == pytest.approx(0.0, abs=1e-6)

    @given(models, st.integers(1, 200), st.floats(1e-3, 1.0), st.floats(1.0, 3.0))
    @examples(50)
    def test_a_longer_step_leaves_a_larger_share_and_more_decodes_a_smaller(self, model, num, budget, factor):
        times = times_of(model)
        share = times.prefill_share(decodes(num), budget)
        assert times.prefill_share(decodes(num), factor * budget) >= share - 1e-12
        assert times.prefill_share(decodes(2 * num), budget) <= share + 1e-12

    @given(st.integers(0, 100), st.integers(0, 3000), st.floats(0.0, 0.5))
    @examples(50)
    def test_a_chunk_joins_within_the_limit_and_one_token_more_does_not(self, num, num_cached, limit):
        model = FakeStepTime(spread=0.3)
        times, shape = times_of(model, 0.95), decodes(num)
        num_tokens = times.max_chunk(shape, num_cached, limit)

        def with_chunk(count):
            trial = replace(shape)
            trial.add(num_cached, count, samples=True)
            return times.of(trial)

        assert num_tokens == 0 or with_chunk(num_tokens) <= limit
        assert with_chunk(num_tokens + 1) > limit

    def test_draining_counts_each_step_that_it_takes(self):
        model = FakeStepTime(per_pair=0.0, per_context=0.0)
        times, shape = times_of(model), decodes(10)
        fixed = times.fixed(shape)
        assert times.drain_seconds(0.5, shape, fixed + 0.05) == pytest.approx(0.5 + 10 * fixed, rel=1e-6)
        assert times.drain_seconds(0.5, shape, fixed + 0.25) == pytest.approx(0.5 + 2 * fixed, rel=1e-6)


class TestRunningView:
    def make_stream(self, name: str, slo: SLO | None, *, next_deadline: float | None = None) -> RequestState:
        state = RequestState(make_request(name, 10, 50, slo=slo), sort_key=(0.0,), max_model_len=1000)
        set_deadlines(state)
        state.num_tokens, state.num_computed_tokens = 11, 10
        if next_deadline is not None:
            state.next_deadline = next_deadline
        return state

    def test_the_earliest_deadline_that_can_be_met_bounds_the_step(self):
        slo = SLO(ttft=1.0, tbt=0.1)
        late = self.make_stream("late", slo, next_deadline=1.0)
        next_one = self.make_stream("next", slo, next_deadline=2.0)
        last = self.make_stream("last", SLO(ttft=1.0, tbt=0.05), next_deadline=3.0)
        view = RunningView([last, next_one, late], horizon=1.5)
        assert view.due == 2.0
        assert view.due_state is next_one
        assert view.tightest == 0.05
        assert view.streams == [last, next_one, late]

    def test_who_has_no_deadline_is_loose_and_who_wants_more_is_a_prefill(self):
        loose = self.make_stream("loose", None)
        prefill = self.make_stream("prefill", SLO(ttft=1.0))
        prefill.num_computed_tokens = 3
        view = RunningView([loose, prefill], horizon=0.0)
        assert (view.streams, view.loose, view.prefills) == ([], [loose], [prefill])
        assert view.due == view.tightest == inf

    def test_a_token_in_flight_counts_as_delivered(self):
        state = self.make_stream("a", SLO(ttft=1.0, tbt=0.1), next_deadline=2.0)
        state.num_in_flight_tokens, state.num_computed_tokens = 1, 11
        view = RunningView([state], horizon=0.0)
        assert view.due == pytest.approx(2.1)
