"""Policies that plan by time, in simulations of every shape: nothing is lost, equal runs are equal."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from onbeat.core.slo import SLO, ShedMode
from onbeat.scheduler.cluster.routers import ROUTERS
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.simulator.simulate import simulate
from onbeat.workload.slo_classes import SLOClass
from tests.examples import examples
from tests.pure.simulator.loads import StepByStep, linear_time, make_config, random_load

pytestmark = pytest.mark.usefixtures("comparators")

PLANNERS = sorted(name for name in POLICIES if POLICIES[name].needs_step_time)
CLASSES = (
    SLOClass(name="fast", slo=SLO(ttft=0.05, tbt=0.02), share=0.4, weight=2.0),
    SLOClass(name="slow", slo=SLO(ttft=1.0, e2e=4.0), share=0.3),
    SLOClass(name="none", slo=SLO(), share=0.3),
)


@given(
    policy=st.sampled_from(PLANNERS),
    router=st.sampled_from([*ROUTERS, "freeness"]),
    num_replicas=st.integers(1, 3),
    shed=st.sampled_from(ShedMode),
    mode=st.sampled_from(["stream", "gap"]),
    max_requests=st.sampled_from([None, 5]),
    concurrency=st.sampled_from([None, 20]),
    noise=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 1000),
)
@examples(25)
@example("slo", "freeness", 1, ShedMode.REJECT, "stream", None, None, 0.0, 3)  # room beside a run
def test_every_offered_request_is_accounted_for(
    policy, router, num_replicas, shed, mode, max_requests, concurrency, noise, seed
):
    load = random_load(60, rate=150, seed=seed, prompt=120).with_classes(CLASSES, seed=seed)
    config = make_config(
        policy,
        scheduler={"max_num_queued_reqs": max_requests, "slo_mode": mode, "max_num_seqs": 4},
        router=router,
        replicas=num_replicas,
        shed=shed,
        step_noise=noise,
        seed=seed,
        max_concurrency=concurrency,
    )
    result = simulate(load, config, linear_time(), observer=StepByStep())
    assert [record.request_id for record in result.records] == [str(row) for row in range(60)]
    num_expired = sum(record.finish_reason == "expired" for record in result.records)
    assert result.num_completed + result.num_rejected + num_expired == 60
    for record in result.records:
        if record.is_completed:
            assert record.num_output_tokens == record.offered_output_tokens
        else:
            assert record.num_output_tokens == 0
            assert shed is ShedMode.REJECT or max_requests is not None
    assert sum(each.num_leaked_blocks for each in result.replicas) == 0
    again = simulate(load, config, linear_time())
    assert again.records == result.records
    assert again.replicas == result.replicas
