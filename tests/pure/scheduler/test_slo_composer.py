"""Which step the policy plans: its time, who is in it, and what becomes of streams and prompts."""

from __future__ import annotations

import pytest

from onbeat.core.request import FinishReason
from onbeat.core.slo import SLO, SLO_MODES, ShedMode, SLOMode
from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.slo import composer
from onbeat.scheduler.replica.slo.composer import EARNED_SHARE, GAP_QUANTILE, LONGEST_GAP, SPENT_SHARE
from tests.pure.scheduler.slo_watch import Watch
from tests.pure.scheduler.timed import FakeStepTime, make_request


class LongTail(FakeStepTime):
    """Of a hundred steps more than one takes twice as long, fewer than five do."""

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        return super().step_time(shape) * (2.0 if q is not None and q > 0.95 else 1.0)


def test_an_e2e_objective_takes_nothing_from_a_tbt_objective_beside_it():
    """No step keeps its pace, a token in 15 ms: the stream has its 0.1 s all the same, beside prompts too."""
    times = []
    for slo in (SLO(ttft=2.0, tbt=0.1), SLO(ttft=2.0, tbt=0.1, e2e=60.0)):
        driver = Watch(FakeStepTime(fixed=0.02), max_model_len=16384)
        prompts = [make_request(f"p{i}", 8000, 2, arrival=0.5 + i) for i in range(20)]
        driver.serve([make_request("s", 10, 4000, slo=slo), *prompts], until=20.0)
        assert max(driver.lateness("s")) <= 1e-9
        times.append(len(driver.times["s"]))
    assert times[1] >= times[0]


class TestBudget:
    @pytest.mark.parametrize("mode", SLO_MODES)
    def test_is_the_tightest_objective_or_the_least_slack(self, mode):
        driver = Watch(slo_mode=mode)
        driver.add(make_request("a", 10, 60, slo=SLO(ttft=0.3, tbt=0.02)))
        driver.add(make_request("b", 10, 60, slo=SLO(ttft=0.05, tbt=0.05)))
        driver.serve([], until=0.01)
        while len(driver.finished) < 1:
            if mode == "stream":
                due = {name: driver.next_due(name) for name in ("a", "b")}
            else:
                due = {name: driver.times[name][-1] + tbt for name, tbt in (("a", 0.02), ("b", 0.05))}
            now, first = driver.now, min(due, key=due.__getitem__)
            driver.step()
            assert driver.log[-1].budget_request_id == first
            ahead = due[first] - now
            in_hand = min(SPENT_SHARE * ahead, LONGEST_GAP * 0.02)
            most = max(0.02 * (1 - EARNED_SHARE), in_hand) if mode == "stream" else 0.02
            assert driver.log[-1].budget == pytest.approx(min(most, ahead))

    def test_is_the_slack_where_that_is_less_than_the_objective(self):
        """Its first token came at the last moment."""
        driver = Watch(FakeStepTime(fixed=0.02))
        driver.add(make_request("s", 10, 60, slo=SLO(ttft=0.0215, tbt=0.05)))
        driver.step()
        driver.now += 0.03
        due, now = driver.next_due("s"), driver.now
        assert 0 < due - now < 0.025
        driver.step()
        assert driver.log[-1].budget == pytest.approx(due - now)

    def test_foresees_rarer_long_steps_in_gap_mode(self):
        """There one in a hundred is what a P99 allows, and nothing earned makes up for it."""
        assert 0.45 < self.most_of_objective("gap") <= 0.5 + 1e-9
        assert 0.9 * LONGEST_GAP < self.most_of_objective("stream") <= LONGEST_GAP + 1e-9

    def most_of_objective(self, mode: SLOMode) -> float:
        """Return the largest share that a step with prompts has taken of the TBT objective."""
        driver = Watch(LongTail(), slo_mode=mode)
        stream = make_request("stream", 10, 200, slo=SLO(ttft=1.0, tbt=0.012))
        prompts = [make_request(f"r{i}", 1000, 2, slo=SLO(ttft=9.0), arrival=0.1) for i in range(5)]
        driver.serve([stream, *prompts])
        beside = [step for step in driver.log if step.budget is not None and step.shape.num_chunks]
        return max(driver.model.step_time(step.shape) for step in beside) / 0.012

    @pytest.mark.parametrize("slo", [None, SLO(ttft=3.0)], ids=["none", "no tbt"])
    def test_nothing_is_bounded_without_objectives(self, slo):
        driver = Watch()
        driver.serve([make_request(f"r{i}", 300, 5, slo=slo) for i in range(3)])
        assert {(step.budget, step.budget_request_id) for step in driver.log} == {(None, None)}

    @pytest.mark.parametrize(("mode", "objectives"), [("stream", LONGEST_GAP), ("gap", 1.0)])
    def test_a_step_spends_time_in_hand_but_no_stream_is_late(self, mode, objectives):
        """Its first token comes at once, so that the stream has all of its TTFT objective in hand."""
        driver = Watch(slo_mode=mode)
        stream = make_request("stream", 10, 200, slo=SLO(ttft=3.0, tbt=0.03))
        prompts = [make_request(f"r{i}", 1000, 2, slo=SLO(ttft=9.0), arrival=0.02) for i in range(8)]
        driver.serve([stream, *prompts])
        assert max(driver.gaps("stream")) == pytest.approx(0.03 * objectives, rel=0.01)
        assert max(driver.lateness("stream")) <= 1e-9

    def test_no_stream_is_late_beside_long_prompts(self):
        driver = Watch()
        streams = [make_request(f"s{i}", 10, 100, slo=SLO(ttft=0.2, tbt=0.02)) for i in range(5)]
        prompts = [make_request(f"r{i}", 1000, 2, slo=SLO(ttft=0.5), arrival=0.3) for i in range(5)]
        driver.serve([*streams, *prompts])
        assert all(max(driver.lateness(f"s{i}")) <= 1e-9 for i in range(5))

    @pytest.mark.parametrize(("mode", "q"), [("stream", None), ("gap", GAP_QUANTILE)])
    def test_it_is_full_by_the_mean_or_in_gap_mode_by_the_quantile(self, mode, q):
        model = FakeStepTime(spread=1.0)
        driver = Watch(model, slo_mode=mode)
        streams = [make_request(f"s{i}", 10, 100, slo=SLO(ttft=0.2, tbt=0.02)) for i in range(5)]
        driver.serve([*streams, make_request("prompt", 1000, 2, slo=SLO(ttft=0.9), arrival=0.1)])
        beside = [step for step in driver.log if step.shape.num_chunks and step.budget is not None]
        assert beside
        assert all(model.step_time(step.shape, q) <= step.budget + 1e-9 for step in beside)
        assert max(model.step_time(step.shape, q) / step.budget for step in beside) > 0.98


