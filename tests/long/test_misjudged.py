"""Plans against the clock recover from a step-time model that is far off."""

from __future__ import annotations

import pytest

from onbeat.core.request import Request
from onbeat.core.slo import SLO, ShedMode
from tests.pure.scheduler.misjudged import MisjudgedDriver, steady_load
from tests.pure.scheduler.timed import FakeStepTime, make_config

DEVICE = FakeStepTime(fixed=5e-3, per_token=1e-4, per_context=1e-7, per_pair=1e-8)
OBJECTIVE = SLO(ttft=0.2, tbt=0.02)
LEARNING_STEPS = 100


def good_share(driver: MisjudgedDriver, requests: list[Request], *, after_steps: int) -> float:
    """Serve requests; return the share of good ones among those that come when so many steps have run."""
    later = []
    for request in requests:
        driver.serve([], until=request.arrival)
        driver.now = max(driver.now, request.arrival)
        if len(driver.log) >= after_steps:
            later.append(request.request_id)
        driver.add(request)
    driver.serve([])
    assert len(later) > 60
    return sum(driver.is_good(request_id) for request_id in later) / len(later)


@pytest.mark.parametrize("factor", [5.0, 20.0, 1 / 5, 1 / 20])
@pytest.mark.parametrize(
    ("mode", "shed"), [("stream", ShedMode.RELEGATE), ("stream", ShedMode.REJECT), ("gap", ShedMode.RELEGATE)]
)
def test_an_easy_load_is_served_in_time_whatever_the_model_said_at_first(factor, mode, shed) -> None:
    driver = MisjudgedDriver(make_config("slo", slo_mode=mode), DEVICE, factor=factor)
    load = steady_load(100, rate=2.0, slo=OBJECTIVE, shed=shed)
    assert good_share(driver, load, after_steps=LEARNING_STEPS) >= 0.95


@pytest.mark.parametrize("factor", [20.0, 1 / 20])
@pytest.mark.parametrize("shed", [ShedMode.RELEGATE, ShedMode.REJECT])
def test_an_easy_load_is_served_in_time_once_the_machine_has_changed(factor, shed) -> None:
    """It takes so many times as long for the first steps; the model is right from then on."""
    num_before = 100
    driver = MisjudgedDriver(
        make_config("slo"), DEVICE, pace=lambda step: factor if step <= num_before else 1.0
    )
    load = steady_load(200, rate=2.0, slo=OBJECTIVE, shed=shed)
    assert good_share(driver, load, after_steps=num_before + LEARNING_STEPS) >= 0.95
