"""What prompts cost, and what steps with them take."""

from __future__ import annotations

from math import inf, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.slo import SLO, SLOMode
from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.view import RunningView
from onbeat.scheduler.triage import LEAST_SHARE, CostModel, PrefillShare, drain_seconds
from tests.examples import examples
from tests.pure.scheduler.timed import FakeStepTime, make_request, make_state

models = st.builds(
    FakeStepTime,
    fixed=st.sampled_from([0.0, 1e-4, 2e-3, 2e-2]),
    per_token=st.sampled_from([1e-6, 1e-5, 1e-4]),
    per_context=st.sampled_from([0.0, 1e-7, 1e-6]),
    per_pair=st.sampled_from([0.0, 1e-9, 1e-7]),
    spread=st.sampled_from([0.0, 0.3]),
)


def cost_model_of(model: FakeStepTime, q: float | None = None) -> CostModel:
    return CostModel(model, q)


def chunk_seconds(model: FakeStepTime, num_cached: int, num_tokens: int) -> float:
    """Return the mean time of a step with one chunk alone."""
    shape = BatchShape()
    shape.add(num_cached, num_tokens, samples=True)
    return model.step_time(shape)


def decodes(count: int, context: int = 500) -> BatchShape:
    shape = BatchShape()
    for _ in range(count):
        shape.add(context, 1, samples=True)
    return shape


class TestCostModel:
    """`FakeStepTime` is linear in tokens, quadratic in prompts, with a fixed cost a step."""

    model = FakeStepTime(per_context=0.0)

    @pytest.mark.parametrize("num_cached", [0, 100, 2048, 10_000])
    @pytest.mark.parametrize("num_tokens", [32, 500, 4096])
    def test_finds_the_cost_of_a_model_with_linear_and_quadratic_parts(self, num_tokens, num_cached):
        cost_model = cost_model_of(self.model)
        exact = chunk_seconds(self.model, num_cached, num_tokens)
        assert cost_model.idle_seconds(num_tokens, num_cached) == pytest.approx(exact, rel=0.02, abs=1e-5)
        assert cost_model.seconds(num_tokens, num_cached) == pytest.approx(exact - self.model.fixed, rel=0.02)

    def test_finds_what_a_step_and_a_decode_cost(self):
        model = FakeStepTime()
        cost_model = cost_model_of(model)
        assert cost_model.costs.step == pytest.approx(model.fixed, rel=0.01)
        assert cost_model.costs.decode == pytest.approx(model.per_token + 2048 * model.per_context, rel=0.01)

    def test_times_are_those_of_the_quantile(self):
        mean, high = cost_model_of(FakeStepTime(spread=0.4)), cost_model_of(FakeStepTime(spread=0.4), 0.5)
        assert high.seconds(300, 50) == pytest.approx(1.2 * mean.seconds(300, 50))
        assert high.costs.step == pytest.approx(1.2 * mean.costs.step)
        assert high.of(decodes(3)) == pytest.approx(1.2 * mean.of(decodes(3)))
        assert high.efficient_chunk == mean.efficient_chunk

    @pytest.mark.parametrize("ratio", [1, 10, 100])
    def test_a_chunk_is_efficient_where_its_tokens_cost_next_to_the_least(self, ratio):
        model = FakeStepTime(fixed=1e-4 * ratio, per_token=1e-5, per_pair=0.0)
        chunk = cost_model_of(model).efficient_chunk
        per_token = chunk_seconds(model, 0, chunk) / chunk
        best = chunk_seconds(model, 0, 4096) / 4096
        assert per_token <= 1.05 * best
        assert chunk == 32 or chunk_seconds(model, 0, chunk // 2) / (chunk // 2) > 1.05 * best

    @given(models, st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 5000))
    @examples(50)
    def test_a_prompt_in_two_pieces_costs_what_it_costs_whole(self, model, num_cached, first, second):
        cost_model = cost_model_of(model)
        pieces = cost_model.seconds(first, num_cached) + cost_model.seconds(second, num_cached + first)
        assert pieces == pytest.approx(cost_model.seconds(first + second, num_cached))
        assert cost_model.seconds(first, num_cached) >= 0

    def test_a_model_that_learns_is_asked_again(self):
        model = FakeStepTime()
        cost_model = cost_model_of(model)
        before = cost_model.seconds(1000, 0)
        model.per_token *= 2
        model.per_pair *= 2
        assert cost_model.seconds(1000, 0) == before
        for _ in range(40):
            cost_model.count()
        assert cost_model.seconds(1000, 0) == pytest.approx(2 * before, rel=0.01)

    def test_it_is_asked_once_in_so_many_steps_or_when_somebody_wants_to_know(self):
        model = CountingModel()
        cost_model = cost_model_of(model)
        num_questions = model.num_asked
        cost_model.catch_up()
        assert model.num_asked == num_questions, "it has learnt nothing since"
        for _ in range(8):
            cost_model.count()
        assert model.num_asked == num_questions
        cost_model.catch_up()
        assert model.num_asked == 2 * num_questions
        for _ in range(15):
            cost_model.count()
        assert model.num_asked == 2 * num_questions
        cost_model.count()
        assert model.num_asked == 3 * num_questions

    @given(st.lists(st.integers(0, 40), max_size=12))
    @examples(50)
    def test_steps_that_are_counted_at_once_count_as_single_ones(self, runs):
        at_once, singly = cost_model_of(FakeStepTime()), cost_model_of(FakeStepTime())
        for num_steps in runs:
            for _ in range(num_steps):
                singly.count()
            while num_steps:
                at_once.count(counted := min(num_steps, at_once.num_left))
                num_steps -= counted
            assert at_once.num_left == singly.num_left

    @given(st.integers(0, 100), st.integers(0, 3000), st.floats(0.0, 0.5))
    @examples(50)
    def test_a_chunk_joins_within_the_limit_and_one_token_more_does_not(self, num, num_cached, limit):
        cost_model, shape = cost_model_of(FakeStepTime(spread=0.3), 0.95), decodes(num)
        num_tokens = cost_model.max_chunk(shape, num_cached, limit)

        def with_chunk(count):
            trial = shape.copy()
            trial.add(num_cached, count, samples=True)
            return cost_model.of(trial)

        assert num_tokens == 0 or with_chunk(num_tokens) <= limit
        assert with_chunk(num_tokens + 1) > limit


