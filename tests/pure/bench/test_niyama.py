"""Niyama's published rules: chunk sizes by slack, hybrid priorities, eager relegation."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.policies.niyama import (
    CANDIDATES,
    FIRST_THROUGHPUT,
    LOW_MEMORY_CANDIDATES,
    NIYAMA,
    OLD_WEIGHT,
    SAFETY,
    SECONDS_PER_TOKEN,
    hybrid_priority,
    step_tokens,
)
from onbeat.core.errors import ConfigError
from onbeat.core.request import FinishReason
from onbeat.core.slo import SLO, ShedMode
from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.replica.scheduler import Scheduler
from tests.examples import examples
from tests.pure.scheduler.timed import FakeStepTime, TimedDriver, make_config, make_request

LONG = {"num_blocks": 8192, "max_model_len": 8192, "max_num_batched_tokens": 8192}
LOOSE = SLO(ttft=1000.0, tbt=1000.0)


@pytest.fixture(autouse=True, scope="module")
def registered():
    """The scheduler finds a policy of another place by its name, as soon as that stands in its table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(POLICIES, "niyama", NIYAMA)
        yield


def shape_of(num_decodes: int, context: int = 100) -> BatchShape:
    shape = BatchShape()
    for _ in range(num_decodes):
        shape.add(context, 1, samples=True)
    return shape


def driver_for(*requests, model: FakeStepTime | None = None, **changes) -> TimedDriver:
    driver = TimedDriver(make_config("niyama", **changes), model or FakeStepTime())
    for request in requests:
        driver.add(request)
    return driver


def rows_of(driver: TimedDriver, index: int = -1) -> dict[str, int]:
    return {row.request_id: row.num_new_tokens for row in driver.log[index].rows}


def seconds(model: FakeStepTime, decodes: BatchShape, num_cached: int, total: int) -> float:
    trial = BatchShape(**{name: getattr(decodes, name) for name in decodes.__slots__})
    if total > decodes.num_new_tokens:
        trial.add(num_cached, total - decodes.num_new_tokens, samples=True)
    return model.step_time(trial)


class TestStepTokens:
    def test_candidates_are_the_published_ones(self):
        assert CANDIDATES == (128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2552)
        assert LOW_MEMORY_CANDIDATES == (128, 256, 384, 512)

    @pytest.mark.parametrize("slack", [0.0, -1e-9, -5.0])
    def test_without_slack_prompts_still_get_the_smallest_step(self, slack):
        assert step_tokens(FakeStepTime(fixed=0.0), shape_of(4), 0, slack, CANDIDATES) == 128

    @pytest.mark.parametrize("total", CANDIDATES[1:])
    def test_a_step_is_predicted_to_leave_a_sixth_of_the_slack(self, total):
        model, decodes = FakeStepTime(), shape_of(8)
        exact = SAFETY * seconds(model, decodes, 300, total)
        assert SAFETY == 1.2
        assert step_tokens(model, decodes, 300, exact, CANDIDATES) == total
        assert step_tokens(model, decodes, 300, exact * (1 - 1e-9), CANDIDATES) < total

    def test_context_of_the_first_prompt_makes_the_step_shorter(self):
        model = FakeStepTime()
        assert step_tokens(model, shape_of(1), 50_000, 0.2, CANDIDATES) < step_tokens(
            model, shape_of(1), 0, 0.2, CANDIDATES
        )

    @given(
        slack=st.floats(-0.1, 1.0),
        num_decodes=st.integers(0, 300),
        num_cached=st.integers(0, 5000),
        per_token=st.sampled_from([1e-6, 1e-5, 1e-4, 1e-3]),
        candidates=st.sampled_from([CANDIDATES, LOW_MEMORY_CANDIDATES]),
    )
    def test_binary_search_equals_a_linear_scan(self, slack, num_decodes, num_cached, per_token, candidates):
        model, decodes = FakeStepTime(per_token=per_token), shape_of(num_decodes)
        best = candidates[0]
        for total in candidates:
            if slack > 0 and SAFETY * seconds(model, decodes, num_cached, total) <= slack:
                best = total
        assert step_tokens(model, decodes, num_cached, slack, candidates) == best


