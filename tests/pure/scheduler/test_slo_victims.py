"""Whom to preempt: best effort, then streams with time, then those that are worth least."""

from __future__ import annotations

from itertools import permutations
from math import inf

import pytest

from onbeat.core.request import Request
from onbeat.core.slo import SLO, SLO_MODES, ShedMode
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.composer import StepRules
from onbeat.scheduler.replica.slo.view import Loss, free_blocks, preempt_for
from onbeat.scheduler.replica.step_plan import StepPlan, needs_block
from onbeat.scheduler.triage import CostModel
from tests.pure.scheduler.timed import FakeStepTime, TimedDriver, make_config, make_request, make_state

MODEL = FakeStepTime(fixed=0.05, per_token=1e-4, per_context=0.0, per_pair=0.0)
"""All prompts here run in one step."""
COST_MODEL = CostModel(MODEL, None)


def loss_of(plan: StepPlan) -> Loss:
    rules = StepRules(make_config(max_queue_seconds=0.1), COST_MODEL, lambda state: state.request.weight)
    return lambda state: rules.loss(state, plan.now)


def started(*requests: Request, num_blocks: int = 64, **changes) -> tuple[StepPlan, Loss]:
    """Let requests run their prompts; return a plan for the step after that."""
    driver = TimedDriver(make_config(num_blocks=num_blocks, **changes), MODEL)
    for request in requests:
        driver.add(request)
    driver.step()
    assert all(len(times) == 1 for times in driver.times.values())
    plan = driver.scheduler.planner.new_plan(driver.now)
    return plan, loss_of(plan)


def by_name(plan: StepPlan) -> dict[str, RequestState]:
    return {state.request_id: state for state in plan.running}


def names(states) -> list[str]:
    return [state.request_id for state in states]


PROMPT_SECONDS = 0.115
"""The step with the six prompts below takes 0.11 s; computing one of them again takes 0.06 s."""
SIX = [
    make_request("best effort", 100, 50),
    make_request("best effort, later", 100, 50, arrival=1e-3),
    make_request("rich", 100, 50, slo=SLO(ttft=5.0, tbt=0.1)),
    make_request("poor", 100, 50, slo=SLO(ttft=0.3, tbt=0.1)),
    make_request("late, light", 100, 50, slo=SLO(ttft=PROMPT_SECONDS, tbt=0.02), weight=0.5),
    make_request("late, heavy", 100, 50, slo=SLO(ttft=PROMPT_SECONDS, tbt=0.02), weight=2.0),
]
ORDER = ["best effort, later", "best effort", "rich", "poor", "late, light", "late, heavy"]


class TestMakeRoom:
    @pytest.mark.parametrize("order", list(permutations(range(6)))[::120])
    def test_those_go_first_who_lose_least(self, order):
        plan, loss = started(*(SIX[index] for index in order))
        new = make_state(make_request("new", 1000, 1))
        preempt_for(plan, new, plan.running, loss)
        assert names(plan.victims) == ORDER

    @pytest.mark.parametrize(("num_prompt", "num_gone"), [(300, 0), (400, 1), (500, 2), (600, 3)])
    def test_no_more_than_need_be(self, num_prompt, num_gone):
        """Each holds 7 of 64 blocks; 22 are free."""
        plan, loss = started(*SIX)
        preempt_for(plan, make_state(make_request("new", num_prompt, 1)), plan.running, loss)
        assert names(plan.victims) == ORDER[:num_gone]

    def test_best_effort_that_has_starved_goes_last(self):
        plan, loss = started(*SIX)
        by_name(plan)["best effort"].slo.last_delivery = -inf
        preempt_for(plan, make_state(make_request("new", 900, 1)), plan.running, loss)
        assert "best effort" not in names(plan.victims)
        assert len(plan.victims) == 5

    def test_nobody_in_vain(self):
        plan, loss = started(*SIX)
        pool = plan.running[:3]
        preempt_for(plan, make_state(make_request("new", 1000, 1)), pool, loss)
        preempt_for(plan, make_state(make_request("new", 10, 1)), [], loss)
        assert plan.victims == []
        assert plan.num_blocks_left == 22

    def test_for_a_slot_one_is_enough(self):
        plan, loss = started(*SIX, max_num_seqs=6)
        assert plan.num_slots_left == 0
        preempt_for(plan, make_state(make_request("new", 10, 1)), plan.running, loss)
        assert names(plan.victims) == ORDER[:1]
        assert plan.num_slots_left == 1

    def test_whoever_is_held_stays(self):
        plan, loss = started(*SIX)
        by_name(plan)["best effort, later"].is_in_flight = True
        preempt_for(plan, make_state(make_request("new", 400, 1)), plan.running, loss)
        assert names(plan.victims) == ["best effort"]

    @pytest.mark.parametrize("depth", [1, 2])
    def test_steps_that_are_planned_ahead_keep_nobody_from_it(self, depth):
        """Then every stream has a token in flight whenever a step is planned."""
        driver = TimedDriver(make_config(max_num_seqs=4), MODEL, depth=depth)
        for index in range(4):
            driver.add(make_request(f"bulk {index}", 50, 200))
        for _ in range(10):
            driver.step()
        driver.add(make_request("p", 50, 2, arrival=driver.now, slo=SLO(ttft=0.5, tbt=0.1)))
        driver.serve([])
        assert driver.times["p"][0] <= driver.requests["p"].arrival + 0.5
        assert driver.scheduler.table.num_preemptions == 1
        assert all(len(tokens) == 200 for name, tokens in driver.outputs.items() if name != "p")

    def test_the_first_to_wait_has_no_time_to_lose_where_one_behind_it_has_none(self):
        model = FakeStepTime(fixed=2e-3, per_context=0.0, per_pair=0.0)
        driver = TimedDriver(make_config(max_num_seqs=4, num_blocks=4096, max_model_len=16384), model)
        for index in range(4):
            driver.add(make_request(f"bulk {index}", 500, 10000))
        driver.serve([], until=1.0)
        for name, num_prompt, ttft in (("short", 100, 1.0), ("long", 9000, 1.1)):  # 0.9 s of work
            slo = SLO(ttft=ttft, tbt=1.0)
            driver.add(make_request(name, num_prompt, 3, arrival=driver.now, slo=slo, shed=ShedMode.RELEGATE))
        driver.serve([], until=3.0)
        assert driver.scheduler.planner.num_relegated == 0
        assert driver.times["long"][0] <= driver.requests["long"].arrival + 1.1


