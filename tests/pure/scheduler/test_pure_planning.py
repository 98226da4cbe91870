"""Planning a step changes nothing but the plan, and gives the same plan each time."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import RequestRejected
from onbeat.core.request import Request
from onbeat.core.slo import SLO, SLO_CLASSES, SLO_MODES, ShedMode
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SpeculationConfig
from tests.examples import examples
from tests.pure.scheduler.digest import attributes, digest
from tests.pure.scheduler.speculating import SpeculatingDriver
from tests.pure.scheduler.timed import FakeStepTime, TimedDriver, make_config, make_request


def check_pure(scheduler: Scheduler, now: float) -> bool:
    """Plan a step twice, if there is one to plan; return whether there is."""
    if not (scheduler.running or len(scheduler.waiting)):
        return False
    start = max(now, scheduler.in_flight.busy_until) if scheduler.in_flight else now
    before = digest(scheduler)
    first, second = scheduler._compose(start), scheduler._compose(start)
    assert digest(scheduler) == before, "planning has changed something"
    other = dict(attributes(second))
    for name, value in attributes(first):
        assert digest(value) == digest(other[name]), f"{name} differs"
    return True


class PureDriver(TimedDriver):
    """Plans steps twice before it lets the scheduler plan them."""

    num_checked = 0

    def step(self) -> bool:
        if len(self.in_flight) < self.depth:
            self.num_checked += check_pure(self.scheduler, self.now)
        return super().step()


class PureSpeculatingDriver(SpeculatingDriver):
    """The same, where drafts are planned too."""

    num_checked = 0

    def step(self) -> bool:
        self.num_checked += check_pure(self.scheduler, self.now + 1.0)
        return super().step()


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
@examples(6)
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
        scheduling_policy="fcfs" if POLICIES[policy].order is not None else "priority",
    )
    driver = PureDriver(config, FakeStepTime(), depth=depth)
    driver.serve(load)
    assert driver.num_checked or driver.rejected


@pytest.mark.parametrize("draft_length", ["fixed", "adaptive"])
@pytest.mark.parametrize("max_catch_up_tokens", [None, 20], ids=["looked up", "by a model"])
@examples(12)
@given(
    load=loads(),
    policy=st.sampled_from(["sarathi", "slo"]),
    depth=st.sampled_from([1, 2]),
    num_blocks=st.sampled_from([64, 512]),
    seed=st.integers(0, 1000),
)
def test_so_does_planning_drafts(
    draft_length, max_catch_up_tokens, load, policy, depth, num_blocks, seed
) -> None:
    speculation = SpeculationConfig(
        num_speculative_tokens=4,
        draft_length=draft_length,
        runs_model=max_catch_up_tokens is not None,
        max_catch_up_tokens=max_catch_up_tokens or 0,
    )
    config = make_config(policy, num_blocks=num_blocks, speculation=speculation)
    driver = PureSpeculatingDriver(config, depth=depth, seed=seed)
    for request in load:
        with suppress(RequestRejected):
            driver.add(request)
    driver.run()
    assert driver.num_checked or not driver.requests


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
        (scheduler.policy.slo.tracker, "num_missed", 9),
        (scheduler.policy.slo.cost_model, "costs", None),
        (scheduler.kv.pool, next(name for name, _ in attributes(scheduler.kv.pool)), None),
    ):
        old = getattr(target, name)
        setattr(target, name, value)
        assert digest(scheduler) != before, name
        setattr(target, name, old)
        assert digest(scheduler) == before
