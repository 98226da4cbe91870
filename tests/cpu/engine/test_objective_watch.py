"""Verdicts on objectives: given at start, held against the steps that run, and taken back in the log."""

from __future__ import annotations

import logging

import pytest

from onbeat.core.slo import SLO
from onbeat.core.step import BatchShape, StepStats
from onbeat.engine.start import ObjectiveWatch
from onbeat.perfmodel.predictor import Predictor, ResidualModel
from onbeat.scheduler.replica.idle_check import IdleCheck

CLASSES = {"default": SLO(tbt=0.1)}


def decode() -> BatchShape:
    shape = BatchShape()
    shape.add(100, 1, samples=True)
    return shape


class Machine:
    """Decodes that take as long as it is told, on a model that was measured at another pace, and a clock."""

    def __init__(self, predicted: float) -> None:
        self.model = Predictor(lambda _: predicted, ResidualModel.log_normal(0.1)).with_learning()
        self.watch = ObjectiveWatch(IdleCheck(), self.model, CLASSES)
        self.now = 0.0

    def run(self, seconds: float, *, for_seconds: float, pause: float = 0.0) -> None:
        end = self.now + for_seconds
        while self.now < end:
            start = self.now + pause
            self.now = start + seconds
            self.model.observe(decode(), seconds)
            self.watch.judge(_stats(start, self.now))


def _stats(start: float, end: float) -> StepStats:
    return StepStats(
        step_id=0,
        start=start,
        end=end,
        shape=decode(),
        num_running=1,
        num_waiting=0,
        num_blocks=1,
        num_used_blocks=1,
        num_preemptions=0,
        num_prefix_queries=0,
        num_prefix_hits=0,
        schedule_seconds=0.0,
        update_seconds=0.0,
    )


@pytest.fixture(autouse=True)
def listens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="onbeat.engine")


def test_a_verdict_of_a_busy_start_is_taken_back_once(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(0.110)
    assert machine.watch.misses() == ["class default: TBT 100 ms, but one decode alone takes 110 ms here"]
    machine.run(0.012, for_seconds=9.0)
    assert caplog.records == []
    machine.run(0.012, for_seconds=60.0)
    (line,) = caplog.records
    assert line.levelno == logging.INFO
    assert line.getMessage() == "class default is feasible after all: one decode takes 12 ms"


def test_a_verdict_that_holds_is_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    Machine(0.012).run(0.013, for_seconds=60.0)
    Machine(0.110).run(0.120, for_seconds=60.0)
    assert caplog.records == []


def test_an_objective_that_turns_out_of_reach_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(0.050)
    assert machine.watch.misses() == []
    machine.run(0.200, for_seconds=60.0)
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert line.getMessage() == "class default: TBT 100 ms, but one decode alone takes 200 ms here"


def test_slow_spells_and_few_steps_change_no_verdict(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(0.012)
    for _ in range(10):
        machine.run(0.150, for_seconds=8.0)
        machine.run(0.012, for_seconds=8.0)
    machine.run(0.150, for_seconds=60.0, pause=5.0)
    assert caplog.records == []


def test_a_machine_close_to_an_objective_does_not_flap(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(0.101)
    for _ in range(5):
        machine.run(0.095, for_seconds=30.0)
        machine.run(0.105, for_seconds=30.0)
    assert caplog.records == []