class CountingModel(FakeStepTime):
    """Counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        self.num_asked += 1
        return super().step_time(shape, q)


limits = st.floats(1e-3, 10.0) | st.just(inf)
ttfts = st.floats(1e-2, 100.0) | st.just(inf)


class TestPrefillShare:
    @given(models, st.integers(0, 300), limits, ttfts)
    @examples(100)
    def test_is_a_share_of_a_step_within_the_limit_with_at_least_an_efficient_chunk(
        self, model, num, limit, ttft
    ):
        cost_model = cost_model_of(model)
        prefill = cost_model.prefill_share(decodes(num), limit, ttft)
        assert LEAST_SHARE <= prefill.share <= 1.0
        assert 0 < prefill.length <= limit
        assert prefill.chunk >= cost_model.efficient_chunk

    @pytest.mark.parametrize("ttft", [0.1, inf])
    def test_an_efficient_chunk_is_enough_where_nothing_asks_for_more(self, ttft):
        model = FakeStepTime(per_pair=0.0, per_context=0.0)
        cost_model = cost_model_of(model)
        prefill = cost_model.prefill_share(decodes(10), inf, ttft)
        assert prefill.chunk == cost_model.efficient_chunk
        step = decodes(10)
        step.add(0, prefill.chunk, samples=True)
        assert prefill.length == model.step_time(step)
        assert prefill.share == pytest.approx(prefill.chunk * model.per_token / prefill.length)

    @pytest.mark.parametrize("ttft", [50.0, 200.0])
    def test_steps_grow_with_the_root_of_what_arrivals_can_wait(self, ttft):
        """There the time lost to what each step costs, and the wait of arrivals, are least together."""
        model = FakeStepTime(fixed=1e-2, per_token=1e-4, per_pair=0.0, per_context=0.0)
        cost_model = cost_model_of(model)
        prefill = cost_model.prefill_share(decodes(0), inf, ttft)
        assert prefill.length == pytest.approx(sqrt(1e-2 * ttft), rel=0.01)
        assert chunk_seconds(model, 0, prefill.chunk) == pytest.approx(prefill.length, rel=0.01)

        def lost(length: float) -> float:
            return float(cost_model.costs.step / length + length / ttft)

        assert all(lost(prefill.length) <= lost(factor * prefill.length) for factor in (0.5, 0.9, 1.1, 2.0))

    @pytest.mark.parametrize("limit", [5e-3, 2e-2])
    def test_a_limit_makes_them_shorter_and_the_share_less(self, limit):
        model = FakeStepTime(per_pair=0.0, per_context=0.0)
        cost_model = cost_model_of(model)
        free, bound = (cost_model.prefill_share(decodes(10), each, inf) for each in (inf, limit))
        assert bound.length == limit < free.length
        assert bound.share == pytest.approx(1 - model.step_time(decodes(10)) / limit, rel=0.02)
        assert bound.share < free.share

    def test_a_limit_leaves_what_fits_where_short_chunks_cost_as_much_as_long_ones(self):
        class ReadsWeights(FakeStepTime):
            """Less than 512 tokens take the time in which all weights are read."""

            def step_time(self, shape, q=None):
                return 0.1 + 1e-4 * max(0, shape.num_new_tokens - 512)

        cost_model = cost_model_of(ReadsWeights())
        prefill = cost_model.prefill_share(decodes(10), 0.11, inf)
        assert prefill.length == 0.11
        fits = 512 + 100 - 10
        assert prefill.share == pytest.approx(cost_model.seconds(fits, 0) / 0.11, rel=0.01)

    @pytest.mark.parametrize(("cap", "ttft"), [(64, inf), (64, 2.0), (600, inf), (600, 50.0)])
    def test_a_cap_of_tokens_bounds_a_step_as_a_limit_does(self, cap, ttft):
        """Such a step takes as long as the model says, whatever would be better without the cap."""
        model = FakeStepTime(fixed=1e-2, per_token=1e-4, per_pair=0.0, per_context=0.0)
        prefill = CostModel(model, None, cap).prefill_share(decodes(10), inf, ttft)
        assert prefill.chunk == cap - 10
        assert prefill.length == pytest.approx(1e-2 + 1e-4 * cap)
        assert prefill.share == pytest.approx(1e-4 * (cap - 10) / prefill.length)

    def test_a_cap_that_nothing_reaches_changes_nothing(self):
        cost_model = CostModel(FakeStepTime(), None, 8192)
        assert cost_model.prefill_share(decodes(10), inf, 0.5) == cost_model_of(FakeStepTime()).prefill_share(
            decodes(10), inf, 0.5
        )

    def test_some_time_is_counted_on_however_little_is_left(self):
        model = FakeStepTime(per_context=0.0)
        shape = decodes(50)
        assert cost_model_of(model).prefill_share(shape, model.step_time(shape), inf).share == LEAST_SHARE

    @given(models, st.integers(1, 200), limits, st.floats(1.0, 3.0))
    @examples(50)
    def test_a_longer_step_leaves_a_larger_share_and_more_decodes_a_smaller(self, model, num, limit, factor):
        cost_model = cost_model_of(model)
        share = cost_model.prefill_share(decodes(num), limit, inf).share
        assert cost_model.prefill_share(decodes(num), factor * limit, inf).share >= share - 1e-12
        assert cost_model.prefill_share(decodes(2 * num), limit, inf).share <= share + 1e-12

    @given(st.floats(1e-4, 10.0), st.floats(1e-3, 1.0), st.floats(0.05, 1.0))
    def test_work_is_done_by_its_share_of_the_time_and_one_fixed_part_more(self, seconds, length, share):
        prefill = PrefillShare(100, length, share)
        latest = seconds / share + prefill.fixed_seconds
        assert seconds / share * (1 - 1e-9) <= drain_seconds(prefill, seconds) <= latest * (1 + 1e-9)

    def test_draining_counts_each_step_that_it_takes(self):
        assert drain_seconds(PrefillShare(100, 0.1, 0.5), 0.5) == pytest.approx(0.5 + 10 * 0.05)
        assert drain_seconds(PrefillShare(100, 0.1, 0.5), 0.51) == pytest.approx(0.51 + 11 * 0.05)
        assert drain_seconds(PrefillShare(100, 0.1, 1.0), 0.5) == pytest.approx(0.5)


class TestRunningView:
    def make_stream(
        self,
        name: str,
        slo: SLO | None,
        *,
        mode: SLOMode = "stream",
        delivered: float = 0.0,
    ) -> RequestState:
        """A stream whose first token came so many seconds after its arrival at 0."""
        state = make_state(make_request(name, 10, 50, slo=slo), mode=mode)
        state.num_tokens, state.num_computed_tokens = 11, 10
        state.slo.note_delivery(delivered)
        return state

    def test_the_earliest_deadline_is_due_even_if_it_has_passed(self):
        late = self.make_stream("late", SLO(ttft=1.0, tbt=0.1))
        last = self.make_stream("last", SLO(ttft=3.0, tbt=0.05))
        view = RunningView([last, late], 1.5, 0.0)
        assert view.deadline == pytest.approx(1.1)
        assert view.urgent is late
        assert view.tightest == 0.05
        assert view.streams == [last, late]
        assert view.deadlines == pytest.approx([3.05, 1.1])

    @pytest.mark.parametrize("paced_first", [False, True])
    def test_a_pace_counts_whatever_the_order(self, paced_first):
        paced = self.make_stream("paced", SLO(e2e=6.0))
        tight = self.make_stream("tight", SLO(ttft=1.0, tbt=0.05))
        view = RunningView([paced, tight] if paced_first else [tight, paced], 0.0, 0.0)
        assert (view.tightest, view.paces) == (0.05, [paced.slo.tbt])
        assert paced.slo.tbt > view.tightest

    def test_an_objective_that_no_step_can_keep_binds_none(self):
        fast, paced = self.make_stream("fast", SLO(ttft=1.0, tbt=0.01)), self.make_stream("p", SLO(e2e=0.1))
        usual = self.make_stream("usual", SLO(ttft=2.0, tbt=0.05))
        view = RunningView([fast, usual, paced], 0.0, shortest=0.02)
        assert (view.streams, view.best_effort_decodes) == ([usual, paced], [fast])
        assert view.tightest == 0.05

    def test_who_has_no_deadline_is_loose_and_who_wants_more_is_a_prefill(self):
        loose, missed = self.make_stream("loose", None), self.make_stream("missed", SLO(ttft=1.0, tbt=0.1))
        missed.slo.relegate()
        prefill = self.make_stream("prefill", SLO(ttft=1.0))
        prefill.num_computed_tokens = 3
        view = RunningView([loose, prefill, missed], 0.0, 0.0)
        assert (view.streams, view.best_effort_decodes, view.prefills) == ([], [loose, missed], [prefill])
        assert view.deadline == view.tightest == inf
        assert view.urgent is None

    @pytest.mark.parametrize(("mode", "due"), [("stream", 1.2), ("gap", 0.65)])
    def test_a_token_in_flight_counts_as_delivered_when_the_step_starts(self, mode, due):
        state = self.make_stream("a", SLO(ttft=1.0, tbt=0.1), mode=mode, delivered=0.5)
        state.num_in_flight_tokens, state.num_computed_tokens = 1, 11
        assert RunningView([state], 0.55, 0.0).deadline == pytest.approx(due)

    @pytest.mark.parametrize(("mode", "due"), [("stream", 1.2), ("gap", 0.65)])
    def test_drafts_in_flight_do_not(self, mode, due):
        """All of three may be rejected."""
        state = self.make_stream("a", SLO(ttft=1.0, tbt=0.1), mode=mode, delivered=0.5)
        state.num_in_flight_tokens, state.num_in_flight_drafts = 4, 3
        state.num_computed_tokens = 14
        assert RunningView([state], 0.55, 0.0).deadline == pytest.approx(due)

    def test_whoever_waits_for_its_step_or_has_its_last_token_in_flight_is_left_out(self):
        held, full = (self.make_stream(name, SLO(tbt=0.1)) for name in ("held", "full"))
        held.is_in_flight = True
        full.num_tokens, full.num_computed_tokens, full.num_in_flight_tokens = 59, 59, 1
        view = RunningView([held, full], 0.0, 0.0)
        assert (view.streams, view.best_effort_decodes, view.prefills) == ([], [], [])
