"""Requests that expire, idle replicas and hard caps of `slo`."""

from __future__ import annotations

import pytest

from onbeat.core.errors import Overloaded, SLOUnattainable
from onbeat.core.request import FinishReason
from onbeat.core.slo import SLO, ShedMode
from tests.pure.scheduler.timed import FakeStepTime
from tests.pure.scheduler.watch import INFEASIBLE, LearningModel, SlowedModel, Watch
from tests.told import numbers


class TestExpiry:
    def make_stalled(self, shed: ShedMode) -> Watch:
        """A request that was taken, on a machine that then stood still."""
        driver = Watch()
        driver.crowd(3)
        assert driver.ask("r", 500, slo=SLO(ttft=1.0), shed=shed) is None
        driver.now += 5.0
        driver.serve([])
        return driver

    def test_who_would_rather_be_refused_than_late_ends_with_what_was_predicted(self):
        driver = self.make_stalled(ShedMode.REJECT)
        (output,) = driver.expired
        assert output.request_id == "r"
        assert output.new_token_ids == []
        assert output.error is not None
        assert "1000 ms" in output.error
        assert output.predicted_ttft == pytest.approx(0.5, rel=0.25)
        assert "r" not in driver.first_scheduled
        state = driver.scheduler.planner.state()
        assert state is not None
        assert state.num_rejected == {"deadline_exceeded": 1}
        assert driver.scheduler.planner.take_expired() == []

    def test_others_are_served_all_the_same(self):
        driver = self.make_stalled(ShedMode.RELEGATE)
        assert not driver.expired
        assert driver.finished["r"] is FinishReason.LENGTH
        state = driver.scheduler.planner.state()
        assert state is not None
        assert (state.num_relegated, state.num_rejected) == (1, {})

    def test_whoever_has_begun_is_not_ended(self):
        driver = Watch(FakeStepTime(fixed=0.05))
        assert driver.ask("r", 1000, slo=SLO(ttft=0.5)) is None
        driver.step()
        assert not driver.finished
        driver.now += 5.0
        driver.serve([])
        assert driver.finished["r"] is FinishReason.LENGTH


