"""What each policy does in hand-made situations (one case per line of its published algorithm)."""

from __future__ import annotations

import pytest

from onbeat.core.errors import ConfigError, InvalidRequest, PromptTooLong
from onbeat.core.request import FinishReason, RequestOutput, SamplingParams
from onbeat.core.step import BatchShape, ModelRunnerOutput, SchedulerOutput
from onbeat.scheduler.config import BASELINES, SERVING_POLICIES
from onbeat.scheduler.replica.policies import POLICIES, check_policy, default_token_budget, make_policy
from onbeat.scheduler.replica.scheduler import Scheduler
from tests.fake_step_time import LinearStepTime
from tests.pure.scheduler.driver import Driver, make_config, make_request


def rows_of(driver: Driver, index: int = -1) -> dict[str, int]:
    """Return request id -> new tokens of one step."""
    return {row.request_id: row.num_new_tokens for row in driver.log[index].rows}


def driver_with(policy: str, *requests, **changes) -> Driver:
    driver = Driver(make_config(policy, **changes))
    for request in requests:
        driver.add(request)
    return driver


class TestSarathi:
    """Decodes first, then prompts in chunks, within the token budget (Sarathi-Serve, algorithm 3)."""

    def test_prompt_runs_in_chunks_of_the_budget(self):
        driver = driver_with("sarathi", make_request("a", 70, 2))
        driver.run()
        assert [rows_of(driver, i)["a"] for i in range(4)] == [32, 32, 6, 1]

    def test_last_chunk_delivers_the_first_token(self):
        driver = driver_with("sarathi", make_request("a", 70, 2))
        for _ in range(2):
            driver.step()
        assert driver.outputs["a"] == []
        driver.step()
        assert len(driver.outputs["a"]) == 1

    def test_no_decode_ever_waits_for_a_prompt(self):
        driver = driver_with("sarathi", make_request("a", 4, 50))
        driver.step()
        driver.add(make_request("long", 200, 2, arrival=1.0))
        while "long" not in driver.finished:
            driver.step()
            assert rows_of(driver)["a"] == 1
        assert rows_of(driver, 1) == {"a": 1, "long": 31}

    def test_several_prompts_share_what_the_decodes_leave(self):
        driver = driver_with(
            "sarathi", make_request("a", 4, 9), make_request("b", 20, 9), make_request("c", 40, 9)
        )
        driver.step()
        assert rows_of(driver) == {"a": 4, "b": 20, "c": 8}
        driver.step()
        assert rows_of(driver) == {"a": 1, "b": 1, "c": 30}

    def test_blocks_of_the_whole_prompt_are_taken_at_admission(self):
        driver = driver_with("sarathi", make_request("a", 200, 2))
        driver.step()
        assert len(driver.log[0].admitted[0].block_ids) == 13


class TestPrefillFirst:
    """Prompts alone before decodes, preemption by recompute (vLLM, SOSP 2023)."""

    def test_a_new_prompt_stalls_the_decodes(self):
        driver = driver_with("prefill-first", make_request("a", 4, 20))
        driver.step()
        driver.step()
        driver.add(make_request("b", 100, 20, arrival=2.0))
        driver.step()
        assert rows_of(driver) == {"b": 100}
        driver.step()
        assert rows_of(driver) == {"a": 1, "b": 1}

    def test_watermark_keeps_one_percent_free(self):
        requests = [make_request("a", 16 * 98, 2), make_request("b", 16, 2)]
        config = {"num_blocks": 100, "max_model_len": 1600, "max_num_batched_tokens": 1600}
        driver = driver_with("prefill-first", *requests, **config)
        driver.step()
        assert rows_of(driver) == {"a": 16 * 98, "b": 16} or rows_of(driver) == {"a": 16 * 98}
        assert driver.scheduler.kv.pool.num_free_blocks >= 1

    def test_the_latest_is_preempted_and_comes_back_first(self):
        requests = [make_request("a", 120, 100), make_request("b", 120, 100, arrival=1.0)]
        driver = driver_with("prefill-first", *requests, num_blocks=17)
        while not driver.scheduler.num_preemptions:
            driver.step()
        assert driver.scheduler.waiting.peek().request_id == "b"
        driver.add(make_request("c", 10, 2, arrival=2.0))
        driver.run()
        assert driver.first_scheduled == ["a", "b", "c"]
        assert {name: len(tokens) for name, tokens in driver.outputs.items()} == {"a": 100, "b": 100, "c": 2}

    def test_an_endless_stream_of_prompts_does_not_starve_the_decodes(self):
        driver = driver_with("prefill-first", make_request("a", 4, 10))
        for i in range(1000):
            driver.add(make_request(f"one-{i}", 200, 1, arrival=float(i)))
            driver.step()
            if "a" in driver.finished:
                return
        pytest.fail("'a' starved")


