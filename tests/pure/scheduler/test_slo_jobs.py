"""The prompts that wait, as `slo` sees them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from onbeat.core.slo import SLO, ShedMode
from onbeat.scheduler.replica.slo.view import MOST_JOBS, prefill_jobs
from onbeat.scheduler.replica.step_plan import WaitingQueue
from onbeat.scheduler.triage import CostModel
from tests.pure.scheduler.timed import FakeStepTime, make_request, make_state


def plan_of(queue: WaitingQueue, num_cached_blocks: int = 0) -> Any:
    """Return of a plan what `prefill_jobs` asks it, with so much in the prefix cache for everybody."""
    kv = SimpleNamespace(match=lambda _: [*range(num_cached_blocks)], block_size=16)
    return SimpleNamespace(waiting=queue, kv=kv, num_hit_tokens={})


class TestPrefillJobs:
    cost_model = CostModel(FakeStepTime(per_context=0.0, per_pair=0.0), None)

    def make_queue(self, *slos: SLO | None, num_prompt: int = 100, **changes) -> WaitingQueue:
        queue = WaitingQueue()
        for index, slo in enumerate(slos):
            request = make_request(f"r{index}", num_prompt, 2, slo=slo, **changes)
            state = make_state(request)
            state.sort_key = (state.slo.rank, 0.0, index)
            queue.push(state)
        return queue

    def names(self, states) -> list[str]:
        return [state.request_id for state in states]

    def test_go_by_deadline_and_leave_out_best_effort(self):
        queue = self.make_queue(SLO(ttft=9.0), None, SLO(ttft=1.0), SLO(tbt=0.1))
        jobs, late = prefill_jobs(plan_of(queue), 0.0, [], self.cost_model)
        assert self.names(job.state for job in jobs) == ["r2", "r0"]
        assert [job.deadline for job in jobs] == [1.0, 9.0]
        assert jobs[0].seconds == pytest.approx(100 * 1e-4, rel=0.01)
        assert late == []

    @pytest.mark.parametrize(("shed", "is_late"), [(mode, mode is not ShedMode.OFF) for mode in ShedMode])
    def test_who_cannot_be_in_time_on_an_idle_machine_is_late_unless_nobody_may_judge_it(self, shed, is_late):
        """100 tokens take 12 ms."""
        queue = self.make_queue(SLO(ttft=1.0), shed=shed)
        assert not prefill_jobs(plan_of(queue), 0.985, [], self.cost_model)[1]
        jobs, late = prefill_jobs(plan_of(queue), 0.99, [], self.cost_model)
        assert (self.names(late), len(jobs)) == ((["r0"], 0) if is_late else ([], 1))

    def test_who_has_delivered_before_it_was_preempted_is_never_late(self):
        queue = self.make_queue(SLO(ttft=1.0, tbt=0.1), shed=ShedMode.RELEGATE)
        (state,) = queue
        state.follow(state.num_tokens + 1, 0, 0)
        jobs, late = prefill_jobs(plan_of(queue), 50.0, [], self.cost_model)
        assert (len(jobs), late) == (1, [])

    def test_prompts_that_have_begun_stand_among_those_that_wait_with_what_is_left_of_them(self):
        queue = self.make_queue(SLO(ttft=1.0), SLO(ttft=3.0))
        begun, loose = (
            make_state(make_request(name, 100, 2, slo=slo))
            for name, slo in (("begun", SLO(ttft=2.0)), ("loose", None))
        )
        begun.num_computed_tokens = 60
        jobs, _ = prefill_jobs(plan_of(queue), 0.0, [begun, loose], self.cost_model)
        assert self.names(job.state for job in jobs) == ["r0", "begun", "r1"]
        assert jobs[1].seconds == pytest.approx(40 * 1e-4, rel=0.01)

    def test_what_the_prefix_cache_holds_is_no_work(self):
        queue = self.make_queue(SLO(ttft=1.0))
        (state,) = queue
        state.num_hit_tokens = 80
        ((_, seconds, _),), _ = prefill_jobs(plan_of(queue), 0.0, [], self.cost_model)
        assert seconds == pytest.approx(20 * 1e-4, rel=0.01)

    @pytest.mark.parametrize(("num_blocks", "is_late"), [(0, True), (2, True), (5, False)])
    def test_before_one_is_late_it_is_looked_up_once_more_what_the_cache_holds(self, num_blocks, is_late):
        """Others have left their prefix there since it came: 20 of 100 tokens take 4 ms."""
        plan = plan_of(self.make_queue(SLO(ttft=1.0), shed=ShedMode.RELEGATE), num_blocks)
        jobs, late = prefill_jobs(plan, 0.995, [], self.cost_model)
        assert (len(jobs), len(late)) == ((0, 1) if is_late else (1, 0))
        assert plan.num_hit_tokens == ({"r0": 16 * num_blocks} if num_blocks else {})

    def test_no_more_are_looked_at_than_may(self):
        queue = self.make_queue(*[SLO(ttft=9.0)] * (MOST_JOBS + 50))
        jobs, _ = prefill_jobs(plan_of(queue), 0.0, [], self.cost_model)
        assert self.names(job.state for job in jobs) == [f"r{i}" for i in range(MOST_JOBS)]
