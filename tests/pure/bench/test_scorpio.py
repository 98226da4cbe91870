"""SCORPIO's guards: prompts that would be late are dropped, and loose streams leave steps to tight ones."""

from __future__ import annotations

import pytest

from benchmarks.policies.scorpio import SCORPIO
from onbeat.core.request import FinishReason
from onbeat.core.slo import SLO, ShedMode
from onbeat.scheduler.replica.policies import POLICIES
from tests.pure.scheduler.slo_watch import Watch
from tests.pure.scheduler.timed import make_request

TIGHT, LOOSE = SLO(ttft=100.0, tbt=0.005), SLO(ttft=100.0, tbt=0.0125)


@pytest.fixture(autouse=True, scope="module")
def registered():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(POLICIES, "scorpio", SCORPIO)
        yield


def test_the_prompt_that_would_be_late_is_dropped_and_no_other() -> None:
    """The long one is due first and takes all the time; Moore's rule would drop that one."""
    driver = Watch(policy="scorpio", num_blocks=8192, max_model_len=8192)
    driver.add(make_request("long", 3000, 1, slo=SLO(ttft=0.9), shed=ShedMode.REJECT))
    for index in range(3):
        driver.add(make_request(f"r{index}", 900, 1, slo=SLO(ttft=0.91), shed=ShedMode.REJECT))
    driver.serve([])
    assert driver.finished.pop("long") is FinishReason.LENGTH
    assert set(driver.finished.values()) == {FinishReason.EXPIRED}


def test_whoever_was_dropped_without_asking_for_it_is_served_last() -> None:
    driver = Watch(policy="scorpio")
    slos = {"a": SLO(ttft=0.2), "late": SLO(ttft=0.21), "b": SLO(ttft=5.0)}
    for name, slo in slos.items():
        driver.add(make_request(name, 900, 1, slo=slo, shed=ShedMode.RELEGATE))
    driver.serve([])
    assert driver.finish_order == ["a", "b", "late"]


def test_a_loose_stream_decodes_by_its_share_of_the_tightest_objective() -> None:
    driver = Watch(policy="scorpio")
    driver.add(make_request("tight", 10, 400, slo=TIGHT))
    driver.add(make_request("loose", 10, 400, slo=LOOSE))
    driver.serve([], watch="tight")
    assert len(driver.times["loose"]) == pytest.approx(0.4 * 400, abs=3)


def test_a_loose_stream_alone_decodes_in_each_step() -> None:
    driver = Watch(policy="scorpio")
    driver.add(make_request("loose", 10, 50, slo=LOOSE))
    driver.serve([])
    assert len(driver.log) == 50


@pytest.mark.parametrize(("slo", "all_run"), [(TIGHT, False), (SLO(ttft=100.0, tbt=0.05), True)])
def test_the_virtual_batch_is_as_large_as_the_tightest_objective_allows(slo: SLO, all_run: bool) -> None:
    """A step of 29 decodes takes 5 ms; forty loose ones are a virtual batch of four."""
    driver = Watch(policy="scorpio")
    driver.serve(
        [
            make_request("tight", 10, 100, slo=TIGHT),
            *(make_request(f"r{index}", 10, 60, slo=slo) for index in range(40)),
        ],
        until=0.2,
    )
    assert (len(driver.scheduler.running) == 41) == all_run
    assert all_run or 25 <= len(driver.scheduler.running) <= 29
