"""Streams that go on here behind the tokens that another replica has delivered."""

from __future__ import annotations

from math import inf

import pytest

from onbeat.core.errors import InvalidRequest, Overloaded, PromptTooLong
from onbeat.core.request import FinishReason
from onbeat.core.slo import SLO, ShedMode
from tests.many_cases import each_case
from tests.pure.scheduler import timed
from tests.pure.scheduler.driver import (
    POLICY_NAMES,
    Driver,
    make_config,
    make_request,
    sent_tokens,
    token_of,
)
from tests.pure.scheduler.timed import FakeStepTime, TimedDriver


@each_case("policy", POLICY_NAMES)
@each_case("depth", [1, 2])
@each_case("num_blocks", [18, 64])
@each_case("prefix", [True, False])
def test_a_stream_cut_anywhere_goes_on_as_it_would_have(policy, depth, num_blocks, prefix):
    config = make_config(policy, num_blocks=num_blocks, enable_prefix_caching=prefix)
    driver = Driver(config, depth=depth)
    for num_sent in range(1, 40, 3):
        name = f"sent-{num_sent}"
        salt = f"salt-{num_sent % 2}"
        driver.add(make_request(name, 50, 40, salt=salt, **sent_tokens(name, 50, num_sent)))
        driver.add(make_request(f"new-{num_sent}", 20, 30))
    driver.run()
    assert set(driver.finished.values()) == {FinishReason.LENGTH}
    for name in (name for name in driver.outputs if name.startswith("sent")):
        assert driver.outputs[name] == [token_of(name, 50 + index) for index in range(40)]
    assert driver.scheduler.kv.pool.num_used_blocks == 0


def test_sent_tokens_are_computed_in_chunks_like_a_prompt():
    driver = Driver(make_config("sarathi"))
    driver.add(make_request("r", 20, 60, **sent_tokens("r", 20, 50)))
    driver.run()
    rows = [step.rows[0] for step in driver.log]
    assert [row.num_new_tokens for row in rows[:3]] == [32, 32, 6]
    assert [row.samples for row in rows[:3]] == [False, False, True]
    assert len(rows) == 3 + 9


def test_what_was_sent_is_output_that_the_prefix_cache_finds_again():
    driver = Driver(make_config("sarathi"))
    driver.add(make_request("r", 40, 40))
    driver.run()
    driver.add(make_request("r", 40, 60, **sent_tokens("r", 40, 40)))
    driver.log.clear()
    seen = []
    driver.receive = lambda outputs: seen.extend(outputs)
    driver.run()
    assert driver.log[0].rows[0].num_computed_tokens == 64  # of 79 computed before
    assert seen[0].num_cached_tokens == 40  # the prompt's; no answer has cached output
    assert (driver.scheduler.table.num_prefix_queries, driver.scheduler.table.num_prefix_hits) == (80, 40)


def test_without_a_prefix_cache_nothing_is_looked_up():
    driver = Driver(make_config("sarathi", enable_prefix_caching=False))
    driver.add(make_request("r", 40, 40))
    driver.run()
    assert driver.scheduler.table.num_prefix_queries == 0


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, 1), (13, 4), (20, 11)])
def test_min_tokens_counts_those_that_were_sent(min_tokens, expected):
    driver = Driver(make_config())
    sampling = {"stop_token_ids": tuple(range(1000)), "min_tokens": min_tokens}
    driver.add(make_request("r", 10, 30, **sampling, **sent_tokens("r", 10, 10)))
    driver.run()
    assert driver.finished == {"r": FinishReason.STOP}
    assert len(driver.outputs["r"]) == 10 + expected


def test_a_batch_is_still_formed_beside_resumed_streams():
    driver = Driver(make_config("static"))
    driver.add(make_request("a", 10, 30, **sent_tokens("a", 10, 20)))
    driver.add(make_request("b", 200, 30))
    driver.add(make_request("c", 200, 30))
    for _ in range(3):
        driver.step()
    assert len(driver.scheduler.running) == 3


def test_an_answer_that_is_complete_is_no_stream():
    driver = Driver(make_config())
    with pytest.raises(InvalidRequest) as caught:
        driver.add(make_request("r", 10, 8, **sent_tokens("r", 10, 8)))
    assert caught.value.param == "resumed_token_ids"


