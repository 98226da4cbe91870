"""The schedulers of virtual replicas: which of them get a step-time model, and what it learns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.core.step_time import predict_step
from onbeat.perfmodel.predictor import Predictor
from onbeat.scheduler.cluster.events import Send
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import make_scheduler
from tests.pure.simulator.loads import StepByStep, linear_time, make_config, random_load

SECONDS = linear_time().seconds


@pytest.fixture
def clairvoyant(monkeypatch):
    """A policy that asks for predictions."""
    monkeypatch.setitem(POLICIES, "clairvoyant", replace(POLICIES["sarathi"], needs_step_time=True))


def test_policies_that_plan_by_tokens_get_no_model():
    assert make_scheduler(make_config().scheduler, linear_time()).step_time_model is None


def test_a_router_that_reads_predictions_gets_them_under_any_policy():
    for router in ("slo", "round-robin"):
        sent = []

        def watch(_event, _now, actions, sent=sent):
            sent += [each for each in actions if isinstance(each, Send)]

        config = make_config(replicas=2, router=router)
        simulate(random_load(9, rate=30, seed=1), config, Predictor(SECONDS), on_decision=watch)
        assert len(sent) == 9
        assert any(each.predicted_ttft is not None for each in sent) == (router == "slo")


@pytest.mark.usefixtures("clairvoyant")
class TestModelOfItsOwn:
    def test_each_replica_learns_for_itself(self):
        device = Predictor(SECONDS)
        first, second = (make_scheduler(make_config("clairvoyant").scheduler, device) for _ in range(2))
        assert first.step_time_model is not None
        assert first.step_time_model is not second.step_time_model is not device
        shape = BatchShape()
        shape.add(100, 1, samples=True)
        for _ in range(50):
            first.step_time_model.observe(shape, 2 * SECONDS(shape))
        assert predict_step(first.step_time_model, shape) > 1.5 * SECONDS(shape)
        assert predict_step(device, shape) == SECONDS(shape)

    def test_it_learns_the_overhead_that_the_device_has(self):
        observer = StepByStep()
        config = make_config("clairvoyant", host_overhead=5e-3)
        simulate(random_load(300, rate=30, seed=1), config, linear_time(), observer=observer)
        late = [stats for _, stats in observer.steps[len(observer.steps) // 2 :]]
        actual = sum(stats.end - stats.start for stats in late)
        assert sum(stats.predicted_seconds for stats in late) == pytest.approx(actual, rel=0.05)
        assert sum(SECONDS(stats.shape) for stats in late) < 0.7 * actual

    @pytest.mark.parametrize("pipeline", [1, 2])
    def test_observers_hear_what_the_scheduler_expected(self, pipeline):
        observer = StepByStep()
        config = make_config("clairvoyant", step_noise=0.3, pipeline=pipeline)
        simulate(random_load(20, rate=30, seed=1), config, linear_time(), observer=observer)
        [_, first], *_ = observer.steps
        assert first.predicted_seconds == pytest.approx(SECONDS(first.shape))
        if pipeline == 1:
            assert first.end - first.start != pytest.approx(first.predicted_seconds)

    def test_a_model_that_cannot_learn_is_refused(self):
        class Rigid:
            def step_time(self, shape, q=None):
                return 1.0

        with pytest.raises(ConfigError, match="'clairvoyant'"):
            make_scheduler(make_config("clairvoyant").scheduler, Rigid())
