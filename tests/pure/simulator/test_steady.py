"""Runs of steps that are taken at once leave exactly the records of the same steps taken one by one."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.slo import SLO, ShedMode
from onbeat.scheduler.cluster.events import Reported
from onbeat.scheduler.replica import lockstep
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.simulator.simulate import simulate
from onbeat.workload.slo_classes import SLOClass
from tests.examples import examples
from tests.pure.simulator.loads import (
    ShapeTime,
    StepByStep,
    count_plans,
    linear_time,
    make_config,
    make_load,
    random_load,
)


@st.composite
def loads(draw):
    """Requests that come in bursts and pauses, some with shared prefixes."""
    num_requests = draw(st.integers(1, 24))
    prompts = draw(st.lists(st.integers(1, 150), min_size=num_requests, max_size=num_requests))
    outputs = draw(st.lists(st.integers(1, 90), min_size=num_requests, max_size=num_requests))
    # Whole multiples of the step time, so that arrivals fall on step boundaries too.
    gaps = draw(st.lists(st.integers(0, 40), min_size=num_requests, max_size=num_requests))
    arrivals, now = [], 0.0
    for gap in gaps:
        now += gap / 8
        arrivals.append(now)
    columns = {}
    if draw(st.booleans()):
        groups = draw(st.lists(st.integers(0, 3), min_size=num_requests, max_size=num_requests))
        columns = {
            "block_ids": tuple(
                tuple(100 * group + block for block in range(-(-prompt // 32)))
                for group, prompt in zip(groups, prompts, strict=True)
            ),
            "block_size": 32,
        }
    is_closed = draw(st.booleans())
    return make_load(prompts, outputs, None if is_closed else arrivals, **columns), is_closed


def check_runs_equal_single_steps(offered, config, model):
    observer = StepByStep()
    one_by_one = simulate(offered, config, model, observer=observer)
    at_once = simulate(offered, config, model)
    assert at_once.records == one_by_one.records
    assert at_once.replicas == one_by_one.replicas
    assert at_once.total.num_steps == len(observer.steps)
    assert at_once.duration == one_by_one.duration


@given(
    load=loads(),
    policy=st.sampled_from(sorted(POLICIES)),
    num_blocks=st.integers(16, 40),
    num_replicas=st.integers(1, 3),
    router=st.sampled_from(["round-robin", "least-outstanding", "prefix-affinity"]),
    is_even=st.booleans(),
)
@examples(80)
def test_runs_of_steps_equal_single_steps(load, policy, num_blocks, num_replicas, router, is_even):
    offered, is_closed = load
    config = make_config(
        policy,
        scheduler={"num_blocks": num_blocks},
        replicas=num_replicas,
        router=router,
        host_overhead=0.0 if is_even else 1e-3,
        max_concurrency=5 if is_closed else None,
    )
    model = ShapeTime(lambda shape: 0.125) if is_even else linear_time()
    check_runs_equal_single_steps(offered, config, model)


OBJECTIVES = st.sampled_from(
    [None, SLO(ttft=0.5, tbt=0.05), SLO(ttft=2.0, tbt=0.02), SLO(tbt=0.009), SLO(ttft=0.1), SLO(e2e=3.0)]
)


@given(
    load=loads(),
    policy=st.sampled_from(sorted(name for name in POLICIES if not POLICIES[name].needs_step_time)),
    num_blocks=st.integers(16, 48),
    max_num_seqs=st.integers(1, 8),
    steps_ahead=st.integers(0, 1),
    num_replicas=st.integers(1, 3),
    router=st.sampled_from(["least-outstanding", "slo"]),
)
@examples(80)
def test_streams_in_lockstep_equal_single_rows(
    load, policy, num_blocks, max_num_seqs, steps_ahead, num_replicas, router
):
    """Steps with prompts among them, and streams that end, fill blocks and are preempted.

    Behind a router runs end where requests come that may go elsewhere.
    """
    offered, is_closed = load
    config = make_config(
        policy,
        scheduler={"num_blocks": num_blocks, "max_num_seqs": max_num_seqs},
        host_overhead=1e-3,
        max_concurrency=5 if is_closed else None,
        steps_ahead=steps_ahead,
        replicas=num_replicas,
        router=router,
    )
    check_runs_equal_single_steps(offered, config, linear_time())


@given(
    seed=st.integers(0, 1 << 20),
    rate=st.sampled_from([4, 12, 40]),
    slos=st.lists(OBJECTIVES, min_size=1, max_size=4),
    has_tenants=st.booleans(),
    shed=st.sampled_from(["off", "relegate", "reject"]),
    limits=st.fixed_dictionaries(
        {
            "slo_mode": st.sampled_from(["stream", "gap"]),
            "shed_order": st.sampled_from(["most", "longest-wait"]),
            "num_blocks": st.sampled_from([24, 60, 400]),
            "max_num_seqs": st.sampled_from([4, 32]),
        }
    ),
    noise=st.sampled_from([0.0, 0.3, 2.0]),
    steps_ahead=st.integers(0, 1),
    num_replicas=st.integers(1, 2),
    router=st.sampled_from(["least-outstanding", "slo"]),
)
@examples(60)
def test_streams_with_deadlines_in_lockstep_equal_single_rows(
    seed, rate, slos, has_tenants, shed, limits, noise, steps_ahead, num_replicas, router
):
    """Streams that are late, sit out or are preempted, beside others that have no deadline or a pace."""
    classes = tuple(
        SLOClass(name=f"c{index}", slo=slo, share=1 / len(slos), tenant=f"t{index}" if has_tenants else None)
        for index, slo in enumerate(slos)
    )
    load = random_load(40, rate=rate, seed=seed, prompt=150, output=90).with_classes(classes, seed=seed)
    config = make_config(
        "slo",
        scheduler=limits,
        host_overhead=1e-3,
        step_noise=noise,
        steps_ahead=steps_ahead,
        shed=ShedMode(shed),
        replicas=num_replicas,
        router=router,
    )
    with mock.patch.object(lockstep, "LEAST", 1):
        check_runs_equal_single_steps(load, config, linear_time())


def test_most_streams_with_deadlines_are_in_lockstep(monkeypatch):
    """The property above is worth little unless they are where nobody is late or has to be looked at."""
    num_rows = []
    end_step = lockstep.Lockstep.end_step

    def counted(self, states, rows, now):
        num_rows.append((self.num_rows, len(rows)))
        return end_step(self, states, rows, now)

    monkeypatch.setattr(lockstep.Lockstep, "end_step", counted)
    classes = tuple(
        SLOClass(name=name, slo=slo, share=0.5) for name, slo in (("a", None), ("b", SLO(tbt=1.0)))
    )
    limits = {"num_blocks": 900, "max_num_seqs": 64, "max_num_batched_tokens": 128}
    load = random_load(150, rate=120, seed=1, prompt=30, output=90).with_classes(classes, seed=1)
    simulate(load, make_config("slo", scheduler=limits), linear_time())
    in_lockstep, beside = (sum(each) for each in zip(*num_rows, strict=True))
    assert in_lockstep > 2 * beside


@given(
    load=loads(),
    slos=st.lists(OBJECTIVES, min_size=1, max_size=3),
    policy=st.sampled_from(sorted(POLICIES)),
    mode=st.sampled_from(["stream", "gap"]),
    num_blocks=st.integers(16, 40),
    num_replicas=st.integers(1, 2),
    router=st.sampled_from(["least-outstanding", "slo"]),
    noise=st.sampled_from([0.0, 0.3, 2.0]),
    context=st.sampled_from([4.7e-8, 2e-5]),
)
@examples(120)
def test_runs_equal_single_steps_where_step_times_are_learnt(
    load, slos, policy, mode, num_blocks, num_replicas, router, noise, context
):
    """Objectives are kept and missed, and the time of a step grows beyond the tightest while it is run.

    A router that asks how replicas stand hears of runs what it would of single steps.
    """
    offered, is_closed = load
    classes = tuple(
        SLOClass(name=f"c{index}", slo=slo, share=1 / len(slos)) for index, slo in enumerate(slos)
    )
    offered = offered.with_classes(classes, seed=1)
    config = make_config(
        policy,
        scheduler={"num_blocks": num_blocks, "slo_mode": mode},
        replicas=num_replicas,
        router=router,
        host_overhead=1e-3,
        max_concurrency=5 if is_closed else None,
        step_noise=noise,
    )
    model = ShapeTime(
        lambda shape: 5e-3 + 2.7e-5 * shape.num_new_tokens + context * shape.decode_context_tokens
    )
    check_runs_equal_single_steps(offered, config, model)


@pytest.mark.parametrize("policy", ["sarathi", "slo"])
def test_a_router_hears_of_runs_what_it_would_of_single_steps(policy):
    """How replicas stand, to the last digit, when they plan anything but one more token for each.

    Streams are in lockstep where steps are taken at once.
    """
    classes = (SLOClass(name="chat", slo=SLO(ttft=2.0, tbt=0.05), share=1.0),)
    load = random_load(30, rate=6, seed=3, prompt=100, output=120).with_classes(classes, seed=1)
    config = make_config(policy, scheduler={"num_blocks": 400}, replicas=3, router="slo", step_noise=0.3)
    of_runs, of_steps, steps = [], [], StepByStep()
    for heard, observer in ((of_runs, None), (of_steps, steps)):

        def hear(event, now, actions, heard=heard):
            if isinstance(event, Reported):
                heard.append((event.replica, now, event.load))

        with mock.patch.object(lockstep, "LEAST", 1):
            simulate(load, config, linear_time(), observer=observer, on_decision=hear)
    assert of_runs == of_steps
    assert policy == "sarathi" or len(of_runs) < len(steps.steps) / 2


@pytest.mark.parametrize("policy", sorted(name for name in POLICIES if not POLICIES[name].needs_step_time))
def test_runs_save_most_plans(policy, monkeypatch):
    load = random_load(50, rate=1, seed=1, prompt=30, output=60)
    plans = count_plans(monkeypatch)
    result = simulate(load, make_config(policy), linear_time())
    assert len(plans) < result.total.num_steps / 3


@pytest.mark.parametrize("policy", ["sarathi", "edf", "prefill-first"])
def test_a_run_goes_on_without_those_who_end(policy, monkeypatch):
    """Where nobody waits: the next request comes in the middle, and one at the very end of another."""
    load = make_load([30] * 7, [10, 20, 30, 40, 50, 60, 90], [0.0] * 6 + [3.0])
    config, model = make_config(policy), ShapeTime(lambda shape: 0.125)
    check_runs_equal_single_steps(load, config, model)
    plans = count_plans(monkeypatch)
    simulate(load, config, model)
    assert len(plans) < 12


def test_kv_pressure_preempts_in_the_runs_that_are_compared():
    """The property above is worth little unless its sizes cause preemptions."""
    load = make_load([100] * 8, [90] * 8, [0.0] * 8)
    config = make_config(scheduler={"num_blocks": 32})
    observer = StepByStep()
    one_by_one = simulate(load, config, linear_time(), observer=observer)
    assert one_by_one.total.num_preemptions > 0
    assert simulate(load, config, linear_time()).records == one_by_one.records