class TestOrca:
    """Iteration level, whole prompts, reservation of the maximum (Orca, algorithm 1)."""

    def test_prompts_and_decodes_share_a_step(self):
        driver = driver_with("orca", make_request("a", 4, 20))
        driver.step()
        driver.add(make_request("b", 100, 20, arrival=1.0))
        driver.step()
        assert rows_of(driver) == {"a": 1, "b": 100}

    def test_reserves_prompt_and_maximum_output(self):
        driver = driver_with("orca", make_request("a", 20, 100))
        driver.step()
        assert len(driver.log[0].admitted[0].block_ids) == 8  # 120 tokens

    def test_stops_at_the_first_that_does_not_fit_and_never_skips(self):
        requests = [make_request("a", 100, 100), make_request("b", 100, 100), make_request("c", 1, 1)]
        driver = driver_with("orca", *requests, num_blocks=16)
        driver.step()
        assert list(rows_of(driver)) == ["a"]
        driver.run()
        assert driver.first_scheduled == ["a", "b", "c"]

    def test_never_preempts_and_returns_every_reservation(self):
        requests = [make_request(f"r{i}", 30, 60, arrival=float(i)) for i in range(12)]
        driver = driver_with("orca", *requests, num_blocks=16)
        driver.run()
        assert driver.scheduler.num_preemptions == 0
        assert driver.scheduler.kv.pool.num_used_blocks == 0


class TestStatic:
    """Request-level batching: the batch is fixed until its last request ends; finished rows are padding."""

    def test_finished_rows_are_paid_for_and_nobody_joins(self):
        driver = driver_with("static", make_request("a", 4, 2), make_request("b", 4, 9))
        driver.step()
        driver.step()
        assert driver.finished["a"] is FinishReason.LENGTH
        driver.add(make_request("c", 4, 2, arrival=1.0))
        while "b" not in driver.finished:
            driver.step()
            assert rows_of(driver) == {"a": 1, "b": 1}
        padding = [row for row in driver.log[-1].rows if row.request_id == "a"]
        assert not padding[0].samples
        driver.step()
        assert rows_of(driver) == {"c": 4}

    def test_slots_are_free_when_the_batch_ends(self):
        driver = driver_with("static", make_request("a", 4, 2), make_request("b", 4, 5))
        driver.run()
        assert driver.scheduler.kv.pool.num_used_blocks == 0
        assert not driver.scheduler.running

    def test_a_batch_larger_than_the_budget_is_formed_in_several_steps(self):
        requests = [make_request(f"r{i}", 100, 4) for i in range(4)]
        driver = driver_with("static", *requests, max_num_batched_tokens=256)
        driver.run()
        assert [len(step.rows) for step in driver.log[:3]] == [2, 2, 4]

    def test_abort_leaves_the_batch_at_once(self):
        driver = driver_with("static", make_request("a", 4, 90), make_request("b", 4, 9))
        driver.step()
        driver.abort("a")
        driver.step()
        assert rows_of(driver) == {"b": 1}

    def test_aborting_the_last_live_request_ends_the_batch(self):
        driver = driver_with("static", make_request("a", 4, 90), make_request("b", 4, 2))
        for _ in range(3):
            driver.step()
        assert "b" in driver.finished
        driver.abort("a")
        assert not driver.scheduler.running
        assert driver.scheduler.kv.pool.num_used_blocks == 0


class TestPrefixCache:
    def test_shared_prefix_is_computed_once(self):
        prompt = list(range(100))
        driver = driver_with("sarathi", make_request("a", 0, 2, prompt=prompt, salt="s"))
        driver.run()
        driver.add(make_request("b", 0, 2, prompt=[*prompt[:80], *range(500, 520)], salt="s"))
        driver.run()
        first_row = next(row for step in driver.log for row in step.rows if row.request_id == "b")
        assert first_row.num_computed_tokens == 80
        assert driver.scheduler.num_prefix_hits == 80

    def test_equal_prompt_leaves_one_token_to_compute(self):
        driver = driver_with("sarathi", make_request("a", 64, 2, salt="s"))
        driver.run()
        driver.add(make_request("b", 64, 2, salt="s"))
        driver.run()
        assert driver.scheduler.num_prefix_hits == 48

    def test_generated_tokens_are_found_too(self):
        driver = driver_with("sarathi", make_request("a", 10, 40, salt="s"))
        driver.run()
        driver.add(make_request("b", 0, 2, prompt=[*range(10), *driver.outputs["a"], 7], salt="s"))
        driver.run()
        assert driver.scheduler.num_prefix_hits == 48

    def test_another_salt_shares_nothing(self):
        driver = driver_with("sarathi", make_request("a", 64, 2, salt="s"))
        driver.run()
        driver.add(make_request("b", 64, 2, salt="t"))
        driver.run()
        assert driver.scheduler.num_prefix_hits == 0

    def test_least_recently_used_prefix_is_evicted(self):
        driver = driver_with("sarathi", num_blocks=16)
        for name in ("a", "b"):
            driver.add(make_request(name, 64, 2, salt=name))
            driver.run()
        driver.add(make_request("a2", 64, 2, salt="a"))
        driver.run()
        driver.add(make_request("big", 128, 2, salt="big"))  # needs more than the free blocks
        driver.run()
        hits = driver.scheduler.num_prefix_hits
        driver.add(make_request("a3", 64, 2, salt="a"))
        driver.run()
        assert driver.scheduler.num_prefix_hits == hits + 48

    def test_a_preempted_request_finds_its_own_blocks(self):
        requests = [make_request("a", 120, 100), make_request("b", 120, 100, arrival=1.0)]
        driver = driver_with("sarathi", *requests, num_blocks=17)
        driver.run()
        resumed = [step for step in driver.log for a in step.admitted if a.output_token_ids]
        assert resumed
        row = next(row for row in resumed[0].rows if row.request_id == "b")
        assert row.num_computed_tokens > 0


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
    assert scheduler.num_prefix_hits == 0


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

    def fail(self, driver: Driver, scheduled: SchedulerOutput) -> list[RequestOutput]:
        result = ModelRunnerOutput([[]], failed={"a": "no number"})
        outputs = driver.scheduler.update(scheduled, result, 9.5)
        driver.scheduler.check_invariants()
        return outputs

    def test_whoever_has_joined_since_computes_all_of_it_itself(self):
        driver, scheduled, after = self.joined(110)
        outputs = self.fail(driver, scheduled)
        assert [output.request_id for output in outputs] == ["a"]
        assert driver.scheduler.num_preemptions == 1
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
        assert driver.scheduler.num_preemptions == 0


