"""What a scheduler's own step-time model learns of the steps that the device runs."""

from __future__ import annotations

import pytest

from onbeat.core.slo import SLO
from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.simulator.simulate import simulate
from onbeat.workload.slo_classes import SLOClass
from tests.pure.scheduler.timed import FakeStepTime
from tests.pure.simulator.loads import make_config, random_load


class Listening(FakeStepTime):
    """The device's own times, beside what the scheduler was told that steps took."""

    def __init__(self) -> None:
        super().__init__(per_context=1e-6)
        self.ratios: list[float] = []

    def with_learning(self) -> Listening:
        return self

    def observe(self, shape: BatchShape, seconds: float) -> None:
        self.ratios.append(seconds / self.step_time(shape))


@pytest.mark.parametrize("policy", sorted(name for name in POLICIES if POLICIES[name].needs_step_time))
@pytest.mark.parametrize("mode", ["stream", "gap"])
def test_a_device_as_predicted_is_found_to_be_as_predicted(policy, mode):
    """A step that takes a millionth longer than planned would make every stream in it miss its objective."""
    load = random_load(60, rate=60, seed=3, prompt=120).with_classes(
        (SLOClass(name="all", slo=SLO(ttft=0.5, tbt=0.02), share=1.0),), seed=0
    )
    model = Listening()
    simulate(load, make_config(policy, scheduler={"slo_mode": mode}), model)
    assert len(model.ratios) > 30
    assert model.ratios == pytest.approx([1.0] * len(model.ratios), rel=1e-9)