class TestObjectivesThatCannotBeKept:
    """A stream wants its tokens faster than any step brings one, and may have as many as fit the context."""

    def serve(self, slo: SLO | None, mode: SLOMode, until: float = 8.0) -> Watch:
        driver = Watch(FakeStepTime(fixed=8e-3), slo_mode=mode, num_blocks=4096, max_model_len=2**16)
        slos = {"s": SLO(ttft=2.0, tbt=0.05), "r": SLO(ttft=1.0, tbt=0.05)}
        load = [make_request(f"s{i}", 200, 200, slo=slos["s"], shed=ShedMode.RELEGATE) for i in range(8)]
        load += [
            make_request(f"r{i}", 200, 30, slo=slos["r"], arrival=1.0 + 0.25 * i, shed=ShedMode.RELEGATE)
            for i in range(8)
        ]
        if slo is not None:
            load.append(make_request("own", 50, 32_768, slo=slo, arrival=0.5, shed=ShedMode.RELEGATE))
        driver.serve(load, until=until)
        return driver

    def good(self, driver: Watch) -> list[str]:
        kept = driver.has_kept_gaps if driver.scheduler.config.slo_mode == "gap" else driver.is_good
        names = [name for name in driver.requests if name != "own"]
        return [name for name in names if name in driver.finished and kept(name)]

    @pytest.mark.parametrize("mode", SLO_MODES)
    @pytest.mark.parametrize("tbt", [1e-3, 8e-3])
    def test_one_stops_nobody(self, tbt, mode):
        driver = self.serve(SLO(ttft=2.0, tbt=tbt), mode)
        assert self.good(driver) == self.good(self.serve(None, mode))
        rows = [{row.request_id for row in step.rows} for step in driver.log]
        first = next(index for index, names in enumerate(rows) if "own" in names)
        assert all("own" in names for names in rows[first:]), "it goes on at the pace of the others"

    def test_one_counts_as_missed_by_what_its_answer_is_likely_to_have(self):
        """Not by one in a hundred of what the context would hold."""
        planner = self.serve(SLO(ttft=0.1, tbt=1e-3), "stream", until=2.0).scheduler.planner
        assert planner.state().num_missed == 1