class TestSteps:
    def test_an_idle_machine_runs_the_largest_step(self):
        driver = driver_for(make_request("a", 6000, 2, slo=LOOSE), **LONG)
        driver.step()
        assert rows_of(driver) == {"a": 2552}

    def test_low_memory_means_small_steps(self):
        # a 32nd of the free tokens is below 1000
        driver = driver_for(make_request("a", 6000, 2, slo=LOOSE), **LONG | {"num_blocks": 1999})
        driver.step()
        assert rows_of(driver) == {"a": 512}

    def test_memory_is_not_low_at_a_thousand(self):
        driver = driver_for(make_request("a", 6000, 2, slo=LOOSE), **LONG | {"num_blocks": 2000})
        driver.step()
        assert rows_of(driver) == {"a": 2552}

    def test_decodes_count_in_the_step_and_late_ones_leave_the_smallest(self):
        tight = SLO(ttft=100.0, tbt=1e-3)
        driver = driver_for(make_request("a", 10, 500, slo=tight), **LONG)
        driver.step()
        driver.now += 200.0  # late for good
        driver.add(make_request("b", 1000, 2, arrival=driver.now, slo=LOOSE))
        driver.step()
        assert rows_of(driver) == {"a": 1, "b": 127}

    def test_banked_slack_is_spent_on_prompts(self):
        """The first token is early by almost all of its second: that is slack for a long step."""
        driver = driver_for(make_request("a", 10, 50, slo=SLO(ttft=1.0, tbt=0.05)), **LONG)
        driver.step()
        driver.add(make_request("b", 6000, 2, arrival=driver.now, slo=LOOSE))
        driver.step()
        assert rows_of(driver) == {"a": 1, "b": 2551}
        assert driver.lateness("a")[-1] < 0

    def test_a_late_first_token_moves_all_deadlines(self):
        driver = driver_for(make_request("a", 10, 50, slo=SLO(ttft=0.01, tbt=0.1)), **LONG)
        driver.now = 5.0
        driver.step()
        first = driver.now
        composer = driver.scheduler.policy.composer
        driver.step()
        state = driver.scheduler.running[0]
        assert state.num_output_tokens == 2
        assert composer.deadline(state) == pytest.approx(first + 2 * 0.1)

    def test_deadlines_are_cumulative_in_gap_mode_too(self):
        driver = driver_for(make_request("a", 10, 50, slo=SLO(ttft=1.0, tbt=0.1)), slo_mode="gap")
        for _ in range(4):
            driver.step()
        assert driver.scheduler.policy.composer.deadline(driver.scheduler.running[0]) == pytest.approx(1.4)


class TestPriority:
    def test_weighs_the_remaining_prompt_against_the_deadline(self):
        short, long = make_request("a", 10, 1, slo=LOOSE), make_request("b", 600, 1, slo=LOOSE)
        assert hybrid_priority(long) - hybrid_priority(short) == pytest.approx(590 * SECONDS_PER_TOKEN)
        assert SECONDS_PER_TOKEN == 0.008
        assert hybrid_priority(make_request("c", 1, 1)) > hybrid_priority(long)

    def test_a_short_prompt_passes_a_long_one_that_has_begun(self):
        driver = driver_for(make_request("long", 6000, 2, slo=LOOSE), **LONG)
        driver.step()
        driver.add(make_request("short", 100, 2, arrival=driver.now, slo=LOOSE))
        driver.step()
        assert rows_of(driver) == {"short": 100, "long": 2452}

    def test_requests_without_objective_come_after_those_with_one_by_arrival(self):
        driver = driver_for(
            make_request("none-1", 100, 2),
            make_request("none-2", 50, 2),
            make_request("later", 900, 2, slo=SLO(ttft=500.0)),
            **LONG,
        )
        driver.step()
        assert list(rows_of(driver)) == ["later", "none-1", "none-2"]


