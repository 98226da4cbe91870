"""The TTFT predicted on arrival against what then happens, and which requests are rejected."""

from __future__ import annotations

import pytest

from onbeat.core.errors import SLOUnattainable
from onbeat.core.request import FinishReason
from onbeat.core.slo import SLO, ShedMode
from tests.pure.scheduler.timed import FakeStepTime, make_request
from tests.pure.scheduler.watch import INFEASIBLE, Watch
from tests.told import numbers


class TestPrediction:
    @pytest.mark.parametrize("num_late", [0, 1, 100])
    def test_behind_more_than_a_plan_looks_at(self, num_late):
        """Of those that it looks at some cannot be in time any more."""
        driver = Watch()
        driver.crowd(400, 300, slo=SLO(ttft=100.0, tbt=1.0))
        for i in range(num_late):
            driver.add(make_request(f"late{i}", 300, 2, slo=INFEASIBLE, shed=ShedMode.REJECT))
        driver.add(make_request("r", 300, 4, slo=SLO(ttft=110.0, tbt=1.0), shed=ShedMode.REJECT))
        driver.serve([], watch="r")
        assert driver.predicted["r"] == pytest.approx(driver.ttft("r"), rel=0.1 if num_late < 100 else 0.4)

    @pytest.mark.parametrize("num_prompt", [1, 100, 500, 1000])
    @pytest.mark.parametrize("slo", [SLO(ttft=2.0, tbt=0.1), SLO(ttft=2.0)], ids=str)
    def test_on_an_idle_replica(self, num_prompt, slo):
        driver = Watch()
        driver.serve([make_request("r", num_prompt, 3, slo=slo, shed=ShedMode.REJECT)])
        assert driver.predicted["r"] == pytest.approx(driver.ttft("r"), rel=0.25)

    @pytest.mark.parametrize("num_ahead", [1, 5, 12])
    @pytest.mark.parametrize("tbt", [None, 0.1])
    def test_behind_other_prompts(self, num_ahead, tbt):
        driver = Watch()
        slo = SLO(ttft=4.0, tbt=tbt)
        driver.serve(
            [make_request(f"r{i}", 700, 20, slo=slo, shed=ShedMode.REJECT) for i in range(num_ahead + 1)]
        )
        last = f"r{num_ahead}"
        assert driver.predicted[last] == pytest.approx(driver.ttft(last), rel=0.25)

    @pytest.mark.parametrize("num_streams", [4, 16])
    def test_beside_running_streams(self, num_streams):
        driver = Watch(FakeStepTime(fixed=1e-2, per_token=1e-4))
        slo = SLO(ttft=5.0, tbt=0.05)
        driver.serve([make_request(f"s{i}", 50, 400, slo=slo) for i in range(num_streams)], until=0.6)
        now = driver.now
        driver.serve(
            [
                make_request(f"r{i}", 800, 4, slo=SLO(ttft=2.0, tbt=0.05), arrival=now, shed=ShedMode.REJECT)
                for i in range(4)
            ]
        )
        for name in ("r0", "r1", "r2", "r3"):
            assert driver.predicted[name] == pytest.approx(driver.ttft(name), rel=0.25), name

    @pytest.mark.parametrize("cap", [64, 256])
    def test_with_less_tokens_a_step_than_time_would_allow(self, cap):
        driver = Watch(FakeStepTime(fixed=1e-2, per_token=1e-4), max_num_batched_tokens=cap)
        slo = SLO(ttft=4.0, tbt=0.5)
        driver.serve([make_request(f"r{i}", 700, 20, slo=slo, shed=ShedMode.REJECT) for i in range(3)])
        for name in ("r0", "r1", "r2"):
            assert driver.predicted[name] == pytest.approx(driver.ttft(name), rel=0.25), name

    def test_a_step_under_way_counts(self):
        driver = Watch()
        driver.add(make_request("first", 1000, 3, slo=SLO(ttft=2.0)))
        scheduled = driver.scheduler.schedule(0.0)
        assert scheduled is not None
        driver.in_flight.append(scheduled)
        driver.check_step(scheduled)
        driver.add(make_request("r", 100, 3, slo=SLO(ttft=2.0), shed=ShedMode.REJECT))
        driver.serve([])
        assert driver.predicted["r"] == pytest.approx(driver.ttft("r"), rel=0.25)

    def test_those_left_behind_are_not_before_it_though_they_are_due_at_the_same_time(self):
        driver = Watch(FakeStepTime(per_context=0.0, per_pair=0.0), max_model_len=16384)
        for index in range(4):  # 0.7 s each
            fields = {"slo": SLO(ttft=1.0), "shed": ShedMode.REJECT}
            driver.add(make_request(f"big {index}", 7000, 2, **fields))
        driver.add(make_request("r", 500, 2, slo=SLO(ttft=1.0), shed=ShedMode.REJECT))
        driver.serve([])
        assert driver.predicted["r"] == pytest.approx(driver.ttft("r"), rel=0.2)

    def test_best_effort_waits_for_all_who_have_deadlines(self):
        driver = Watch()
        crowd = [make_request(f"r{i}", 500, 2, slo=SLO(ttft=3.0)) for i in range(10)]
        driver.serve([*crowd, make_request("last", 500, 2)])
        assert max(driver.times[f"r{i}"][0] for i in range(10)) <= driver.times["last"][0]

    def test_is_made_only_for_who_asks_to_be_refused(self):
        driver = Watch()
        slo = SLO(ttft=2.0)
        driver.serve([make_request(mode.name, 100, 3, slo=slo, shed=mode) for mode in ShedMode])
        assert driver.predicted.keys() == {"REJECT"}