class TestInFlight:
    def test_errors_of_predictions_do_not_add_up(self):
        """Steps take nine tenths of what they are expected to, always, and two are in flight."""
        driver = Watch(FakeStepTime(fixed=8e-3), depth=2)
        driver.model = FakeStepTime(fixed=7e-3, per_token=9e-5)
        driver.add(make_request("s", 10, 900, slo=SLO(ttft=1.0, tbt=0.05)))
        driver.serve([], until=5.0)
        assert driver.scheduler.in_flight.busy_until - driver.now < 0.02

    def test_whoever_has_only_its_first_token_due_has_none_once_that_is_in_flight(self):
        driver = Watch(depth=2)
        driver.add(make_request("r", 10, 20, slo=SLO(ttft=1.0)))
        driver.scheduler.schedule(driver.now)
        assert driver.scheduler.planner.state().decode_slacks == []

    @pytest.mark.parametrize("tbt", [0.01, 0.02, 0.03])
    def test_in_gap_mode_a_step_in_flight_earns_nothing(self, tbt):
        """Bursts of prompts that are in a hurry, so that steps take all the time that streams leave.

        A token that comes early leaves the next one no more than an interval. Planning ahead must not count
        on more: it made one long gap at the beginning of each burst, and every stream missed its objective.
        """
        streams = [make_request(f"s{i}", 20, 300, slo=SLO(ttft=1.0, tbt=tbt)) for i in range(8)]
        bursts = [
            make_request(f"r{2 * i + j}", 900, 2, slo=SLO(ttft=0.3), arrival=0.2 + 0.5 * i)
            for i in range(20)
            for j in range(2)
        ]
        shares = []
        for depth in (1, 2):
            driver = Watch(slo_mode="gap", depth=depth)
            driver.serve([*streams, *bursts])
            good = [driver.has_kept_gaps(request.request_id) for request in (*streams, *bursts)]
            assert all(good[:8])
            shares.append(sum(good) / len(good))
        assert shares[1] >= max(0.9, shares[0] - 0.03)


class TestPromptsThatEnd:
    @pytest.mark.parametrize(("num_tokens", "ttft"), [(200, 0.03), (400, 0.06)])
    def test_what_else_a_step_holds_does_not_make_them_late(self, num_tokens, ttft):
        """The step that ends it has room for much of the other prompt, and time for little of it."""
        driver = Watch()
        tight = make_request("tight", num_tokens, 2, slo=SLO(ttft=ttft, tbt=1.0))
        driver.serve([tight, make_request("long", 1000, 2, slo=SLO(ttft=9.0, tbt=1.0))])
        assert driver.times["tight"][0] <= ttft + 1e-9
        together = [step for step in driver.log if len(step.rows) == 2 and step.shape.num_chunks == 2]
        assert together, "the rest of the step is not thrown away"


class TestEarned:
    def slack_after_prompts(self, mode: SLOMode) -> tuple[int, float]:
        """Tokens that a stream got beside prompts that filled all steps, and how much slack it has won."""
        driver = Watch(slo_mode=mode)
        driver.add(make_request("s", 10, 400, slo=SLO(ttft=0.004, tbt=0.01)))
        driver.step()
        for index in range(20):
            driver.add(make_request(f"r{index}", 900, 1, slo=SLO(ttft=60.0)))
        first = driver.next_due("s") - driver.now
        num_before = len(driver.times["s"])
        driver.serve([], until=0.8)
        return len(driver.times["s"]) - num_before, driver.next_due("s") - driver.now - first

    def test_a_step_leaves_streams_a_part_of_their_objective(self):
        num_tokens, slack = self.slack_after_prompts("stream")
        assert num_tokens > 50
        # Chunks end at whole tokens, so that steps are a little shorter still.
        assert 1.0 <= slack / (num_tokens * 0.01 * EARNED_SHARE) < 1.4

    def test_in_gap_mode_that_would_be_for_nothing(self):
        num_tokens, slack = self.slack_after_prompts("gap")
        assert slack < 0.25 * num_tokens * 0.01 * EARNED_SHARE

    def test_it_outlasts_a_stall(self):
        driver = Watch()
        driver.add(make_request("s", 10, 400, slo=SLO(ttft=0.004, tbt=0.01)))
        driver.step()
        for index in range(40):
            driver.add(make_request(f"r{index}", 900, 1, slo=SLO(ttft=60.0)))
        driver.serve([], until=0.8)
        driver.now += 0.02
        driver.serve([])
        assert max(driver.lateness("s")) <= 0


