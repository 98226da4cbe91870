"""Drafts where they pay, under the load, acceptance, budget and prompts of the moment."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO, ShedMode
from onbeat.core.step import SchedulerOutput
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.replica.speculation.drafting import FixedDrafts, make_drafting
from onbeat.scheduler.scheduler_config import SpeculationConfig
from tests.pure.scheduler.speculating import (
    DraftStepTime,
    TimedSpeculatingDriver,
    expected_tokens,
    make_config,
    make_request,
)

LARGE: dict[str, Any] = {
    "num_blocks": 8192,
    "max_model_len": 1024,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
}


def make_driver(
    num_requests: int,
    acceptance: float,
    *,
    model: DraftStepTime | None = None,
    num_tokens: int = 120,
    k: int = 8,
    draft_length: str | None = "adaptive",
    **options,
) -> TimedSpeculatingDriver:
    changes: dict[str, Any] = {
        name: options.pop(name) for name in ("runs_model", "policy") if name in options
    }
    config = make_config(k=k, draft_length=draft_length or "fixed", **LARGE, **changes)
    if draft_length is None:
        config = replace(config, speculation=None)
    driver = TimedSpeculatingDriver(config, model or DraftStepTime(), acceptance=acceptance, **options)
    for index in range(num_requests):
        driver.add(make_request(f"r{index}", 16, num_tokens))
    return driver


def finish(*args, **options) -> TimedSpeculatingDriver:
    driver = make_driver(*args, **options)
    driver.run()
    driver.check_end()
    return driver


def mean_drafts(driver: TimedSpeculatingDriver, last: int = 10_000) -> float:
    """Of the decode rows of the last steps."""
    shapes = [scheduled.shape for scheduled in driver.log if not scheduled.shape.num_chunks][-last:]
    return sum(shape.num_draft_tokens for shape in shapes) / sum(shape.num_decodes for shape in shapes)


def tokens_per_second(num_requests: int, acceptance: float, *, num_steps: int, **options) -> float:
    """Of requests that all run on to the end."""
    driver = make_driver(num_requests, acceptance, num_tokens=1000, **options)
    while len(driver.log) < num_steps and not driver.finished:
        driver.step()
    return sum(map(len, driver.outputs.values())) / driver.now


def first_decode(driver: TimedSpeculatingDriver) -> SchedulerOutput:
    while not driver.log or not driver.log[-1].shape.num_decodes:
        driver.step()
    return driver.log[-1]


NGRAM = {"model": DraftStepTime(when_drafting=0.5e-3)}
MODEL = {"model": DraftStepTime(per_pass=1e-3), "runs_model": True}


def compare(proposer, num_requests: int, acceptance: float, *, num_steps: int) -> None:
    """Hold adaptive lengths against none, and against the best of fixed ones."""
    options = {**proposer, "num_steps": num_steps}
    off = tokens_per_second(num_requests, acceptance, draft_length=None, **options)
    rates = [
        tokens_per_second(num_requests, acceptance, draft_length="fixed", k=k, **options)
        for k in (1, 3, 5, 8)
    ]
    adaptive = tokens_per_second(num_requests, acceptance, **options)
    assert adaptive >= 0.98 * off
    assert adaptive >= 0.95 * max(rates)


class TestGoodput:
    def test_fewer_drafts_with_more_load(self):
        by_load = []
        for num_requests in (1, 8, 32, 100, 160):
            driver = make_driver(num_requests, 0.8, num_tokens=1000)
            while len(driver.log) < 40:
                driver.step()
            by_load.append(mean_drafts(driver, last=20))
        assert all(more >= fewer - 0.1 for more, fewer in pairwise(by_load))
        assert by_load[0] > 5
        assert by_load[-1] < 0.1

    def test_more_drafts_with_more_acceptance(self):
        by_rate = [mean_drafts(finish(16, rate)) for rate in (0.05, 0.3, 0.6, 0.9)]
        assert by_rate == sorted(by_rate)
        assert by_rate[-1] > by_rate[0] + 2

    def test_rows_have_one_number_or_as_many_as_are_ready(self):
        driver = make_driver(8, 0.8, num_tokens=400, available=(0, 1, 8))
        for _ in range(60):
            ready = {state.request_id: state.draft.num_ready for state in driver.scheduler.running}
            driver.step()
            drafts = {row.request_id: row.num_draft_tokens for row in driver.log[-1].rows}
            if driver.log[-1].shape.num_decodes == 8 and None not in ready.values():
                k = max(drafts.values())
                assert drafts == {request_id: min(num, k) for request_id, num in ready.items()}
        assert mean_drafts(driver, last=20) > 1

    @pytest.mark.parametrize("proposer", [NGRAM, MODEL])
    @pytest.mark.parametrize(("num_requests", "acceptance"), [(1, 0.1), (2, 0.9), (24, 0.2), (24, 0.8)])
    def test_never_slower_than_off_and_as_fast_as_the_best_length(self, proposer, num_requests, acceptance):
        compare(proposer, num_requests, acceptance, num_steps=400 if num_requests < 10 else 60)

    def test_a_fixed_cost_does_not_hide_a_larger_k(self):
        """One draft loses by its fixed cost; several share it."""
        model = DraftStepTime(when_drafting=9e-3)
        driver = make_driver(1, 0.9, model=model)
        drafting = make_drafting(SpeculationConfig(num_speculative_tokens=8, initial_acceptance=0.9), model)
        driver.scheduler._drafting = driver.scheduler.results.drafting = drafting
        assert 1.9 / 19 < 1 / 10, "one draft does not pay"
        assert first_decode(driver).shape.num_draft_tokens == 8

    def test_passes_of_a_model_are_paid_for(self):
        cheap = mean_drafts(finish(4, 0.7, model=DraftStepTime(per_pass=0.1e-3), runs_model=True))
        dear = mean_drafts(finish(4, 0.7, model=DraftStepTime(per_pass=2e-3), runs_model=True))
        lost = mean_drafts(finish(4, 0.7, model=DraftStepTime(per_pass=20e-3), runs_model=True))
        assert cheap > dear > 0.5
        assert lost < 0.05


class TestLimits:
    def test_only_what_the_proposer_has(self):
        driver = finish(4, 0.9, available=(0,))
        assert driver.counts["r0"][0] <= 8, "nothing was known of the first decode step alone"
        driver = finish(4, 0.9, available=(2,))
        assert max(driver.drafts_of("r0", last=30)) == 2

    def test_tokens_of_the_step(self):
        driver = make_driver(0, 0.9)
        config = replace(driver.scheduler.config, max_num_batched_tokens=20, max_num_seqs=16)
        driver = TimedSpeculatingDriver(config, DraftStepTime(), acceptance=0.9)
        for index in range(16):
            driver.add(make_request(f"r{index}", 4, 60))
        driver.run()
        driver.check_end()
        assert sum(drafted for drafted, _ in driver.counts.values()) > 0

    def test_nobody_is_preempted_for_drafts(self):
        """Blocks suffice for all requests together, so not one may fall."""
        config = make_config(k=8, draft_length="adaptive", num_blocks=16, max_model_len=256)
        driver = TimedSpeculatingDriver(config, DraftStepTime(), acceptance=0.3)
        for index in range(4):
            driver.add(make_request(f"r{index}", 16, 48))
        driver.run()
        driver.check_end()
        assert driver.scheduler.table.num_preemptions == 0
        assert sum(drafted for drafted, _ in driver.counts.values()) > 0

    def test_without_a_step_time_model_it_says_what_to_do(self):
        config = make_config(draft_length="adaptive")
        with pytest.raises(ConfigError, match=r"draft_length to 'fixed'"):
            Scheduler(config)
        assert isinstance(Scheduler(make_config(draft_length="fixed"))._drafting, FixedDrafts)


class TestDeadlines:
    SLO = SLO(ttft=1.0, tbt=0.011)

    def test_steps_stay_within_the_budget_of_the_policy(self):
        model = DraftStepTime(per_token=0.3e-3, spread=0.2)
        driver = make_driver(0, 0.9, model=model, policy="slo")
        for index in range(40):
            slo = self.SLO if index % 2 else SLO(ttft=2.0, tbt=0.03)
            driver.add(make_request(f"r{index}", 100, 80, slo=slo))
        driver.run()
        driver.check_end()
        drafting = [
            scheduled for scheduled in driver.log if sum(row.num_draft_tokens for row in scheduled.rows)
        ]
        assert any(scheduled.budget is not None for scheduled in drafting)
        for scheduled in driver.log:
            if scheduled.budget is not None and scheduled.shape.num_draft_tokens:
                assert model.step_time(scheduled.shape, 0.95) <= scheduled.budget + 1e-12

    def test_streams_that_a_stall_has_put_behind_catch_up_with_drafts(self):
        model = DraftStepTime(weights=10e-3, per_token=0.1e-3)
        config = make_config("slo", k=4, draft_length="adaptive", **LARGE)
        driver = TimedSpeculatingDriver(config, model, acceptance=0.85)
        for index in range(4):
            slo = SLO(ttft=0.5, tbt=0.011)
            driver.add(make_request(f"r{index}", 20, 400, slo=slo, shed=ShedMode.RELEGATE))
        for _ in range(3):
            driver.step()
        driver.now += 0.58  # the first token has left 0.5 s in hand, and drafts some more
        num_before = len(driver.log)
        driver.run()
        assert all(scheduled.shape.num_draft_tokens for scheduled in driver.log[num_before : num_before + 10])
        assert driver.scheduler.planner.state().num_missed == 0

    def test_streams_with_deadlines_leave_the_time_to_prompts(self):
        driver = make_driver(0, 0.9, policy="slo")
        for index in range(12):
            driver.add(make_request(f"r{index}", 40, 800, slo=SLO(ttft=2.0, tbt=0.05)))
        for _ in range(60):
            driver.step()
        assert driver.log[-1].shape.num_draft_tokens > 12
        driver.add(make_request("late", 900, 20, slo=SLO(ttft=2.0, tbt=0.05)))
        driver.run()
        beside = [scheduled for scheduled in driver.log[60:] if scheduled.shape.num_chunks]
        assert any(scheduled.shape.num_decodes for scheduled in beside)
        assert not any(scheduled.shape.num_draft_tokens for scheduled in beside)


class TestPrompts:
    def test_fewer_drafts_beside_a_prompt_that_keeps_the_machine_busy(self):
        driver = make_driver(8, 0.8, num_tokens=400, model=DraftStepTime(per_token=0.5e-3))
        for _ in range(40):
            driver.step()
        assert driver.log[-1].shape.num_draft_tokens > 15
        driver.add(make_request("long", 900, 4))
        driver.step()
        beside = next(scheduled for scheduled in driver.log if scheduled.shape.num_chunk_tokens > 500)
        alone = driver.log[driver.log.index(beside) - 1]
        assert beside.shape.num_draft_tokens <= 0.5 * alone.shape.num_draft_tokens

    def test_drafts_beside_a_prompt_that_leaves_arithmetic_idle(self):
        model = DraftStepTime(per_token=1e-6)
        driver = make_driver(8, 0.8, num_tokens=400, model=model)
        for _ in range(40):
            driver.step()
        driver.add(make_request("long", 900, 4))
        driver.step()
        assert driver.log[-1].shape.num_chunk_tokens > 500
        assert driver.log[-1].shape.num_draft_tokens > 20


class TestCare:
    def test_does_not_flip_around_the_break_even(self):
        """Benefit and price are close: whatever it decided stays for long."""
        acceptance = 0.42
        driver = finish(60, acceptance, num_tokens=120, model=DraftStepTime(per_token=0.12e-3), k=1)
        on = [scheduled.shape.num_draft_tokens > 10 for scheduled in driver.log]
        flips = sum(a != b for a, b in pairwise(on))
        assert flips < len(on) / 10

    def test_probes_are_rare_and_find_out_when_acceptance_comes_back(self):
        driver = make_driver(8, 0.0, num_tokens=900, model=DraftStepTime(when_drafting=1e-3))
        for _ in range(200):
            driver.step()
        assert 0 < mean_drafts(driver, last=100) < 0.1
        driver.runner.acceptance = 0.95
        for _ in range(250):
            driver.step()
        assert mean_drafts(driver, last=20) > 1

    def test_finds_drafts_again_where_there_were_none(self):
        driver = make_driver(32, 0.95, num_tokens=900, available=(0,))
        for _ in range(400):
            driver.step()
        driver.runner._available = (8,)
        for _ in range(20):
            driver.step()
        assert all(scheduled.shape.num_draft_tokens > 32 for scheduled in driver.log[-5:])

    @pytest.mark.parametrize("draft_length", ["adaptive", "fixed"])
    @pytest.mark.parametrize("acceptance", [0.2, 0.6, 0.9])
    def test_expects_about_as_many_tokens_as_come(self, draft_length, acceptance):
        driver = finish(6, acceptance, num_tokens=400, k=4, draft_length=draft_length)
        stats = driver.stats[40:]
        expected = sum(each.expected_tokens for each in stats)
        assert sum(each.num_tokens for each in stats) == pytest.approx(expected, rel=0.05)

    def test_with_the_same_calls_it_plans_the_same(self):
        first, second = (finish(12, 0.6, policy="slo", seed=3) for _ in range(2))
        assert first.log == second.log
        for request in first.requests.values():
            assert first.outputs[request.request_id] == expected_tokens(request, 1024)[0]