USUAL = SLO(ttft=1.0, tbt=0.1)
BY_SLOTS = {"max_num_seqs": 4}
BY_BLOCKS = {"num_blocks": 64}
"""Four of the prompts below hold 52, and grow."""


class TestFullMachine:
    """Streams have all slots, or all blocks: what is promised is held against when they end."""

    def full(self, num_ended: int = 0, *, slo: SLO | None = USUAL, **changes: int) -> Watch:
        """Let four streams run that may have 500 tokens, after some answers of 60."""
        driver = Watch(FakeStepTime(fixed=1e-2, per_token=1e-5, per_pair=0.0), **changes)
        for index in range(num_ended):
            driver.serve([make_request(f"h{index}", 20, 60, arrival=driver.now)])
        for index in range(4):
            driver.add(make_request(f"s{index}", 200, 500, slo=slo))
            driver.step()
        return driver

    @pytest.mark.parametrize("bound", [BY_SLOTS, {"num_blocks": 100}], ids=["slots", "blocks"])
    def test_as_many_are_taken_as_will_find_room(self, bound):
        """An answer takes 0.6 s in the mean: of four streams one ends every 0.15 s."""
        driver = Watch(FakeStepTime(fixed=1e-2, per_token=1e-5, per_pair=0.0), **bound)
        fields = {"slo": SLO(ttft=0.3, tbt=0.1), "shed": ShedMode.REJECT}
        driver.serve([make_request(f"h{i}", 20, 20 + 37 * i % 81) for i in range(16)])
        start = driver.now
        driver.serve(
            [
                make_request(f"r{i}", 200, 20 + 37 * i % 81, arrival=start + 0.02 * i, **fields)
                for i in range(600)
            ]
        )
        served = [name for name in driver.requests if name[0] == "r" and driver.times.get(name)]
        assert len(driver.rejected) > 2 * len(driver.expired), "most who are refused are told at once"
        assert all(driver.ttft(name) <= 0.3 for name in served)
        assert len(served) >= 0.9 * (driver.now - start) / 0.155, "slots do not stand empty"

    @pytest.mark.parametrize("bound", [BY_SLOTS, BY_BLOCKS], ids=["slots", "blocks"])
    def test_the_refusal_says_when_there_will_be_room(self, bound):
        """By the pace at which answers of 60 tokens ended before: of four one every 0.15 s or more."""
        driver = self.full(20, **bound)
        refusal = driver.ask("new", 200, slo=SLO(ttft=0.05, tbt=0.1))
        assert "predicted" in str(refusal)
        driver.step()
        assert driver.ask("patient", 200, slo=SLO(ttft=10.0, tbt=0.1)) is None
        assert 0.08 < refusal.predicted_ttft < 0.6

    def test_before_any_answer_has_ended_a_usual_one_counts(self):
        """Half of the answers end within 212 tokens, 2.1 s: of four streams one ends every 0.5 s."""
        driver = self.full(**BY_SLOTS)
        taken = [driver.ask(f"r{i}", 200, max_tokens=500, slo=USUAL) is None for i in range(8)]
        assert sum(taken) in (1, 2)
        assert taken[0]

    @pytest.mark.parametrize("bound", [BY_SLOTS, BY_BLOCKS], ids=["slots", "blocks"])
    def test_whoever_would_be_preempted_holds_nobody_up(self, bound):
        driver = self.full(slo=None, **bound)
        assert driver.ask("new", 200, slo=SLO(ttft=0.2, tbt=0.1)) is None
        driver.serve([], watch="new")
        assert driver.ttft("new") <= 0.2

    def test_who_will_be_given_up_takes_no_room(self):
        """They would be first, but cannot be in time: whoever can is promised the slot that ends next."""
        driver = self.full(20, **BY_SLOTS)
        for index in range(12):
            slo = SLO(ttft=0.2, tbt=0.1)
            driver.add(
                make_request(f"w{index}", 200, 60, slo=slo, shed=ShedMode.RELEGATE, arrival=driver.now)
            )
        assert driver.ask("new", 200, slo=SLO(ttft=0.8, tbt=0.1)) is None


