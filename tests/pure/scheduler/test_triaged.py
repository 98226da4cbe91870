"""A static token budget, and a time budget, with triage: what `slo` is compared with."""

from __future__ import annotations

import pytest

from benchmarks.policies.triaged import TRIAGED
from onbeat.core.request import FinishReason
from onbeat.core.slo import SLO, ShedMode
from onbeat.scheduler.replica.policies import POLICIES
from tests.pure.scheduler.slo_watch import Watch
from tests.pure.scheduler.timed import make_request


@pytest.fixture(autouse=True, scope="module")
def registered():
    with pytest.MonkeyPatch.context() as patch:
        for name, policy in TRIAGED.items():
            patch.setitem(POLICIES, name, policy)
        yield


@pytest.mark.parametrize("policy", TRIAGED)
def test_prompts_that_cannot_all_be_in_time_do_not_drag_each_other_down(policy):
    """Each takes 0.13 s, and all of them are due within 0.6 s."""
    load = [
        make_request(f"r{i}", 900, 1, slo=SLO(ttft=0.5 + 0.01 * i), shed=ShedMode.RELEGATE) for i in range(12)
    ]
    driver = Watch(policy=policy)
    driver.serve(load)
    assert sum(driver.is_good(f"r{i}") for i in range(12)) >= 3
    assert len(driver.finished) == 12


@pytest.mark.parametrize("policy", TRIAGED)
@pytest.mark.parametrize(
    ("shed", "reason"),
    [(ShedMode.REJECT, FinishReason.EXPIRED), (ShedMode.RELEGATE, FinishReason.LENGTH)],
)
def test_whoever_is_late_before_it_has_begun_ends_only_where_it_asks_for_that(policy, shed, reason):
    driver = Watch(policy=policy)
    driver.add(make_request("late", 500, 2, slo=SLO(ttft=1.0), shed=shed))
    driver.add(make_request("other", 500, 2, slo=SLO(ttft=9.0), shed=shed))
    driver.now = 5.0
    driver.serve([])
    assert driver.finished == {"late": reason, "other": FinishReason.LENGTH}
    driver.scheduler.check_invariants()


@pytest.mark.parametrize(
    ("policy", "first"), [("simple", "tight"), ("edf-triage", "tight"), ("sarathi-triage", "loose")]
)
def test_prompts_go_by_deadline_or_by_arrival(policy, first):
    driver = Watch(policy=policy, max_num_batched_tokens=64)
    driver.add(make_request("loose", 500, 2, slo=SLO(ttft=9.0)))
    driver.add(make_request("tight", 500, 2, slo=SLO(ttft=1.0), arrival=0.1))
    driver.now = 0.1
    driver.step()
    assert driver.first_scheduled == [first]


@pytest.mark.parametrize(("policy", "is_bounded"), [("simple", True), ("sarathi-triage", False)])
def test_steps_beside_a_stream_are_bounded_by_its_objective_or_by_tokens(policy, is_bounded):
    driver = Watch(policy=policy, max_num_batched_tokens=512)
    stream = make_request("s", 10, 200, slo=SLO(ttft=1.0, tbt=0.01))
    driver.serve([stream, *(make_request(f"r{i}", 900, 1, slo=SLO(ttft=9.0)) for i in range(5))])
    assert (max(driver.gaps("s")) <= 0.01 + 1e-9) == is_bounded
    beside = [step.shape.num_new_tokens for step in driver.log[2:] if step.shape.num_chunks]
    assert (max(beside) == 512) != is_bounded