class TestLateStream:
    def stall(self, seconds: float) -> Watch:
        """A stream that has just begun, prompts that wait, and a machine that stands still for a while."""
        driver = Watch(max_model_len=4096)
        driver.add(make_request("s", 10, 2000, slo=SLO(ttft=0.004, tbt=0.01)))
        driver.step()
        for index in range(10):
            driver.add(make_request(f"r{index}", 900, 1, slo=SLO(ttft=60.0)))
        driver.step()
        driver.now += seconds
        return driver

    @pytest.mark.parametrize("seconds", [0.03, 0.08])
    def test_decodes_alone_until_it_has_caught_up(self, seconds):
        driver = self.stall(seconds)
        num_alone = 0
        while driver.next_due("s") < driver.now + driver.model.smallest_step:
            driver.step()
            assert [row.request_id for row in driver.log[-1].rows] == ["s"]
            num_alone += 1
        assert num_alone == pytest.approx(seconds / (0.01 - driver.model.smallest_step), abs=2)
        driver.step()
        assert driver.log[-1].shape.num_chunks, "then prompts go on"
        driver.serve([])
        assert driver.is_good("s")

    def test_one_that_has_missed_its_objective_holds_up_nobody(self):
        driver = self.stall(0.5)
        (stream, *_) = driver.scheduler.running
        while not stream.slo.is_best_effort:
            driver.step()
            assert not driver.log[-1].shape.num_chunks
        driver.step()
        assert driver.log[-1].shape.num_chunks
        assert driver.log[-1].budget is None


class TestBestEffort:
    def test_comes_after_all_that_have_deadlines_until_it_has_waited_too_long(self):
        """An overload without an end: each step could be filled with prompts that keep their turn."""
        driver = Watch(max_num_seqs=256, max_queue_seconds=5.0)
        urgent = [make_request(f"u{i}", 900, 1, slo=SLO(ttft=2.0), arrival=0.03 * i) for i in range(1000)]
        driver.serve([*urgent, make_request("tagged", 900, 4, arrival=5.0)], until=29.0, watch="tagged")
        assert driver.finished["tagged"] is FinishReason.EXPIRED
        assert 12.5 <= driver.now < 12.6, "1.5 times as long as may be"

    def test_a_prompt_that_has_stood_still_makes_no_other_late(self):
        """It has begun and cannot be in time any more; the others need most of the next three seconds."""
        driver, shed = Watch(max_queue_seconds=0.2, max_model_len=8192), ShedMode.RELEGATE
        others = [
            make_request(f"r{i}", 600, 1, slo=SLO(ttft=0.15), arrival=0.1 * (i + 1), shed=shed)
            for i in range(30)
        ]
        driver.serve([make_request("tagged", 3800, 4, slo=SLO(ttft=1.5), shed=shed), *others])
        assert driver.log[0].rows[0].request_id == "tagged"
        assert not driver.is_good("tagged")
        assert all(driver.is_good(request.request_id) for request in others)

    def test_its_streams_wait_where_not_all_fit_but_never_starve(self):
        """Streams with objectives alone are more than fit: a token comes once it has waited for too long."""
        driver = Watch(max_queue_seconds=0.2)
        streams = [make_request(f"s{i}", 10, 600, slo=SLO(ttft=60.0, tbt=2.5e-3)) for i in range(40)]
        driver.serve([make_request("tagged", 10, 500), *streams], watch="s0")
        gaps = driver.gaps("tagged")
        assert 0.1 < max(gaps) < 0.21
        assert len(gaps) < 0.2 * len(driver.log), "it had to wait"

    def test_its_streams_go_on_beside_prompts_that_cannot_all_be_in_time(self):
        driver = Watch(max_num_seqs=512)
        prompts = [
            make_request(f"u{i}", 900, 1, slo=SLO(ttft=2.0), arrival=0.03 * i, shed=ShedMode.RELEGATE)
            for i in range(300)
        ]
        driver.serve([make_request("tagged", 10, 30), *prompts], watch="tagged")
        assert len(driver.scheduler.waiting) > 50, "it was an overload"
        with_it = ["tagged" in {row.request_id for row in step.rows} for step in driver.log]
        assert all(with_it[with_it.index(True) :])