class TestRefusal:
    def test_says_what_is_predicted_and_when_to_come_again(self):
        driver = Watch()
        driver.crowd(10)
        error = driver.ask("r", 100, slo=SLO(ttft=0.5))
        assert isinstance(error, SLOUnattainable)
        assert error.code == "slo_unattainable"
        assert error.predicted_ttft > 0.5
        assert error.retry_after == pytest.approx(error.predicted_ttft - 0.5)
        assert f"{error.predicted_ttft * 1e3:.0f} ms" in str(error)
        assert "500 ms" in str(error)

    def test_what_was_predicted_is_what_would_have_happened(self):
        """The same load twice; once nobody may refuse."""
        slo = SLO(ttft=0.5)
        refusing, taking = Watch(), Watch()
        for driver, shed in ((refusing, ShedMode.REJECT), (taking, ShedMode.OFF)):
            driver.crowd(10)
            driver.ask("r", 300, slo=slo, shed=shed)
            driver.serve([])
        error = refusing.rejected["r"]
        assert isinstance(error, SLOUnattainable)
        assert error.predicted_ttft == pytest.approx(taking.ttft("r"), rel=0.25)

    def test_whoever_comes_again_after_that_time_is_taken_and_in_time(self):
        driver = Watch()
        driver.crowd(10)
        slo = SLO(ttft=0.5)
        error = driver.ask("r", 100, slo=slo)
        assert isinstance(error, SLOUnattainable)
        driver.serve([], until=1.25 * error.retry_after)
        assert driver.ask("again", 100, slo=slo) is None
        driver.serve([])
        assert driver.ttft("again") <= 0.5

    def test_those_who_come_in_time_are_taken_whatever_comes_later(self):
        driver = Watch()
        driver.crowd(10, slo=SLO(ttft=60.0))
        assert driver.ask("r", 100, slo=SLO(ttft=0.5)) is None
        driver.serve([])
        assert driver.ttft("r") <= 0.5

    def test_nobody_is_let_in_at_the_cost_of_those_who_were_accepted(self):
        driver = Watch()
        for index in range(5):
            assert driver.ask(f"r{index}", 900, slo=SLO(ttft=0.8)) is None
        error = driver.ask("late", 900, slo=SLO(ttft=0.3))
        assert isinstance(error, SLOUnattainable)
        assert "accepted" in str(error)
        driver.serve([])
        assert all(driver.ttft(f"r{index}") <= 0.8 for index in range(5))

    @pytest.mark.parametrize("order", ["most", "longest-wait"])
    @pytest.mark.parametrize(("num_prompt", "is_taken"), [(5200, False), (2000, True)])
    def test_nor_where_somebody_is_left_behind_already(self, order, num_prompt, is_taken):
        """Of three that were accepted, of 0.2, 0.9 and 0.55 s of work, not all can be in time."""
        model = FakeStepTime(fixed=2e-3, per_context=0.0, per_pair=0.0)
        alone, together = (Watch(model, shed_order=order, max_model_len=16384) for _ in range(2))
        for driver in (alone, together):
            for name, size, ttft in (("a", 2000, 0.5), ("b", 9000, 1.0), ("c", 5500, 1.2)):
                fields = {"slo": SLO(ttft=ttft), "shed": ShedMode.RELEGATE}
                driver.add(make_request(name, size, 2, **fields))
        error = together.ask("r", num_prompt, max_tokens=2, slo=SLO(ttft=0.9))
        assert (error is None) is is_taken
        for driver in (alone, together):
            driver.serve([])
        in_time = [
            {name for name in driver.times if driver.ttft(name) <= driver.requests[name].slo.ttft}
            for driver in (alone, together)
        ]
        assert in_time[0] <= in_time[1]
        assert error is not None or "r" in in_time[1]

    def test_nobody_is_let_in_at_the_cost_of_the_running_streams(self):
        driver = Watch()
        slo = SLO(ttft=1.0, tbt=3e-3)
        driver.serve([make_request(f"s{i}", 10, 900, slo=slo) for i in range(8)], until=0.2)
        assert driver.ask("none", 10, slo=SLO(ttft=5.0)) is None
        errors = [driver.ask(f"r{i}", 10, slo=SLO(ttft=5.0, tbt=1.0)) for i in range(3)]
        driver.serve([], until=driver.now + 0.2)
        errors += [driver.ask(f"q{i}", 900, slo=SLO(ttft=5.0, tbt=1.0)) for i in range(3)]
        assert any(error is not None and "running streams" in str(error) for error in errors)

    def test_nobody_is_refused_for_a_pace_that_nobody_is_held_to(self):
        driver = Watch()
        driver.serve([make_request(f"s{i}", 10, 900, slo=SLO(e2e=3.0)) for i in range(8)], until=0.2)
        assert driver.ask("r", 10, max_tokens=900, slo=SLO(e2e=3.0)) is None

    def test_nobody_is_refused_for_the_pace_of_one_with_a_tbt_either(self):
        """4,000 tokens in 60 s are one in 15 ms, and a step takes 20: the objective is 100."""
        driver = Watch(FakeStepTime(fixed=0.02), max_model_len=8192)
        driver.serve([make_request("s", 10, 900, slo=SLO(ttft=1.0, tbt=0.1))], until=0.2)
        assert driver.ask("r", 10, max_tokens=4000, slo=SLO(tbt=0.1, e2e=60.0)) is None

    def test_others_are_not_refused_for_it(self):
        """30 streams with steps of 0.14 s keep the objective of each, if not the pace, 0.13 s."""
        driver = Watch(FakeStepTime(fixed=0.02, per_token=4e-3), max_model_len=8192)
        paced = make_request("s", 10, 400, slo=SLO(ttft=2.0, tbt=1.0, e2e=60.0))
        driver.serve(
            [paced, *(make_request(f"r{i}", 10, 400, slo=SLO(ttft=5.0, tbt=1.0)) for i in range(30))],
            until=2.0,
        )
        assert driver.ask("r", 10, max_tokens=50, slo=SLO(ttft=8.0, tbt=1.0)) is None

    @pytest.mark.parametrize("tbt", [None, 1e-3])
    def test_nobody_is_refused_for_streams_whose_only_token_is_the_first(self, tbt):
        driver = Watch(FakeStepTime(fixed=2e-3, per_token=2e-3, per_pair=0.0, per_context=0.0))
        full = [make_request(f"s{i}", 10, 900, slo=SLO(ttft=5.0, tbt=0.05)) for i in range(24)]
        driver.serve(full, until=2.0)
        assert "running streams" in str(driver.ask("two", 10, max_tokens=2, slo=SLO(ttft=30.0)))
        assert driver.ask("one", 10, max_tokens=1, slo=SLO(ttft=30.0, tbt=tbt)) is None

    def test_a_time_between_tokens_shorter_than_any_step_is_named(self):
        driver = Watch()
        driver.serve([make_request("s", 10, 900, slo=SLO(ttft=1.0, tbt=0.1))], until=0.2)
        error = driver.ask("r", 10, slo=SLO(tbt=1e-3))
        assert isinstance(error, SLOUnattainable)
        assert numbers(error)[:2] == [2.3, 1]

    @pytest.mark.parametrize("slo", [INFEASIBLE, SLO(ttft=0.5), SLO(e2e=0.1), None], ids=str)
    @pytest.mark.parametrize("shed", [ShedMode.RELEGATE, ShedMode.OFF])
    def test_who_did_not_ask_for_it_is_never_refused(self, shed, slo):
        driver = Watch()
        driver.crowd(10)
        assert driver.ask("r", 900, slo=slo, shed=shed) is None
        driver.serve([])
        assert driver.finished["r"] is FinishReason.LENGTH

    def test_refused_requests_leave_no_trace(self):
        alone, together = Watch(), Watch()
        for driver in (alone, together):
            driver.crowd(10)
        for index in range(5):
            if index < 3:
                before = together.scheduler.num_unfinished, len(together.scheduler.waiting)
                error = together.ask(f"r{index}", 500, slo=SLO(ttft=0.3, tbt=0.01), tenant="other")
                assert isinstance(error, SLOUnattainable)
                assert before == (together.scheduler.num_unfinished, len(together.scheduler.waiting))
                together.scheduler.check_invariants()
            alone.step()
            together.step()
        alone.serve([])
        together.serve([])
        assert alone.log == together.log
        assert together.ask("r0", 10, slo=SLO(ttft=9.0)) is None, "its id is free"
