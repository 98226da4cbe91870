"""Best effort gets its share however long the overload lasts."""

from __future__ import annotations

import pytest

from onbeat.core.slo import SLO, SLO_CLASSES, ShedMode
from onbeat.scheduler.replica.slo.composer import OVERDUE
from tests.pure.scheduler.test_slo_properties import IMPOSSIBLE
from tests.pure.scheduler.timed import FakeStepTime, TimedDriver, make_config, make_request

BOUND = 5.0
"""Seconds that a request may wait, or be without a token."""


@pytest.mark.parametrize("slo", [None, IMPOSSIBLE], ids=["none", "lost"])
@pytest.mark.parametrize("others", [SLO(ttft=0.5, tbt=0.025), SLO_CLASSES["batch"]], ids=["tight", "loose"])
def test_nobody_waits_for_ever_however_long_the_overload(slo: SLO | None, others: SLO) -> None:
    """One request amid three times what the machine can do, for ever: it ends, or is told that it cannot."""
    model = FakeStepTime(fixed=1e-2, per_token=2e-4)
    config = make_config(max_num_seqs=8, max_queue_seconds=BOUND)
    arrival, num_prompt, num_output = 0.5, 500, 30
    tagged = make_request("tagged", num_prompt, num_output, slo=slo, arrival=arrival, shed=ShedMode.RELEGATE)
    bound = arrival + OVERDUE * BOUND + num_output * BOUND
    # Decodes share the fixed cost of their steps.
    work = model.idle_seconds(300, 20) - 20 * model.fixed * (1 - 1 / config.max_num_seqs)
    crowd = [
        make_request(f"r{index}", 300, 20, slo=others, arrival=(index + 1) * work / 3)
        for index in range(int(3 * bound / work))
    ]
    driver = TimedDriver(config, model)
    driver.serve([tagged, *crowd], until=bound, watch="tagged")
    assert "tagged" in driver.finished or "tagged" in driver.rejected, (
        f"not done after {bound:.1f} s: {len(driver.outputs['tagged'])} tokens"
    )


@pytest.mark.parametrize("slo", [None, SLO(ttft=0.05, tbt=0.1)], ids=["none", "missed"])
def test_nor_does_one_that_small_prompts_leave_no_memory_for(slo: SLO | None) -> None:
    """Preempted again and again, it gets all the memory that it needs once it has waited for too long."""
    config = make_config(num_blocks=256, max_model_len=4096, max_num_seqs=64, max_queue_seconds=10.0)
    large = make_request("large", 2000, 1500, slo=slo, shed=ShedMode.RELEGATE)
    small = [
        make_request(f"r{index}", 200, 300, slo=SLO(ttft=2.0, tbt=0.1), arrival=0.5 + 0.35 * index)
        for index in range(250)
    ]
    driver = TimedDriver(config, FakeStepTime())
    driver.serve([large, *small], until=85.0, watch="large")
    assert "large" in driver.finished, f"not done after 85 s: {len(driver.outputs['large'])} tokens"
    served = [name for name, times in driver.times.items() if times and name != "large"]
    waits = [driver.times[name][0] - driver.requests[name].arrival for name in served]
    assert len(waits) > 100
    assert sum(seconds > 2.0 for seconds in waits) <= 1