class TestRelegation:
    def test_expected_throughput_starts_as_published_and_follows_slowly(self):
        model = FakeStepTime()
        driver = driver_for(make_request("a", 900, 2, slo=LOOSE), model=model, **LONG)
        composer = driver.scheduler.policy.composer
        assert composer.throughput == FIRST_THROUGHPUT == 8500.0
        driver.step()
        seen = 900 / model.step_time(driver.log[0].shape)
        assert composer.throughput == pytest.approx(OLD_WEIGHT * 8500.0 + (1 - OLD_WEIGHT) * seen)
        assert OLD_WEIGHT == 0.995

    def test_who_cannot_be_in_time_falls_behind_all_others_once(self):
        driver = driver_for(
            make_request("infeasible", 1000, 2, slo=SLO(ttft=0.1)),  # 1000 / 8500 s are more
            make_request("fine", 900, 2, slo=SLO(ttft=900.0)),
            make_request("none", 100, 2),
            **LONG,
        )
        driver.step()
        assert list(rows_of(driver)) == ["fine", "none", "infeasible"]
        assert driver.scheduler.planner.num_relegated == 1
        driver.serve([])
        assert driver.scheduler.planner.num_relegated == 1
        assert driver.finished["infeasible"] is FinishReason.LENGTH

    def test_relegated_ones_wait_for_all_others_in_later_steps(self):
        few = {"num_blocks": 64, "max_num_seqs": 1}
        driver = driver_for(make_request("running", 10, 5, slo=LOOSE), **few)
        driver.step()
        driver.add(make_request("infeasible", 900, 2, arrival=driver.now, slo=SLO(ttft=0.01)))
        driver.step()
        driver.add(make_request("fine", 10, 2, arrival=driver.now, slo=LOOSE))
        driver.serve([])
        assert driver.finish_order == ["running", "fine", "infeasible"]
        assert driver.scheduler.planner.num_relegated == 1

    def test_whoever_holds_kv_is_not_relegated(self):
        driver = driver_for(make_request("a", 6000, 2, slo=SLO(ttft=1.0)), **LONG)
        driver.step()
        driver.now += 10.0
        driver.serve([])
        assert driver.scheduler.planner.num_relegated == 0

    def test_one_that_asks_to_be_refused_ends_instead(self):
        infeasible = make_request("a", 1000, 2, slo=SLO(ttft=0.1), shed=ShedMode.REJECT)
        driver = driver_for(infeasible)
        driver.serve([])
        assert driver.finished == {"a": FinishReason.EXPIRED}


def test_a_step_time_model_is_needed():
    with pytest.raises(ConfigError, match="step-time model"):
        Scheduler(make_config("niyama"))


objectives = st.sampled_from(
    [None, SLO(ttft=0.05), SLO(ttft=0.5, tbt=0.02), SLO(tbt=0.01), LOOSE, SLO(e2e=1.0)]
)


@examples(40)
@given(
    load=st.lists(
        st.tuples(st.integers(1, 900), st.integers(1, 60), st.floats(0, 0.3), objectives),
        min_size=1,
        max_size=20,
    ),
    num_blocks=st.sampled_from([64, 100, 512]),
    depth=st.sampled_from([1, 2]),
)
def test_none_is_lost_and_none_relegated_twice(load, num_blocks, depth):
    arrival, requests = 0.0, []
    for index, (num_prompt, num_output, gap, slo) in enumerate(load):
        arrival += gap
        requests.append(make_request(f"r{index}", num_prompt, num_output, arrival=arrival, slo=slo))
    driver = TimedDriver(make_config("niyama", num_blocks=num_blocks), FakeStepTime(), depth=depth)
    driver.serve(requests)
    driver.scheduler.check_invariants()
    assert driver.finished == {request.request_id: FinishReason.LENGTH for request in requests}
    assert driver.scheduler.planner.num_relegated <= sum(slo is not None for *_, slo in load)
    assert driver.scheduler.policy.composer.throughput < inf