class TestWhoeverRoomIsMadeFor:
    """Finds it: what is asked for is what an admission asks for."""

    @pytest.mark.parametrize(
        ("num_wanted", "num_gone"), [(255, 0), (256, 1), (262, 1), (263, 2), (290, 5), (300, 6)]
    )
    def test_above_the_watermark_unless_all_are_gone(self, num_wanted, num_gone):
        """258 of 300 blocks are free, of which 3 are to stay free; each victim brings 7."""
        plan, loss = started(*SIX, num_blocks=300)
        new = make_state(make_request("new", 16 * num_wanted, 1))
        preempt_for(plan, new, plan.running, loss)
        assert len(plan.victims) == num_gone
        assert admits(plan, new)

    def test_with_a_prefix_that_lies_idle_in_the_cache(self):
        """It counts as free space already, and is taken out of it."""
        driver = TimedDriver(make_config(), MODEL)
        driver.serve([make_request("prime", 16 * 20, 2, salt="shared")])
        driver.scheduler.kv.pool.allocate(512 - 20 - 30)
        for request in SIX[:2]:  # 7 blocks each, of 50
            driver.add(request)
        driver.step()
        plan = driver.scheduler.planner.new_plan(driver.now)
        new = make_state(make_request("new", 16 * 35, 1, salt="shared"))
        assert len(plan.kv.match(new)) == 20
        preempt_for(plan, new, plan.running, loss_of(plan))
        assert len(plan.victims) == 1
        assert admits(plan, new)

    def test_with_a_prefix_that_a_victim_holds(self):
        """What the victim gives back is what the prompt takes."""
        first = make_request("first", 16 * 20, 50, salt="shared")
        plan, loss = started(first)
        new = make_state(make_request("new", 16 * 65, 1, salt="shared"))
        preempt_for(plan, new, plan.running, loss)
        assert plan.victims == []


def admits(plan: StepPlan, state: RequestState) -> bool:
    return plan.admit(state, plan.kv.match(state), 1)


class TestSlack:
    @pytest.mark.parametrize("mode", SLO_MODES)
    def test_is_measured_against_computing_all_tokens_again(self, mode):
        """Both deadlines lie ahead; only one of both leaves time to come back."""
        long = make_request("long", 500, 50, slo=SLO(ttft=0.11, tbt=0.075))
        short = make_request("short", 20, 50, slo=SLO(ttft=0.11, tbt=0.075))
        plan, loss = started(long, short, slo_mode=mode)
        preempt_for(plan, make_state(make_request("new", 500, 1)), plan.running, loss)
        assert names(plan.victims) == ["short"], "the long one could not be back in time"
        with_less = make_request("long", 500, 50, slo=SLO(ttft=0.11, tbt=0.075), weight=0.1)
        plan, loss = started(with_less, short, slo_mode=mode)
        preempt_for(plan, make_state(make_request("new", 500, 1)), plan.running, loss)
        assert names(plan.victims) == ["short"], "whatever that one is worth"


class TestMakeBlocksFree:
    """Four requests hold 16 blocks each, all 64, and each needs one more for its next token."""

    def four(self) -> tuple[StepPlan, Loss, dict[str, RequestState]]:
        slo = SLO(ttft=5.0, tbt=0.1)
        requests = [make_request(f"s{i}", 256, 50, slo=slo, arrival=1e-4 * i) for i in range(3)]
        plan, loss = started(*requests, make_request("best effort", 256, 50))
        assert plan.num_blocks_left == 0
        assert all(map(needs_block, plan.running))
        return plan, loss, by_name(plan)

    def test_one_goes_and_the_others_grow(self):
        plan, loss, _ = self.four()
        rows = free_blocks(plan, list(plan.running), loss)
        assert names(plan.victims) == ["best effort"]
        assert names(rows) == [name for name in names(plan.running) if name != "best effort"]
        assert plan.num_blocks_left == 16

    def test_whoever_has_a_row_keeps_it(self):
        plan, loss, states = self.four()
        plan.decodes.append(states["best effort"])
        rows = free_blocks(plan, [states["s0"], states["s1"], states["s2"]], loss)
        assert names(plan.victims) == ["s2"], "of those with as much slack the last to come"
        assert names(rows) == ["s0", "s1"]

    def test_the_last_one_is_never_preempted_but_waits(self):
        plan, loss, states = self.four()
        plan.decodes += [states["best effort"], states["s0"], states["s1"]]
        assert free_blocks(plan, [states["s2"]], loss) == []
        assert plan.victims == []

    def test_whoever_needs_none_goes_on(self):
        plan, loss, states = self.four()
        plan.decodes += [states["best effort"], states["s0"]]
        states["s1"].is_in_flight = True
        states["s2"].num_allocated_tokens += 16
        assert names(free_blocks(plan, [states["s1"], states["s2"]], loss)) == ["s2"]
        assert plan.victims == []
