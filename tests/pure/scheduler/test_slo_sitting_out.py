"""Streams that sit out, and classes under `slo`."""

from __future__ import annotations

from math import inf

import pytest

from onbeat.core.slo import SLO, SLO_MODES, ShedMode
from onbeat.core.step import SchedulerOutput
from onbeat.scheduler.replica.slo import composer as composition
from onbeat.scheduler.replica.slo.view import prefill_jobs
from tests.pure.scheduler.slo_watch import Watch
from tests.pure.scheduler.timed import FakeStepTime, make_request


class TestSittingOut:
    slo = SLO(ttft=2.0, tbt=0.05)

    def serve(
        self, ttft: float, *, num_tokens: int = 200, num_blocks: int = 8192
    ) -> tuple[Watch, list[SchedulerOutput]]:
        """40 streams that are far ahead, one that has just begun, and four prompts at once.

        Returns the steps with prompts in which not all streams decode, too.
        """
        driver = Watch(num_blocks=num_blocks)
        streams = [make_request(f"s{i}", 10, num_tokens, slo=self.slo) for i in range(40)]
        fresh = make_request("fresh", 10, num_tokens, slo=SLO(ttft=0.05, tbt=0.05), arrival=0.47)
        prompts = [
            make_request(f"r{i}", 600, 2, slo=SLO(ttft=ttft), arrival=0.5, shed=ShedMode.RELEGATE)
            for i in range(4)
        ]
        driver.serve([*streams, fresh, *prompts])
        assert all(driver.is_good(stream.request_id) for stream in (*streams, fresh))
        steps = [step for step in driver.log[8:] if step.shape.num_chunks and step.shape.num_decodes < 40]
        return driver, steps

    def num_good(self, driver: Watch) -> int:
        return sum(driver.is_good(f"r{i}") for i in range(4))

    def test_streams_with_plenty_in_hand_sit_out_where_that_saves_prompts(self, monkeypatch):
        driver, steps = self.serve(0.38)
        assert len(steps) > 2
        assert self.num_good(driver) == 4
        monkeypatch.setattr(composition.StepRules, "slack_tokens", inf)
        driver, steps = self.serve(0.38)
        assert steps == []
        assert self.num_good(driver) < 4

    def test_whoever_has_little_in_hand_decodes(self):
        driver, steps = self.serve(0.38)
        num_close = 0
        for step in steps:
            planned = driver.planned_at[step.step_id]
            num_out = sum(time <= planned for time in driver.times["fresh"])
            in_hand = 0.52 + num_out * 0.05 - planned
            if in_hand <= composition.SLACK_TOKENS * 0.05:
                num_close += 1
                assert "fresh" in {row.request_id for row in step.rows}
        assert num_close > 2

    def test_nobody_sits_out_where_prompts_have_time(self):
        driver, steps = self.serve(5.0)
        assert steps == []
        assert self.num_good(driver) == 4

    def test_nobody_sits_out_where_prompts_wait_for_memory(self):
        """Who sits out keeps its blocks for that much longer."""
        for num_blocks, may_sit_out in ((600, True), (390, False)):  # 152 for the prompts
            driver, steps = self.serve(0.38, num_tokens=130, num_blocks=num_blocks)
            assert driver.scheduler.table.num_preemptions == 0
            early = [step for step in steps if driver.planned_at[step.step_id] < 0.62]  # none has left
            assert bool(early) == may_sit_out

    def test_nobody_sits_out_in_vain(self):
        """Prompts cannot all be in time, but memory is what they lack."""
        driver = Watch(num_blocks=64)
        driver.add(make_request("s", 600, 100, slo=self.slo))
        driver.serve([], until=0.15)
        num_before = len(driver.log)
        for index in range(2):
            slo = SLO(ttft=0.2)
            request = make_request(f"r{index}", 900, 1, slo=slo, arrival=driver.now, shed=ShedMode.RELEGATE)
            driver.add(request)
        driver.serve([], until=0.3, watch="s")
        rows = [{row.request_id for row in step.rows} for step in driver.log[num_before:]]
        assert len(rows) > 20
        assert all(names == {"s"} for names in rows)