def test_a_stream_that_does_not_fit_here_is_named():
    driver = Driver(make_config())
    driver.add(make_request("fits", 200, 80, **sent_tokens("fits", 200, 55)))
    with pytest.raises(PromptTooLong, match=r"200 .* 56 "):
        driver.add(make_request("r", 200, 80, **sent_tokens("r", 200, 56)))


def test_a_request_that_comes_with_kv_is_not_added():
    driver = Driver(make_config())
    with pytest.raises(InvalidRequest, match="49 tokens"):
        driver.add(make_request("r", 40, 20, num_external_tokens=49, **sent_tokens("r", 40, 10)))


def resumed(name: str, num_sent: int, *, max_tokens: int = 40, **changes):
    """Return a stream that was resumed now, of a request with objectives."""
    return timed.make_request(name, 100, max_tokens, **sent_tokens(name, 100, num_sent), **changes)


class TestDeadlines:
    ARRIVAL = 10.0

    def slo_of(self, slo: SLO | None, num_sent: int = 5, *, now: float = 12.5, mode="stream", **changes):
        request = resumed("r", num_sent, slo=slo, arrival=self.ARRIVAL, **changes)
        state = timed.make_state(request, mode=mode).slo
        state.begin(request, mode, now=now, max_output_tokens=40)
        return state

    def test_the_next_token_is_due_when_it_was_on_the_other_replica(self):
        slo = SLO(ttft=2.0, tbt=0.1)
        undisturbed = timed.make_state(timed.make_request("r", 100, 40, slo=slo, arrival=self.ARRIVAL)).slo
        for index in range(5):
            undisturbed.note_delivery(11.0 + 0.02 * index)
        state = self.slo_of(slo, first_token_time=11.0)
        assert state.next_deadline == pytest.approx(undisturbed.next_deadline) == pytest.approx(12.5)
        assert state.first_delivery == undisturbed.first_delivery
        for time in (12.4, 12.5):
            state.note_delivery(time)
            undisturbed.note_delivery(time)
        assert state.next_deadline == pytest.approx(undisturbed.next_deadline)
        assert not state.is_best_effort

    def test_without_a_ttft_objective_deadlines_go_on_from_the_first_token(self):
        assert self.slo_of(SLO(tbt=0.1), first_token_time=13.0).next_deadline == pytest.approx(13.5)

    def test_without_a_tbt_objective_nothing_is_due(self):
        state = self.slo_of(SLO(ttft=2.0), first_token_time=11.0)
        assert state.next_deadline == inf
        assert not state.is_best_effort

    def test_a_late_first_token_stays_a_missed_objective(self):
        assert self.slo_of(SLO(ttft=2.0, tbt=0.1), first_token_time=12.1).is_best_effort

    def test_of_an_e2e_objective_it_has_what_is_left(self):
        request = resumed(
            "r", 5, slo=SLO(e2e=10.0), arrival=self.ARRIVAL, max_tokens=400, first_token_time=18.0
        )
        state = timed.make_state(request).slo
        state.begin(request, "stream", now=18.1, max_output_tokens=400, num_left=38)
        assert not state.is_best_effort
        assert (state.tbt, state.next_deadline) == (pytest.approx(0.05), pytest.approx(18.15))

    @pytest.mark.parametrize(("slo", "due"), [(SLO(ttft=2.0, tbt=0.1), 12.5), (SLO(tbt=0.1), 10.5)])
    def test_a_first_token_of_an_unknown_time_was_in_time(self, slo, due):
        state = self.slo_of(slo)
        assert state.next_deadline == pytest.approx(due)
        assert not state.is_best_effort

    def test_in_gap_mode_the_gap_began_before_it_came(self):
        state = self.slo_of(SLO(ttft=2.0, tbt=0.1), mode="gap", now=17.0, first_token_time=11.0)
        assert state.next_deadline == pytest.approx(17.1)
        assert state.note_delivery(17.05) is False
        assert state.next_deadline == pytest.approx(17.15)

    def test_one_late_token_in_a_hundred_is_allowed_of_the_whole_answer(self):
        slo = SLO(ttft=2.0, tbt=0.1)
        state = self.slo_of(slo, max_tokens=400, first_token_time=11.0)
        request = resumed("r", 5, slo=slo, arrival=self.ARRIVAL, max_tokens=400, first_token_time=11.0)
        state.begin(request, "stream", now=12.5, max_output_tokens=400)
        assert [state.note_delivery(50.0) for _ in range(5)] == [False] * 4 + [True]