class TestPriority:
    """Strict: a lower number is always served first (vLLM's meaning)."""

    def test_order_of_the_queue(self):
        requests = [make_request(f"p{p}", 40, 2, priority=p, arrival=float(-p)) for p in (2, 0, 1)]
        driver = driver_with("sarathi", *requests, scheduling_policy="priority", max_num_seqs=1)
        driver.run()
        assert driver.first_scheduled == ["p0", "p1", "p2"]

    def test_urgent_request_takes_a_slot_from_a_lower_rank(self):
        driver = driver_with(
            "sarathi", make_request("low", 4, 50, priority=5), scheduling_policy="priority", max_num_seqs=1
        )
        driver.step()
        driver.add(make_request("high", 4, 3, priority=0, arrival=1.0))
        driver.step()
        assert rows_of(driver) == {"high": 4}
        driver.run()
        assert driver.finish_order == ["high", "low"]
        assert len(driver.outputs["low"]) == 50

    def test_equal_ranks_do_not_push_one_another_out(self):
        requests = [make_request("a", 4, 20, priority=1), make_request("b", 4, 20, priority=1, arrival=1.0)]
        driver = driver_with("sarathi", *requests, scheduling_policy="priority", max_num_seqs=1)
        driver.run()
        assert driver.scheduler.num_preemptions == 0

    def test_nobody_is_preempted_in_vain(self):
        driver = driver_with(
            "orca",
            make_request("old", 100, 90, priority=1),
            make_request("low", 10, 5, priority=5),
            scheduling_policy="priority",
            num_blocks=16,
        )
        driver.step()
        driver.add(make_request("high", 100, 100, priority=2, arrival=1.0))  # fits only beside nothing
        driver.step()
        assert driver.scheduler.num_preemptions == 0

    def test_a_prefix_held_by_the_preempted_request_is_not_counted_twice(self):
        shared = list(range(80))
        driver = driver_with(
            "sarathi",
            make_request("first", 140, 100, priority=5),
            make_request("second", 0, 100, priority=5, arrival=1.0, prompt=[*shared, *range(10)], salt="s"),
            scheduling_policy="priority",
            num_blocks=16,
        )
        while not driver.outputs["second"]:
            driver.step()
        prompt = [*shared, *range(500, 600)]
        driver.add(make_request("urgent", 0, 5, arrival=2.0, prompt=prompt, salt="s"))
        driver.run()
        assert driver.finish_order[0] == "urgent"


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
        [("slo", 8192), ("simple", 8192), ("sarathi-triage", 512), ("edf-triage", 512)],
    )
    def test_where_time_is_the_budget_tokens_are_only_a_cap(self, policy, budget):
        assert default_token_budget(policy, max_model_len=4096, max_num_seqs=64) == budget

    @pytest.mark.parametrize("policy", [name for name in POLICIES if name != "slo"])
    def test_the_order_of_shedding_is_a_choice_of_slo_alone(self, policy):
        with pytest.raises(
            ConfigError, match=f"policy '{policy}' has no choice of whom to leave behind.*slo"
        ):
            check_policy(make_config(policy, shed_order="longest-wait", max_num_batched_tokens=512))
        check_policy(make_config("slo", shed_order="longest-wait"))

    @pytest.mark.parametrize("policy", POLICIES)
    def test_a_policy_works_once_it_is_made_or_is_not_made(self, policy):
        config = make_config(policy, max_num_batched_tokens=512)
        if POLICIES[policy].needs_step_time:
            with pytest.raises(ConfigError, match="nothing predicts them"):
                make_policy(config, None)
        scheduler = Scheduler(config, LinearStepTime())
        scheduler.add(make_request("a", 4, 2))
        assert scheduler.schedule(0.0) is not None

    def test_those_to_compare_with_are_policies(self):
        assert POLICIES.keys() == {*SERVING_POLICIES, *BASELINES}
