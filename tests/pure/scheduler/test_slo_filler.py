"""How a step is filled: chunks, prefix hits, slots and blocks."""

from __future__ import annotations

import pytest

from onbeat.core.errors import SLOUnattainable
from onbeat.core.slo import SLO, ShedMode
from onbeat.core.step import SchedulerOutput
from onbeat.scheduler.triage import CostModel
from tests.pure.scheduler.timed import FakeStepTime, TimedDriver, make_config, make_request


class Watch(TimedDriver):
    """Remembers when requests lost their slots."""

    def __init__(self, model: FakeStepTime | None = None, **changes) -> None:
        super().__init__(make_config(**changes), model or FakeStepTime())
        self.preempted_at: dict[str, list[float]] = {}

    def check_step(self, scheduled: SchedulerOutput) -> None:
        for request_id in scheduled.released_ids:
            if request_id not in self.finished:
                self.preempted_at.setdefault(request_id, []).append(self.now)
        super().check_step(scheduled)

    def ttft(self, request_id: str) -> float:
        return self.times[request_id][0] - self.requests[request_id].arrival


def efficient_chunk(model: FakeStepTime) -> int:
    return CostModel(model, None).efficient_chunk


class TestChunks:
    @pytest.mark.parametrize("tbt", [5e-3, 1e-2])
    def test_fit_the_time_to_the_token(self, tbt):
        """`TimedDriver` holds each step against its budget; here, that a cut chunk leaves nothing of it."""
        driver = Watch(slo_mode="gap")
        streams = [make_request(f"s{i}", 20, 200, slo=SLO(ttft=0.1, tbt=tbt)) for i in range(8)]
        prompts = [make_request(f"r{i}", 777, 2, slo=SLO(ttft=9.0), arrival=0.1) for i in range(4)]
        driver.serve([*streams, *prompts])
        num_cut = 0
        for step in driver.log:
            chunk = step.shape.num_new_tokens - step.shape.num_decodes
            if step.budget is None or not 0 < chunk < efficient_chunk(driver.model):
                continue
            ends = [row.num_computed_tokens + row.num_new_tokens for row in step.rows]
            prompts_of = [len(driver.requests[row.request_id].prompt_token_ids) for row in step.rows]
            if any(end < num for end, num in zip(ends, prompts_of, strict=True)):
                num_cut += 1
                one_more = 2 * driver.model.per_token
                assert step.budget - one_more < driver.model.step_time(step.shape) <= step.budget + 1e-9
        assert num_cut > 4

    def test_a_tighter_objective_makes_chunks_smaller(self):
        largest = []
        for tbt in (5e-3, 1e-2, 2e-2):
            driver = Watch(slo_mode="gap")
            stream = make_request("s", 20, 300, slo=SLO(ttft=0.1, tbt=tbt))
            prompt = make_request("r", 1000, 2, slo=SLO(ttft=0.2), arrival=0.1)
            driver.serve([stream, prompt], watch="s")
            largest.append(max(step.shape.num_new_tokens for step in driver.log[1:] if step.budget))
        assert largest == sorted(set(largest))

    def test_short_prompts_share_a_step(self):
        driver = Watch()
        driver.serve([make_request(f"r{i}", 20, 2, slo=SLO(ttft=1.0)) for i in range(4)])
        assert len(driver.log[0].rows) == 4


class TestPrefixHits:
    def warm(self) -> Watch:
        """A machine that has just served a long prompt."""
        driver = Watch()
        driver.serve([make_request("first", 900, 1, slo=SLO(ttft=1.0), salt="shared")])
        driver.add(make_request("other", 10, 3, slo=SLO(ttft=1.0)))  # it is not idle
        driver.step()
        return driver

    def ask(self, driver: Watch, salt: str, shed: ShedMode) -> None:
        """900 tokens take 130 ms."""
        slo = SLO(ttft=0.03)
        driver.add(make_request("r", 910, 2, slo=slo, salt=salt, shed=shed, arrival=driver.now))

    def test_count_as_work_done(self):
        driver = self.warm()
        self.ask(driver, "shared", ShedMode.REJECT)
        driver.serve([])
        assert not driver.rejected
        assert driver.ttft("r") <= 0.03
        num_computed = [row.num_computed_tokens for step in driver.log for row in step.rows if row[0] == "r"]
        assert num_computed[0] == 896

    def test_of_others_do_not_count(self):
        driver = self.warm()
        self.ask(driver, "own", ShedMode.REJECT)
        assert isinstance(driver.rejected["r"], SLOUnattainable)

    def test_keep_a_prompt_from_being_relegated(self):
        for salt, num_relegated in (("shared", 0), ("own", 1)):
            driver = self.warm()
            self.ask(driver, salt, ShedMode.RELEGATE)
            driver.serve([])
            assert driver.scheduler.planner.num_relegated == num_relegated