ROOMY = {"num_blocks": 4096, "max_num_seqs": 64}


class TestCapacity:
    """Its client has a part of the answer: it is served, late if need be."""

    SLO = SLO(ttft=0.5, tbt=0.05)

    def test_no_objective_refuses_it(self):
        driver = TimedDriver(make_slo_config(), FakeStepTime())
        driver.now = 5.0
        for index in range(30):
            driver.add(timed.make_request(f"c{index}", 900, 2, slo=SLO(ttft=0.1), arrival=driver.now))
        fields = {"slo": self.SLO, "shed": ShedMode.REJECT, "arrival": 0.1, "first_token_time": 0.3}
        driver.add(timed.make_request("new", 100, 9, **fields | {"first_token_time": None}))
        driver.add(resumed("r", 5, **fields))
        assert list(driver.rejected) == ["new"]
        driver.serve([])
        assert len(driver.outputs["r"]) == 40

    @pytest.mark.parametrize("limit", ["max_num_queued_reqs", "max_num_queued_tokens"])
    def test_no_full_queue_refuses_it(self, limit):
        driver = TimedDriver(make_slo_config(max_num_seqs=1, **{limit: 1}), FakeStepTime())
        for name in "abc":
            driver.add(timed.make_request(name, 100, 4))
        assert isinstance(driver.rejected["c"], Overloaded)
        driver.add(resumed("r", 5))
        driver.serve([])
        assert len(driver.outputs["r"]) == 40

    def test_no_wait_refuses_or_ends_it(self):
        driver = TimedDriver(make_slo_config(max_queue_seconds=0.5, max_num_seqs=2), FakeStepTime())
        for index in range(12):
            driver.add(timed.make_request(f"a{index}", 900, 200))
        assert driver.rejected
        driver.add(resumed("r", 5))
        driver.serve([])
        assert driver.finished["r"] is FinishReason.LENGTH
        assert len(driver.outputs["r"]) == 40

    def test_it_goes_by_the_deadline_of_its_next_token(self):
        driver = TimedDriver(make_slo_config(max_num_seqs=1), FakeStepTime(per_token=1e-3))
        driver.add(timed.make_request("first", 10, 2, slo=SLO(ttft=9.0)))
        driver.step()
        driver.add(timed.make_request("later", 100, 2, slo=SLO(ttft=0.9)))
        driver.add(resumed("r", 5, slo=self.SLO, first_token_time=0.0))  # due at 0.75 s
        driver.add(timed.make_request("sooner", 100, 2, slo=SLO(ttft=0.7)))
        driver.serve([])
        assert driver.first_scheduled == ["first", "sooner", "r", "later"]
        assert "r" not in driver.rejected

    @pytest.mark.parametrize("shed", ShedMode)
    @pytest.mark.parametrize("order", ["most", "longest-wait"])
    def test_an_overload_does_not_hold_it_up_for_being_late(self, shed, order):
        driver = TimedDriver(make_slo_config(shed_order=order), FakeStepTime(fixed=8e-3, per_pair=0))
        new = [
            timed.make_request(f"n{i}", 400, 8, slo=self.SLO, shed=ShedMode.RELEGATE, arrival=i / 30)
            for i in range(300)
        ]
        driver.serve(new[:150], until=5.0)
        fields = {"slo": self.SLO, "shed": shed, "arrival": 0.0, "first_token_time": 0.3}
        driver.add(resumed("r", 50, max_tokens=60, **fields))  # due at 3 s
        driver.serve(new[150:], until=7.0)
        assert driver.times["r"][0] < 5.5
        assert len(driver.times["r"]) == 10


def make_slo_config(**changes):
    return timed.make_config(**(ROOMY | changes))