class TestClasses:
    @pytest.mark.parametrize("mode", ["gap", "stream"])
    def test_loose_streams_sit_out_beside_tight_ones_where_not_all_fit(self, mode):
        """All decodes together take 6 ms, longer than the tight ones may wait."""
        driver = Watch(slo_mode=mode)
        loose = [make_request(f"l{i}", 10, 120, slo=SLO(ttft=3.0, tbt=0.2)) for i in range(40)]
        tight = [make_request(f"t{i}", 10, 300, slo=SLO(ttft=3.0, tbt=5e-3), arrival=0.1) for i in range(4)]
        driver.serve([*loose, *tight])
        steps = [step for step in driver.log if step.budget_request_id and step.budget_request_id[0] == "t"]
        assert any(step.shape.num_decodes < 44 for step in steps)
        for index in range(4):
            gaps = sorted(driver.gaps(f"t{index}"))
            assert gaps[int(0.99 * len(gaps))] <= 5e-3 + 1e-9 or mode == "stream"
            assert driver.is_good(f"t{index}")
        for index in range(40):
            assert driver.is_good(f"l{index}"), "they are served all the same"
            assert max(driver.gaps(f"l{index}")) <= 0.2 or mode == "stream"

    def test_streams_come_back_into_a_step_without_prompts_only_as_far_as_they_fit(self):
        """Beside those that are in it already, such as one without a deadline for its tokens."""
        tight, loose = SLO(ttft=0.1, tbt=0.006), SLO(ttft=0.5, tbt=0.05)
        load = [
            make_request("long", 600, 60, slo=tight),
            make_request("best effort", 94, 30, arrival=0.055),
            make_request("loose", 279, 10, arrival=0.119, slo=loose),
            make_request("gaps alone", 405, 13, arrival=0.157, slo=SLO(tbt=0.02)),
            make_request("short", 64, 26, arrival=0.237, slo=tight),
            make_request("first token alone", 16, 13, arrival=0.284, slo=SLO(ttft=0.3)),
            make_request("late", 218, 4, arrival=0.319, slo=tight),
            make_request("last", 242, 1, arrival=0.331, slo=tight),
        ]
        watch = Watch(FakeStepTime(per_context=1e-6, per_pair=1e-7), num_blocks=80, max_num_seqs=16)
        watch.serve(load)  # each step is held against its budget
        assert set(watch.finished) == {request.request_id for request in load}

    def test_where_all_fit_nobody_sits_out(self):
        driver = Watch(slo_mode="gap")
        requests = [make_request(f"l{i}", 10, 50, slo=SLO(ttft=3.0, tbt=0.2)) for i in range(10)]
        requests += [make_request(f"t{i}", 10, 50, slo=SLO(ttft=3.0, tbt=5e-3)) for i in range(4)]
        driver.serve(requests)
        assert len({len(driver.times[request.request_id]) for request in requests}) == 1
        both = [step for step in driver.log if not step.shape.num_chunks]
        assert all(len(step.rows) == 14 for step in both[:40])


@pytest.mark.parametrize("mode", SLO_MODES)
def test_prompts_are_looked_at_by_deadline_though_one_was_preempted_with_a_token_in_flight(mode, monkeypatch):
    """The token that comes then moves its deadline, but not its place in the queue."""
    seen = []

    def watched(*args):
        jobs, late = prefill_jobs(*args)
        seen.append([job.deadline for job in jobs])
        return jobs, late

    monkeypatch.setattr(composition, "prefill_jobs", watched)
    driver = Watch(depth=2, num_blocks=100, max_model_len=1024, slo_mode=mode)
    slos = [SLO(ttft=1.0, tbt=tbt) for tbt in (0.02, 0.05, 0.3)]
    driver.serve(
        [make_request(f"c{i}", 200, 200, slo=slos[i % 3], arrival=0.04 * i) for i in range(60)], until=20.0
    )
    assert driver.scheduler.table.num_preemptions > 10
    assert all(deadlines == sorted(deadlines) for deadlines in seen)
