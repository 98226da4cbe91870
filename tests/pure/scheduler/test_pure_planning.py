"""Planning a step changes nothing but the plan, and gives the same plan each time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.request import Request
from onbeat.core.slo import SLO, SLO_CLASSES, SLO_MODES, ShedMode
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.replica.step_plan import StepPlan
from tests.examples import examples
from tests.pure.scheduler.digest import attributes, digest
from tests.pure.scheduler.timed import FakeStepTime, TimedDriver, make_config, make_request


class PureDriver(TimedDriver):
    """Plans steps twice before it lets the scheduler plan them."""

    num_checked = 0

    def step(self) -> bool:
        scheduler = self.scheduler
        if len(self.in_flight) < self.depth and (scheduler.running or len(scheduler.waiting)):
            self.check_pure()
        return super().step()

    def check_pure(self) -> None:
        scheduler = self.scheduler
        before = digest(scheduler)
        first, second = self.compose(), self.compose()
        assert digest(scheduler) == before, "planning has changed something"
        other = dict(attributes(second))
        for name, value in attributes(first):
            assert digest(value) == digest(other[name]), f"{name} differs"
        self.num_checked += 1

    def compose(self) -> StepPlan:
        scheduler = self.scheduler
        start = max(self.now, scheduler._busy_until) if self.in_flight else self.now
        plan = scheduler._new_plan(start)
        scheduler._policy.composer.compose(plan, scheduler._order)
        return plan


slos = st.sampled_from(
    [
        None,
        *SLO_CLASSES.values(),
        SLO(ttft=0.1, tbt=6e-3),
        SLO(ttft=1e-3, tbt=1e-3),
        SLO(ttft=0.3),
        SLO(e2e=1.0),
    ]
)


@st.composite
def loads(draw: st.DrawFn) -> list[Request]:
    arrival, requests = 0.0, []
    for index in range(draw(st.integers(1, 12))):
        arrival += draw(st.integers(0, 80)) * 1e-3
        request = make_request(
            f"r{index}",
            draw(st.integers(1, 600)),
            draw(st.integers(1, 30)),
            arrival=arrival,
            slo=draw(slos),
            shed=draw(st.sampled_from(list(ShedMode))),
            tenant=draw(st.sampled_from([None, "a"])),
            priority=draw(st.integers(0, 1)),
            salt=draw(st.sampled_from([None, "shared"])),
        )
        requests.append(request)
    return requests


@pytest.mark.parametrize("policy", POLICIES)
@examples(60)
@given(
    load=loads(),
    mode=st.sampled_from(SLO_MODES),
    shed_order=st.sampled_from(["most", "longest-wait"]),
    depth=st.sampled_from([1, 2]),
    num_blocks=st.sampled_from([64, 80, 512]),
    max_num_seqs=st.sampled_from([2, 4, 16]),
)
def test_planning_twice_gives_the_same_plan_and_changes_nothing(
    policy, load, mode, shed_order, depth, num_blocks, max_num_seqs
) -> None:
    config = make_config(
        policy,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        slo_mode=mode,
        shed_order=shed_order if policy == "slo" else "most",
        scheduling_policy="fcfs" if POLICIES[policy]().order is not None else "priority",
    )
    driver = PureDriver(config, FakeStepTime(), depth=depth)
    driver.serve(load)
    assert driver.num_checked or driver.rejected


def test_a_change_anywhere_is_seen():
    driver = PureDriver(make_config(), FakeStepTime())
    driver.serve([make_request("r", 100, 9, slo=SLO(ttft=1.0, tbt=0.1))], until=0.015)
    scheduler = driver.scheduler
    before = digest(scheduler)
    (state,) = scheduler.running
    assert digest(scheduler) == before
    for target, name, value in (
        (state, "num_hit_tokens", 7),
        (state.slo, "next_deadline", 1.0),
        (scheduler._slo.tracker, "predicted_wait", 9.0),
        (scheduler._slo.work, "token", 1.0),
        (scheduler.kv.pool, next(name for name, _ in attributes(scheduler.kv.pool)), None),
    ):
        old = getattr(target, name)
        setattr(target, name, value)
        assert digest(scheduler) != before, name
        setattr(target, name, old)
        assert digest(scheduler) == before