class TestIdleReplica:
    @pytest.mark.parametrize(
        ("slo", "says"),
        [
            (INFEASIBLE, [191, 2, 290]),
            (SLO(tbt=1e-3), [20, 1, 31]),
            (SLO(ttft=1e-3, tbt=1e-3), [191, 1, 20, 1, 290, 31]),
            (SLO(e2e=0.03), [191, 30, 10, 860]),
        ],
        ids=["ttft", "tbt", "both", "e2e"],
    )
    def test_refuses_what_it_can_never_keep_with_the_same_words_each_time(self, slo, says):
        driver = Watch(FakeStepTime(fixed=0.02))
        for second in range(0, 100, 10):
            driver.now = float(second)
            refusal = driver.ask(f"r{second}", 900, slo=slo)
            assert isinstance(refusal, SLOUnattainable)
            assert numbers(refusal) == says
            assert refusal.retry_after is None, "waiting does not help"
            if second == 50:
                driver.ask("served meanwhile", 100)
                driver.serve([])
        driver.crowd(1)
        assert numbers(driver.ask("beside others", 900, slo=slo)) == says

    def test_serves_who_asks_for_as_much_as_it_said(self):
        driver = Watch(FakeStepTime(fixed=0.02))
        assert numbers(driver.ask("r", 900, slo=SLO(ttft=1e-3, tbt=1e-3)))[-2:] == [290, 31]
        assert driver.ask("again", 900, slo=SLO(ttft=0.29, tbt=0.031)) is None
        driver.serve([])
        assert driver.ttft("again") <= 0.29

    @pytest.mark.parametrize(
        ("slo", "max_tokens", "is_taken"),
        [
            (SLO(ttft=4.0, tbt=1e-3), 40, True),
            (SLO(ttft=0.3, tbt=1e-3), 400, False),
            (SLO(tbt=1e-3), 40, False),
        ],
    )
    def test_a_stream_may_use_the_slack_of_its_first_token(self, slo, max_tokens, is_taken):
        """A decode takes about 21 ms, so each is 20 ms further behind."""
        for mode, takes in (("stream", is_taken), ("gap", False)):
            driver = Watch(FakeStepTime(fixed=0.02), slo_mode=mode)
            assert (driver.ask("r", 900, max_tokens=max_tokens, slo=slo) is None) is takes

    def test_tries_one_while_its_model_has_seen_few_steps(self):
        driver = Watch()
        assert driver.ask("first", 900, max_tokens=20, slo=SLO(ttft=0.1)) is None
        driver.serve([])
        assert driver.scheduler.planner.num_relegated == 1
        for second in (100, 200):
            driver.now = float(second)
            assert driver.ask(f"r{second}", 900, slo=SLO(ttft=0.1)) is not None

    @pytest.mark.parametrize("slo", [SLO(ttft=0.2), SLO(tbt=4e-3)], ids=["ttft", "tbt"])
    def test_tries_one_now_and_then_that_it_could_once_keep(self, slo):
        driver = Watch(model := SlowedModel())
        assert driver.ask("before", 900, max_tokens=40, slo=slo) is None
        driver.serve([])
        model.factor = 3.0
        driver.ask("slow", 900, max_tokens=40)
        driver.serve([])
        start, taken = driver.now, []
        for second in range(0, 100, 8):
            driver.now = start + second
            if driver.ask(f"r{second}", 900, slo=slo) is None:
                taken.append(second)
            driver.serve([])
        assert taken == [0, 32, 64, 96]
        assert driver.scheduler.planner.num_relegated == 4
        assert all(driver.finished[f"r{second}"] is FinishReason.LENGTH for second in taken)

    def test_does_not_try_while_it_has_others_to_serve(self):
        driver = Watch()
        driver.crowd(1)
        assert driver.ask("waiting", 900, slo=SLO(ttft=0.1)) is not None
        driver.step()
        assert driver.ask("running", 900, slo=SLO(ttft=0.1)) is not None

    def test_a_request_that_it_can_serve_is_no_try(self):
        driver = Watch()
        assert driver.ask("easy", 100, slo=SLO(ttft=1.0)) is None
        driver.serve([])
        assert driver.ask("infeasible", 900, slo=SLO(ttft=0.1)) is None
        driver.serve([])
        assert driver.ask("another", 900, slo=SLO(ttft=0.1)) is not None

    def test_keeps_whom_it_takes_though_it_has_just_learnt_that_it_is_faster(self):
        """What steps take, and what prompts cost, must come from the same state of the model."""
        driver = Watch(LearningModel(factor=20.0))
        assert driver.ask("slow", 300, slo=SLO(ttft=0.2)) is None, "it is tried"
        driver.serve([])
        for num_prompt in (50, 90, 200, 400):
            assert driver.ask(f"r{num_prompt}", num_prompt, slo=SLO(ttft=0.2)) is None
            driver.serve([])
            assert driver.finished[f"r{num_prompt}"] is FinishReason.LENGTH


class TestHardCaps:
    @pytest.mark.parametrize("shed", list(ShedMode))
    def test_no_more_requests_wait_than_may(self, shed):
        driver = Watch(max_num_queued_reqs=2, max_num_seqs=1)
        driver.ask("r0", 10, shed=shed)
        driver.step()
        for index in range(1, 4):
            driver.ask(f"r{index}", 10, shed=shed)
        assert list(driver.rejected) == ["r3"], "those who run do not wait"
        error = driver.rejected["r3"]
        assert isinstance(error, Overloaded)
        assert error.code == "server_overloaded"
        assert driver.scheduler.num_unfinished == 3
        driver.serve([])
        assert driver.finished.keys() == {"r0", "r1", "r2"}

    def test_no_more_tokens_wait_than_may_save_for_one_that_waits_alone(self):
        driver = Watch(max_num_queued_tokens=500)
        assert driver.ask("long", 900) is None
        error = driver.ask("short", 1)
        assert isinstance(error, Overloaded)
        assert " 900 prompt tokens" in str(error)
        driver.step()
        assert driver.ask("a", 300) is None
        assert driver.ask("b", 200) is None
        assert isinstance(driver.ask("c", 1), Overloaded)
