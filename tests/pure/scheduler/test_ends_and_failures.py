"""Requests that end, fail or are wrong, under every policy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from onbeat.core.errors import ConfigError, InvalidRequest, PromptTooLong
from onbeat.core.request import FinishReason, RequestOutput, SamplingParams
from onbeat.core.step import BatchShape, ModelRunnerOutput, SchedulerOutput
from onbeat.scheduler.replica.policies import POLICIES, check_policy, make_policy
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.replica.token_budget import default_token_budget
from onbeat.scheduler.scheduler_config import BASELINES, SERVING_POLICIES
from tests.fake_step_time import LinearStepTime
from tests.pure.scheduler.driver import Driver, make_config, make_request
from tests.pure.scheduler.policy_driver import driver_with


def test_blocks_of_a_failed_request_are_not_found_again():
    driver = driver_with("sarathi", make_request("a", 100, 20, salt="s"))
    for _ in range(5):
        driver.step()
    scheduler = driver.scheduler
    scheduled = scheduler.schedule(9.0)
    assert scheduled is not None
    outputs = scheduler.update(scheduled, ModelRunnerOutput([[]], failed={"a": "bad logits"}), 9.0)
    assert outputs[0].finish_reason is FinishReason.ERROR
    assert outputs[0].error == "bad logits"
    scheduler.check_invariants()
    assert scheduler.kv.pool.num_used_blocks == 0
    driver.add(make_request("b", 100, 2, salt="s"))
    scheduler.schedule(10.0)
    assert scheduler.table.num_prefix_hits == 0


def test_a_replayed_row_without_a_token_may_be_of_a_request_that_has_ended():
    """It failed in the recorded step, which nobody was told who had aborted it before."""
    driver = driver_with("sarathi", make_request("a", 8, 20))
    for _ in range(4):
        driver.step()
    scheduled = driver.scheduler.schedule(9.0)
    assert scheduled is not None
    driver.scheduler.abort(["a"])
    assert list(driver.scheduler.update(scheduled, ModelRunnerOutput([[]]), 9.1)) == []


@pytest.mark.parametrize(("failing", "num_learnt"), [(["a", "b"], 0), (["a"], 1)])
def test_a_step_that_fails_as_a_whole_tells_nothing_of_step_times(failing, num_learnt):
    class Learner(LinearStepTime):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def observe(self, shape: BatchShape, seconds: float) -> None:
            self.seen.append(seconds)

    model = Learner()
    scheduler = Scheduler(make_config("sarathi"), model)
    for name in ("a", "b"):
        scheduler.add(make_request(name, 8, 4))
    scheduled = scheduler.schedule(1.0)
    assert scheduled is not None
    result = ModelRunnerOutput([[], []], failed=dict.fromkeys(failing, "out of memory"))
    if len(failing) == 1:
        result = ModelRunnerOutput([[], [1]], failed=result.failed)
    scheduler.update(scheduled, result, 1.001)
    assert len(model.seen) == num_learnt
    scheduler.add(make_request("c", 8, 4))
    scheduled = scheduler.schedule(1.5)
    assert scheduled is not None
    scheduler.update(scheduled, ModelRunnerOutput([[1]] * len(scheduled.rows)), 2.0)
    assert model.seen[-1] == 0.5


class TestSharersOfAFailedRequest:
    """Two steps are planned ahead: who fails is known one step late."""

    def joined(self, num_prompt: int) -> tuple[Driver, SchedulerOutput, SchedulerOutput]:
        """Return the step with the first token of `a`, and the next, in which `b` joins on its KV."""
        driver = Driver(make_config("sarathi"), depth=2)
        driver.add(make_request("a", 66, 20, salt="s"))
        for _ in range(3):
            driver.step()
        scheduled = driver.in_flight.popleft()
        assert [row.samples for row in scheduled.rows] == [True]
        driver.add(make_request("b", num_prompt, 4, salt="s"))
        after = driver.scheduler.schedule(9.0)
        assert after is not None
        driver.check_step(after)
        assert {row.request_id: row.num_computed_tokens for row in after.rows}["b"] == 64
        return driver, scheduled, after

    def fail(self, driver: Driver, scheduled: SchedulerOutput) -> Sequence[RequestOutput]:
        result = ModelRunnerOutput([[]], failed={"a": "no number"})
        outputs = driver.scheduler.update(scheduled, result, 9.5)
        driver.scheduler.check_invariants()
        return outputs

    def test_whoever_has_joined_since_computes_all_of_it_itself(self):
        driver, scheduled, after = self.joined(110)
        outputs = self.fail(driver, scheduled)
        assert [output.request_id for output in outputs] == ["a"]
        assert driver.scheduler.table.num_preemptions == 1
        assert driver.scheduler.update(after, ModelRunnerOutput([[1]]), 10.0) == []
        again = driver.scheduler.schedule(11.0)
        assert again is not None
        assert [row.num_computed_tokens for row in again.rows] == [0]

    def test_whoever_has_a_token_under_way_ends_with_it(self):
        driver, scheduled, after = self.joined(70)
        outputs = self.fail(driver, scheduled)
        assert {output.request_id: output.finish_reason for output in outputs} == {
            "a": FinishReason.ERROR,
            "b": FinishReason.ERROR,
        }
        assert driver.scheduler.update(after, ModelRunnerOutput([[1], [1]]), 10.0) == []
        assert driver.scheduler.num_unfinished == 0
        assert driver.scheduler.kv.pool.num_used_blocks == 0

    def test_kv_that_is_lent_ends_to_be_lent(self):
        """The runner clears what is not finite: a copy would be wrong and look sound."""
        driver, scheduled, after = self.joined(110)
        handover = driver.scheduler.handover
        for name in ("a", "b"):
            assert handover.hold(name, 100.0) is not None
        self.fail(driver, scheduled)
        assert handover.overdue_holds(0.0) == ["a", "b"]
        assert handover.hold("b", 200.0) is None
        for name in ("a", "b"):
            handover.release_hold(name)
        driver.scheduler.update(after, ModelRunnerOutput([[1]]), 10.0)
        driver.scheduler.check_invariants()
        assert driver.scheduler.schedule(11.0) is not None

    def test_blocks_by_which_another_had_its_token_are_sound(self):
        driver = driver_with("sarathi", make_request("first", 64, 50, salt="s"))
        for _ in range(3):
            driver.step()
        for name in ("a", "b"):
            driver.add(make_request(name, 80, 20, salt="s"))
        for _ in range(2):
            driver.step()
        driver.breaking.add("a")
        driver.run()
        assert driver.finished == {
            "a": FinishReason.ERROR,
            "b": FinishReason.LENGTH,
            "first": FinishReason.LENGTH,
        }
        assert driver.scheduler.table.num_preemptions == 0


class TestEndOfARequest:
    def test_stop_token_ends_it(self):
        driver = driver_with("sarathi", make_request("a", 4, 50))
        driver.run()
        third = driver.outputs["a"][2]
        request = make_request("a", 4, 50)
        sampling = SamplingParams(max_tokens=50, stop_token_ids=(third,))
        driver = driver_with(
            "sarathi", type(request)(request_id="a", prompt_token_ids=(0, 1, 2, 3), sampling=sampling)
        )
        driver.run()
        assert driver.finished["a"] is FinishReason.STOP
        assert driver.outputs["a"][-1] == third
        assert len(driver.outputs["a"]) <= 3

    def test_context_ends_it(self):
        driver = driver_with("sarathi", make_request("a", 250, 50))
        driver.run()
        assert driver.finished["a"] is FinishReason.LENGTH
        assert len(driver.outputs["a"]) == 6

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("depth", [1, 2])
    def test_one_token_requests(self, policy, depth):
        driver = Driver(make_config(policy), depth=depth)
        for i in range(20):
            driver.add(make_request(f"r{i}", 5, 1, arrival=float(i)))
        driver.run()
        assert all(len(tokens) == 1 for tokens in driver.outputs.values())


class TestBadInput:
    def test_empty_prompt(self):
        with pytest.raises(InvalidRequest, match="no tokens"):
            driver_with("sarathi", make_request("a", 0, 2))

    def test_prompt_beyond_the_context(self):
        with pytest.raises(PromptTooLong, match="256 tokens"):
            driver_with("sarathi", make_request("a", 256, 2))

    def test_id_in_use(self):
        with pytest.raises(InvalidRequest, match="in use"):
            driver_with("sarathi", make_request("a", 2, 2), make_request("a", 2, 2))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"policy": "fifo"}, "choose one of static, orca"),
            ({"scheduling_policy": "lifo"}, "choose one of fcfs, priority"),
            ({"policy": "orca", "max_num_batched_tokens": 100}, "whole prompts"),
            ({"block_size": 24}, "multiple of 16"),
            ({"max_num_batched_tokens": 4}, "below max_num_seqs"),
            ({"num_blocks": 8}, "KV cache holds 128"),
            ({"max_num_seqs": 0}, "at least 1"),
        ],
    )
    def test_configuration(self, changes, message):
        with pytest.raises(ConfigError, match=message):
            Driver(make_config(**changes))

    def test_default_budget_fits_the_policy(self):
        assert default_token_budget("orca", max_model_len=8192, max_num_seqs=64) == 8192
        assert default_token_budget("sarathi", max_model_len=8192, max_num_seqs=64) == 512

    @pytest.mark.parametrize(
        ("policy", "budget"),
        [("slo", 8192), ("edf", 512)],
    )
    def test_where_time_is_the_budget_tokens_are_only_a_cap(self, policy, budget):
        assert default_token_budget(policy, max_model_len=4096, max_num_seqs=64) == budget

    @pytest.mark.parametrize("policy", [name for name in POLICIES if name != "slo"])
    def test_the_order_of_shedding_is_a_choice_of_slo_alone(self, policy):
        with pytest.raises(ConfigError, match=f"'{policy}'.*slo"):
            check_policy(make_config(policy, shed_order="longest-wait", max_num_batched_tokens=512))
        check_policy(make_config("slo", shed_order="longest-wait"))

    @pytest.mark.parametrize("policy", POLICIES)
    def test_a_policy_works_once_it_is_made_or_is_not_made(self, policy):
        config = make_config(policy, max_num_batched_tokens=512)
        if POLICIES[policy].needs_step_time:
            with pytest.raises(ConfigError, match=f"{policy}.*predict"):
                make_policy(config, None)
        scheduler = Scheduler(config, LinearStepTime())
        scheduler.add(make_request("a", 4, 2))
        assert scheduler.schedule(0.0) is not None

    def test_those_to_compare_with_are_policies(self):
        assert POLICIES.keys() == {*SERVING_POLICIES, *BASELINES}
