"""What each policy does in hand-made situations (one case per line of its published algorithm)."""

from __future__ import annotations

import pytest

from onbeat.core.request import FinishReason
from tests.pure.scheduler.driver import make_request
from tests.pure.scheduler.policy_driver import driver_with, rows_of


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
        while not driver.scheduler.table.num_preemptions:
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
        assert driver.scheduler.table.num_preemptions == 0
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
        assert driver.scheduler.table.num_prefix_hits == 80

    @pytest.mark.parametrize(("salt", "num_hits"), [("s", 48), ("t", 0)])
    def test_equal_prompt_leaves_one_token_to_compute_and_another_salt_all(self, salt, num_hits):
        driver = driver_with("sarathi", make_request("a", 64, 2, salt="s"))
        driver.run()
        driver.add(make_request("b", 64, 2, salt=salt))
        driver.run()
        assert driver.scheduler.table.num_prefix_hits == num_hits

    def test_generated_tokens_are_found_too(self):
        driver = driver_with("sarathi", make_request("a", 10, 40, salt="s"))
        driver.run()
        driver.add(make_request("b", 0, 2, prompt=[*range(10), *driver.outputs["a"], 7], salt="s"))
        driver.run()
        assert driver.scheduler.table.num_prefix_hits == 48

    def test_least_recently_used_prefix_is_evicted(self):
        driver = driver_with("sarathi", num_blocks=16)
        for name in ("a", "b"):
            driver.add(make_request(name, 64, 2, salt=name))
            driver.run()
        driver.add(make_request("a2", 64, 2, salt="a"))
        driver.run()
        driver.add(make_request("big", 128, 2, salt="big"))  # needs more than the free blocks
        driver.run()
        hits = driver.scheduler.table.num_prefix_hits
        driver.add(make_request("a3", 64, 2, salt="a"))
        driver.run()
        assert driver.scheduler.table.num_prefix_hits == hits + 48

    def test_a_preempted_request_finds_its_own_blocks(self):
        requests = [make_request("a", 120, 100), make_request("b", 120, 100, arrival=1.0)]
        driver = driver_with("sarathi", *requests, num_blocks=17)
        driver.run()
        resumed = [step for step in driver.log for a in step.admitted if a.output_token_ids]
        assert resumed
        row = next(row for row in resumed[0].rows if row.request_id == "b")
        assert row.num_computed_tokens > 0


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
        assert driver.scheduler.table.num_preemptions == 0

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
        assert driver.scheduler.table.num_preemptions == 0

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