class TestSlots:
    def test_best_effort_gives_its_slot_to_a_prompt_with_a_deadline(self):
        driver = Watch(max_num_seqs=4)
        crowd = [make_request(f"b{i}", 50, 400) for i in range(6)]
        urgent = [make_request("u", 100, 5, slo=SLO(ttft=0.1, tbt=0.05), arrival=0.2)]
        driver.serve([*crowd, *urgent])
        assert driver.ttft("u") <= 0.1
        assert len(driver.preempted_at) == 1
        assert next(iter(driver.preempted_at)).startswith("b")
        assert all(len(driver.outputs[f"b{i}"]) == 400 for i in range(6)), "it goes on later"

    def test_nobody_loses_its_slot_where_there_are_others(self):
        driver = Watch(max_num_seqs=8)
        crowd = [make_request(f"b{i}", 50, 200) for i in range(6)]
        driver.serve([*crowd, make_request("u", 100, 5, slo=SLO(ttft=0.1, tbt=0.05), arrival=0.2)])
        assert not driver.preempted_at

    def test_nobody_loses_its_slot_for_a_prompt_that_is_left_behind(self):
        """Both cannot be in time: the one that is due first costs more, and only the other gets a slot."""
        driver = Watch(max_num_seqs=4)
        driver.serve([make_request(f"b{i}", 50, 400) for i in range(4)], until=0.2)
        for name, num_prompt, ttft in (("costly", 900, 0.16), ("cheap", 400, 0.17)):
            slo = SLO(ttft=ttft, tbt=0.05)
            driver.add(make_request(name, num_prompt, 5, slo=slo, shed=ShedMode.RELEGATE, arrival=driver.now))
        driver.serve([])
        assert len(driver.preempted_at) == 1
        assert driver.ttft("cheap") <= 0.17


class TestBlocks:
    def test_best_effort_gives_its_blocks_to_a_prompt_with_a_deadline(self):
        driver = Watch(num_blocks=64)  # 1,024 tokens
        crowd = [make_request(f"b{i}", 400, 100) for i in range(2)]
        driver.serve([*crowd, make_request("u", 600, 5, slo=SLO(ttft=0.25, tbt=0.05), arrival=0.15)])
        assert driver.ttft("u") <= 0.25
        assert driver.preempted_at
        assert {len(driver.outputs[f"b{i}"]) for i in range(2)} == {100}

    def test_not_while_the_prompt_can_wait(self):
        """They end in time, and nothing is computed twice."""
        driver = Watch(num_blocks=64)
        crowd = [make_request(f"b{i}", 400, 100) for i in range(2)]
        driver.serve([*crowd, make_request("u", 600, 5, slo=SLO(ttft=1.0, tbt=0.05), arrival=0.15)])
        assert driver.ttft("u") <= 1.0
        assert not driver.preempted_at

    def test_nobody_is_preempted_in_vain(self):
        """All that best effort holds would not be enough beside the stream."""
        driver = Watch(num_blocks=64)
        driver.add(make_request("s", 600, 300, slo=SLO(ttft=0.1, tbt=0.05)))
        driver.add(make_request("b", 50, 300))
        driver.serve([], until=0.2)
        driver.add(make_request("u", 900, 5, slo=SLO(ttft=2.0, tbt=0.05), arrival=driver.now))
        driver.serve([], until=0.5)
        assert not driver.preempted_at
        assert "s" not in driver.finished

    def test_whoever_has_a_row_keeps_it_when_others_want_blocks(self):
        """Streams sit out for a prompt that then cannot run, and decode after all, with few blocks left."""
        model = FakeStepTime(fixed=0.02, per_context=0.0, spread=0.3)
        driver = TimedDriver(make_config(num_blocks=64, max_num_seqs=4), model, depth=2)
        loose = SLO(ttft=10.0, tbt=0.5)
        driver.add(make_request("long", 570, 42, slo=loose, salt="shared"))
        driver.add(make_request("short", 91, 6, slo=SLO(ttft=0.3), salt="shared"))
        driver.now = 2.4
        driver.add(make_request("middle", 256, 22, slo=loose, arrival=2.4))
        for _ in range(3):
            driver.step()
        driver.add(make_request("tight", 100, 1, slo=SLO(ttft=0.5, tbt=0.05), arrival=driver.now))
        driver.add(make_request("none", 261, 1, arrival=driver.now))
        slo = SLO(ttft=0.1, tbt=6e-3)
        driver.add(make_request("infeasible", 736, 35, slo=slo, salt="shared", arrival=driver.now))
        driver.abort("long")
        driver.serve([])
        assert len(driver.finished) == 6

    def test_of_two_that_grow_into_the_last_block_best_effort_goes(self):
        driver = Watch(num_blocks=64)
        slo = SLO(ttft=1.0, tbt=0.05)
        driver.serve([make_request("b", 500, 300), make_request("s", 400, 300, slo=slo, arrival=0.1)])
        assert list(driver.preempted_at) == ["b"]
        assert max(driver.lateness("s")) <= 0
