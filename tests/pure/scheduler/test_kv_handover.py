"""Requests whose KV comes from another replica, and requests whose KV stays for one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import InvalidRequest
from onbeat.core.request import FinishReason, Request
from tests.examples import examples
from tests.pure.scheduler.driver import Driver, make_config, make_request


def external(
    request_id: str, num_prompt_tokens: int, max_tokens: int, *, arrival: float = 0.0, **changes
) -> Request:
    """Return a request of which all but the last prompt token is computed elsewhere."""
    request = make_request(request_id, num_prompt_tokens, max_tokens, arrival=arrival)
    return replace(request, num_external_tokens=num_prompt_tokens - 1, **changes)


def receive_all(driver: Driver) -> list[str]:
    ids = [pull.request.request_id for pull in driver.scheduler.take_kv_fetches()]
    for request_id in ids:
        driver.scheduler.receive_kv(request_id)
    return ids


class TestPull:
    def test_room_is_made_at_admission_and_nothing_runs_before_the_kv_is_there(self):
        driver = Driver(make_config())
        driver.add(external("a", 100, 4))
        assert driver.scheduler.schedule(1.0) is None
        (pull,) = driver.scheduler.take_kv_fetches()
        assert len(pull.block_ids) == 7
        assert driver.scheduler.kv.pool.num_used_blocks == 7
        assert driver.scheduler.schedule(2.0) is None
        assert driver.scheduler.take_kv_fetches() == []

    def test_received_tokens_are_not_computed(self):
        driver = Driver(make_config())
        driver.add(external("a", 100, 4))
        driver.step()
        receive_all(driver)
        driver.run()
        assert [row.num_new_tokens for step in driver.log for row in step.rows] == [1, 1, 1, 1]
        assert driver.log[0].rows[0].num_computed_tokens == 99
        assert [each.request.request_id for each in driver.log[0].admitted] == ["a"]
        assert driver.scheduler.num_prefix_hits == 0
        assert driver.scheduler.kv.pool.num_used_blocks == 0

    def test_others_run_while_the_kv_is_on_its_way(self):
        driver = Driver(make_config())
        driver.add(make_request("b", 4, 20))
        driver.step()
        driver.add(external("a", 100, 4, arrival=1.0))
        for _ in range(3):
            driver.step()
            assert [row.request_id for row in driver.log[-1].rows] == ["b"]
        receive_all(driver)
        driver.step()
        assert [row.request_id for row in driver.log[-1].rows] == ["b", "a"]

    def test_prefills_first_does_not_stop_for_a_pull(self):
        driver = Driver(make_config("prefill-first"))
        driver.add(make_request("b", 4, 20))
        driver.step()
        driver.add(external("a", 100, 4, arrival=1.0))
        driver.step()
        assert [row.request_id for row in driver.log[-1].rows] == ["b"]

    def test_without_room_it_waits_in_the_queue(self):
        driver = Driver(make_config(num_blocks=16))
        driver.add(external("a", 200, 4))
        driver.add(external("b", 200, 4))
        driver.step()
        assert receive_all(driver) == ["a"]
        while "a" not in driver.finished:
            assert driver.scheduler.take_kv_fetches() == []
            driver.step()
        driver.step()
        assert receive_all(driver) == ["b"]

    def test_after_a_preemption_it_computes_its_tokens_itself(self):
        driver = Driver(make_config(num_blocks=16))
        driver.add(external("a", 100, 60))
        driver.add(external("b", 100, 60))
        driver.step()
        assert receive_all(driver) == ["a", "b"]
        driver.run()
        assert driver.scheduler.num_preemptions > 0
        assert receive_all(driver) == []
        assert len(driver.outputs["a"]) == len(driver.outputs["b"]) == 60

    def test_preempted_on_the_way_it_waits_for_the_transfer_and_recomputes(self):
        driver = Driver(make_config(num_blocks=16))
        driver.add(make_request("a", 100, 150))
        driver.step()
        driver.add(external("b", 120, 4, arrival=1.0))
        while driver.scheduler.num_preemptions == 0:
            driver.step()
        assert not any(each.request.request_id == "b" for step in driver.log[-1:] for each in step.admitted)
        (pull,) = driver.scheduler.take_kv_fetches()
        driver.scheduler.receive_kv(pull.request.request_id)
        driver.run()
        assert len(driver.outputs["b"]) == 4

    def test_aborted_on_the_way(self):
        driver = Driver(make_config())
        driver.add(external("a", 100, 4))
        driver.step()
        driver.abort("a")
        driver.scheduler.receive_kv("a")
        assert driver.finished == {"a": FinishReason.ABORT}
        assert driver.scheduler.kv.pool.num_used_blocks == 0
        driver.add(make_request("b", 4, 2))
        driver.run()
        assert driver.log[0].released_ids == ()

    @pytest.mark.parametrize("num_external", [-1, 10, 11])
    def test_a_token_is_left_to_compute(self, num_external):
        driver = Driver(make_config())
        with pytest.raises(InvalidRequest, match="num_external_tokens"):
            driver.add(replace(make_request("a", 10, 1), num_external_tokens=num_external))


class TestKeep:
    def test_kv_stays_until_it_is_released(self):
        driver = Driver(make_config())
        driver.add(replace(make_request("a", 100, 1), keeps_kv=True))
        driver.run()
        assert driver.finished == {"a": FinishReason.LENGTH}
        assert driver.scheduler.num_unfinished == 0
        assert driver.scheduler.kv.pool.num_used_blocks == 7
        driver.scheduler.check_invariants()
        driver.scheduler.release_kv("a")
        driver.scheduler.release_kv("a")
        assert driver.scheduler.kv.pool.num_used_blocks == 0
        driver.scheduler.check_invariants()

    def test_kept_kv_takes_room_from_new_requests(self):
        driver = Driver(make_config(num_blocks=16))
        driver.add(replace(make_request("a", 200, 1), keeps_kv=True))
        driver.add(make_request("b", 200, 1, arrival=1.0))
        for _ in range(20):
            driver.step()
        assert "b" not in driver.finished
        driver.scheduler.release_kv("a")
        driver.run()
        assert "b" in driver.finished

    def test_an_abort_keeps_nothing(self):
        driver = Driver(make_config())
        driver.add(replace(make_request("a", 100, 9), keeps_kv=True))
        driver.step()
        driver.abort("a")
        assert driver.scheduler.kv.pool.num_used_blocks == 0

    def test_static_batching_cannot_keep(self):
        driver = Driver(make_config("static"))
        with pytest.raises(InvalidRequest, match="keep its KV"):
            driver.add(replace(make_request("a", 10, 1), keeps_kv=True))


@examples(60)
@given(
    policy=st.sampled_from(["sarathi", "orca", "prefill-first", "hybrid-only", "chunk-only"]),
    requests=st.lists(
        st.tuples(st.integers(2, 120), st.integers(1, 60), st.booleans()), min_size=1, max_size=12
    ),
    delays=st.lists(st.integers(0, 8), min_size=12, max_size=12),
    num_micro_batches=st.sampled_from([1, 2]),
)
def test_every_request_ends_whenever_its_kv_comes(policy, requests, delays, num_micro_batches):
    config = make_config(policy, num_blocks=16, num_micro_batches=num_micro_batches)
    driver = Driver(config, depth=num_micro_batches)
    for index, (num_prompt, num_output, is_external) in enumerate(requests):
        make = external if is_external else make_request
        driver.add(make(str(index), num_prompt, num_output, arrival=float(index)))
    on_the_way: list[tuple[int, str]] = []
    for turn in range(5000):
        if not driver.step():
            break
        driver.scheduler.check_invariants()
        pulls = driver.scheduler.take_kv_fetches()
        on_the_way += [(turn + delays[int(p.request.request_id)], p.request.request_id) for p in pulls]
        for due, request_id in list(on_the_way):
            if due <= turn:
                driver.scheduler.receive_kv(request_id)
                on_the_way.remove((due, request_id))
    assert len(driver.finished) == len(requests)
    assert [len(driver.outputs[str(i)]) for i in range(len(requests))] == [each[1] for each in requests]
    assert driver.scheduler.kv.pool.num_used_blocks == 0
