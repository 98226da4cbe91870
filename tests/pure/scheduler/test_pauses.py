"""Requests whose output nobody fetches sit out, and come back exactly where they were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.request import UNKNOWN_GRAMMAR, FinishReason, Request
from onbeat.core.slo import SLO
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.replica.request_state import RequestStatus
from onbeat.scheduler.scheduler_config import SchedulerConfig
from tests.pure.scheduler.driver import Driver, make_config, make_request, token_of

PAUSING = [name for name, each in POLICIES.items() if each.pauses]
WINDOW = 8


class Fetched(Driver):
    """A driver whose output is fetched when a test says so."""

    def __init__(self, config: SchedulerConfig, *, depth: int = 1) -> None:
        super().__init__(config, depth=depth)
        self.requests: dict[str, Request] = {}
        self.fetched: dict[str, int] = {}

    def add(self, request: Request) -> None:
        super().add(request)
        self.requests[request.request_id] = request
        self.fetched[request.request_id] = len(request.resumed_token_ids)

    def fetch(self, request_id: str, num_tokens: int = 1000) -> None:
        """Take some of the output that is there."""
        known = self.fetched[request_id]
        self.fetched[request_id] = min(known + num_tokens, len(self.outputs[request_id]))
        self.scheduler.on_fetched({request_id: self.fetched[request_id]}, self.now)

    def num_unfetched(self, request_id: str) -> int:
        return len(self.outputs[request_id]) - self.fetched[request_id]

    def settle(self) -> None:
        """Step until no step can run."""
        for _ in range(1000):
            before = len(self.log)
            self.step()
            if len(self.log) == before and not self.in_flight:
                return
        raise AssertionError("it never comes to rest")

    def check_tokens(self, request_id: str) -> None:
        request = self.requests[request_id]
        start = len(request.prompt_token_ids)
        assert self.outputs[request_id] == [
            token_of(request_id, start + k) for k in range(len(self.outputs[request_id]))
        ]


@given(data=st.data(), policy=st.sampled_from(PAUSING), depth=st.integers(1, 2))
def test_all_end_with_their_tokens_however_they_are_fetched(
    data: st.DataObject, policy: str, depth: int
) -> None:
    config = make_config(policy, window_tokens=WINDOW, max_num_seqs=3, num_blocks=24, max_queue_seconds=None)
    driver = Fetched(config, depth=depth)
    for number in range(data.draw(st.integers(1, 7))):
        slo = data.draw(st.sampled_from([None, SLO(ttft=30.0, tbt=5.0)]))
        length, most = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 40))
        driver.add(make_request(f"r{number}", length, most, slo=slo))
    names = list(driver.requests)
    for _ in range(3000):
        if not driver.scheduler.num_unfinished:
            break
        if data.draw(st.integers(0, 3)) == 0:
            driver.fetch(data.draw(st.sampled_from(names)), data.draw(st.integers(1, 12)))
        before = len(driver.log)
        driver.step()
        driver.scheduler.check_invariants()
        assert all(driver.num_unfetched(name) <= WINDOW + depth for name in names)
        is_at_rest = len(driver.log) == before and not driver.in_flight
        if is_at_rest and driver.scheduler.waits_for_fetches:
            for name in names:
                driver.fetch(name)
    assert driver.finished == dict.fromkeys(names, FinishReason.LENGTH)
    for name in names:
        driver.check_tokens(name)
        assert len(driver.outputs[name]) == driver.requests[name].sampling.max_tokens


@pytest.mark.parametrize("policy", PAUSING)
@pytest.mark.parametrize("depth", [1, 2])
def test_where_all_is_fetched_nothing_is_decided_otherwise(policy: str, depth: int) -> None:
    def run(**changes: Any) -> list[Any]:
        driver = Fetched(make_config(policy, **changes), depth=depth)
        for number in range(12):
            driver.add(make_request(f"r{number}", 5 + 9 * number, 30, slo=SLO(ttft=50.0, tbt=5.0)))
        while driver.step():
            for name in driver.requests:
                driver.fetch(name)
        return [(each.rows, each.released_ids) for each in driver.log]

    assert run(window_tokens=WINDOW) == run()


@pytest.mark.parametrize("policy", PAUSING)
def test_who_is_paused_keeps_its_kv_and_goes_on_with_one_token(policy: str) -> None:
    driver = Fetched(make_config(policy, window_tokens=WINDOW))
    driver.add(make_request("a", 20, 40))
    driver.settle()
    assert len(driver.outputs["a"]) == WINDOW
    assert driver.scheduler.waits_for_fetches
    driver.fetch("a", 3)
    driver.settle()
    assert len(driver.outputs["a"]) == WINDOW + 3
    assert driver.scheduler.table.num_preemptions == 0
    assert [row.num_new_tokens for row in driver.log[-1].rows] == [1]
    assert not driver.log[-1].admitted


@pytest.mark.parametrize("policy", PAUSING)
@pytest.mark.parametrize("lacks", ["slots", "blocks"])
def test_who_is_paused_gives_way_to_who_waits(policy: str, lacks: str) -> None:
    limits = {"max_num_seqs": 2} if lacks == "slots" else {"num_blocks": 16}
    driver = Fetched(make_config(policy, window_tokens=WINDOW, **limits))
    length = 20 if lacks == "slots" else 100
    for name in "ab":
        driver.add(make_request(name, length, 40))
    driver.settle()
    driver.add(make_request("c", length, 6, arrival=driver.now))
    driver.settle()
    driver.scheduler.check_invariants()
    assert driver.finished == {"c": FinishReason.LENGTH}
    assert driver.scheduler.table.num_preemptions == 1  # as many as it takes
    aside = [
        each.request_id
        for each in driver.scheduler.table.states.values()
        if each.status is RequestStatus.ASIDE
    ]
    assert len(aside) == 1
    assert not driver.scheduler.waiting
    while driver.scheduler.num_unfinished:
        driver.fetch("a")
        driver.fetch("b")
        driver.settle()
    for name in "abc":
        driver.check_tokens(name)
    assert [len(driver.outputs[name]) for name in "abc"] == [40, 40, 6]


def test_who_sits_aside_may_be_aborted() -> None:
    driver = Fetched(make_config(window_tokens=WINDOW, max_num_seqs=1))
    driver.add(make_request("a", 20, 40))
    driver.settle()
    driver.add(make_request("b", 20, 3))
    driver.settle()
    driver.abort("a")
    assert driver.finished["a"] is FinishReason.ABORT
    driver.scheduler.on_fetched({"a": 8}, driver.now)
    assert driver.scheduler.num_unfinished == 0
    driver.scheduler.check_invariants()


def test_who_is_paused_binds_no_step_and_is_late_for_nothing() -> None:
    """A client that reads late must neither slow down others nor be hurried along at their cost."""
    driver = Fetched(make_config("slo", window_tokens=WINDOW))
    driver.add(make_request("a", 20, 200, slo=SLO(ttft=10.0, tbt=2.0)))
    driver.settle()
    driver.now += 500.0
    driver.add(make_request("b", 20, 6, arrival=driver.now))
    driver.step()
    assert driver.log[-1].budget is None
    driver.fetch("a")
    state = driver.scheduler.table.states["a"]
    assert state.slo.next_deadline > driver.now
    driver.settle()
    assert not state.slo.is_best_effort
    assert state.slo.num_late_tokens == 0


def test_a_detached_request_hears_of_fetches_too() -> None:
    driver = Fetched(make_config(window_tokens=WINDOW))
    driver.add(make_request("a", 20, 40))
    driver.settle()
    driver.scheduler.handover.detach("a")
    driver.fetch("a")
    driver.scheduler.handover.reattach("a")
    driver.settle()
    assert len(driver.outputs["a"]) == 2 * WINDOW


@pytest.mark.parametrize("policy", ["slo", "sarathi"])
def test_who_is_paused_takes_no_turn_from_dear_grammars(policy: str) -> None:
    driver = Fetched(make_config(policy, window_tokens=WINDOW))
    grammar = replace(UNKNOWN_GRAMMAR, seconds=1.0)
    for name in "ab":
        driver.add(make_request(name, 5, 40, grammar=grammar))
    driver.settle()
    while "b" not in driver.finished:
        before = len(driver.outputs["b"])
        driver.fetch("b")
        driver.settle()
        assert len(driver.outputs["b"]) > before
    assert len(driver.outputs["a"]) == WINDOW


@pytest.mark.parametrize("policy", ["static", "orca"])
def test_policies_that_preempt_nobody_pause_nobody(policy: str) -> None:
    driver = Fetched(make_config(policy, window_tokens=WINDOW))
    driver.add(make_request("a", 20, 40))
    driver.run()
    assert len(driver.outputs["a"]) == 40


def test_the_load_of_a_replica_leaves_out_who_is_paused() -> None:
    driver = Fetched(make_config("slo", window_tokens=WINDOW))
    for name in "abc":
        driver.add(make_request(name, 20, 40))
    driver.settle()
    driver.fetch("b")
    assert driver.scheduler.load(driver.now).num_decodes == 1