class TestTriage:
    def num_good(self, policy: str) -> int:
        load = [
            make_request(f"r{i}", 900, 1, slo=SLO(ttft=0.5 + 0.01 * i), shed=ShedMode.RELEGATE)
            for i in range(12)
        ]
        driver = Watch(policy=policy)
        driver.serve(load)
        return sum(driver.is_good(f"r{i}") for i in range(12))

    def test_prompts_that_cannot_all_be_in_time_do_not_drag_each_other_down(self):
        one = FakeStepTime().idle_seconds(900, 0)
        assert self.num_good("slo") >= int(0.5 / one) - 1

    @pytest.mark.parametrize("ttft", [0.128, 0.144, 0.148])
    def test_those_that_a_step_ended_for_them_lets_be_in_time_are_kept(self, ttft):
        """Two take 0.142 s; a third one fills what is left of steps, and would make either late."""
        driver = Watch()
        pair = [
            make_request(name, 500, 1, slo=SLO(ttft=due), shed=ShedMode.RELEGATE)
            for name, due in (("first", ttft - 0.001), ("second", ttft))
        ]
        driver.serve([*pair, make_request("later", 1000, 1, slo=SLO(ttft=9.0))])
        good = [driver.is_good(name) for name in ("first", "second", "later")]
        assert sum(good) == (3 if ttft > 0.142 else 2)

    def test_while_all_have_time_they_go_by_deadline(self):
        driver = Watch(max_num_batched_tokens=256)
        driver.serve([make_request("before", 1, 1)])
        now = driver.now
        driver.serve(
            [
                make_request("long", 900, 1, slo=SLO(ttft=5.0), arrival=now),
                make_request("short", 50, 1, slo=SLO(ttft=6.0), arrival=now),
            ]
        )
        assert driver.first_scheduled == ["before", "long", "short"]
        assert driver.ttft("long") <= driver.ttft("short")


class TestExpectedLength:
    def test_an_e2e_objective_is_spread_over_as_many_tokens_as_others_had(self):
        driver = Watch()
        driver.add(make_request("first", 10, 900, slo=SLO(e2e=2.0)))
        assert driver.scheduler.waiting.peek().slo.tbt == pytest.approx(4 / 3 / 767), "a prior"
        driver.serve([])
        before = [make_request(f"w{i}", 10, 120, arrival=driver.now) for i in range(200)]
        driver.serve(before)
        driver.add(make_request("next", 10, 400, slo=SLO(e2e=2.0), arrival=driver.now))
        assert driver.scheduler.waiting.peek().slo.tbt == pytest.approx(4 / 3 / 179, rel=0.04)

    @pytest.mark.parametrize("tbt", [None, 0.4])
    def test_beside_other_objectives_nobody_misses_one_that_was_not_stated(self, tbt):
        """Decodes of many take longer than a step of an efficient chunk, and far less than is allowed."""
        model = FakeStepTime(fixed=1e-3, per_token=1e-3, per_context=0.0, per_pair=0.0)
        driver = Watch(model, max_num_seqs=256)
        slo = SLO(ttft=5.0, tbt=tbt, e2e=120.0)
        driver.serve([make_request(f"s{i}", 20, 200, slo=slo, arrival=0.02 * i) for i in range(100)])
        assert max(len(step.rows) for step in driver.log) > 90
        assert all(driver.times[name][0] - driver.requests[name].arrival < 5.0 for name in driver.times)
        state = driver.scheduler.planner.state()
        assert (state.num_missed, state.num_relegated) == (0, 0)

    def test_a_pace_leaves_a_part_of_a_step_to_prompts(self):
        """Two streams whose answers can hardly end in time do not stop the prompts of others."""
        driver = Watch()
        driver.serve([make_request(f"s{i}", 10, 900, slo=SLO(e2e=3.0)) for i in range(2)], until=0.1)
        assert min(state.slo.tbt for state in driver.scheduler.running) < 2 * driver.model.smallest_step
        driver.add(make_request("r", 900, 2, slo=SLO(ttft=1.0), arrival=driver.now))
        driver.serve([], watch="r")
        steps = [step for step in driver.log if any(row.request_id == "r" for row in step.rows)]
        longest = driver.model.smallest_step / (1 - composer.PACED_SHARE)
        assert all(driver.model.step_time(step.shape) <= 1.2 * longest for step in steps[:-1])
        assert steps[0].shape.num_chunk_tokens > 10
