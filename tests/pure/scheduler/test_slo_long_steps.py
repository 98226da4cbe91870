"""Steps of decodes alone that earn the time for a long one with prompts."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO, SLO_MODES, ShedMode, SLOMode
from onbeat.core.step import BatchShape, SchedulerOutput
from onbeat.scheduler.replica.slo.rules import LONGEST_GAP, StepRules
from onbeat.scheduler.replica.slo.work import CERTAIN
from tests.pure.scheduler.slo_watch import Watch
from tests.pure.scheduler.timed import FakeStepTime, make_request

TBT = 0.05


@dataclass
class DearBeside(FakeStepTime):
    """A device like a CPU: prompts cost something beside themselves, and decodes more beside prompts."""

    fixed: float = 1e-3
    per_token: float = 1.5e-4
    per_pair: float = 0.0
    beside: float = 9e-3
    """Seconds."""
    per_decode: float = 0.8e-3
    per_decode_beside: float = 1.3e-3

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        mean = super().step_time(shape)
        mean += shape.num_decodes * (self.per_decode_beside if shape.num_chunks else self.per_decode)
        mean += self.beside if shape.num_chunks else 0.0
        return mean if q is None else mean * (1 + self.spread * q)


class NeverMeasured(DearBeside):
    """Knows no quantile."""

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        if q is not None:
            raise ConfigError("the error of this model was never measured")
        return super().step_time(shape)


def overloaded(
    model: FakeStepTime, mode: SLOMode = "stream", *, rate: float = 9.0, seconds: float = 10.0, **objectives
) -> Watch:
    """Return a run of some seconds of arrivals, more than there is time for."""
    run = Watch(model, slo_mode=mode, max_num_seqs=32)
    slo = SLO(**({"ttft": 0.5, "tbt": TBT} | objectives))
    run.serve(
        make_request(
            f"r{i}", 100 + 137 * i % 500, 20 + 31 * i % 80, arrival=i / rate, slo=slo, shed=ShedMode.RELEGATE
        )
        for i in range(int(seconds * rate))
    )
    return run


def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all steps be alike."""
    monkeypatch.setattr(StepRules, "long_steps", lambda *_: None)


def long_ones(run: Watch) -> list[tuple[int, SchedulerOutput]]:
    return [
        (place, step)
        for place, step in enumerate(run.log)
        if step.shape.num_chunks and step.budget is not None and run.model.step_time(step.shape) > 1.1 * TBT
    ]


def num_pairs(run: Watch) -> int:
    """Return how many long steps came right after one of decodes alone."""
    return sum(place > 0 and not run.log[place - 1].shape.num_chunks for place, _ in long_ones(run))


def due_of(run: Watch, name: str, now: float) -> float:
    """Return by when the next token of a stream was due at some time; infinite of all others."""
    times = [time for time in run.times[name] if time <= now]
    first_due = run.requests[name].arrival + 0.5
    return first_due + len(times) * TBT if times and times[0] <= first_due else inf


def num_good(run: Watch) -> int:
    return sum(run.is_good(name) for name in run.requests)


class TestWhereItPays:
    def test_more_requests_are_in_time(self, monkeypatch):
        with_them = num_good(overloaded(DearBeside()))
        alike(monkeypatch)
        assert with_them > 1.1 * num_good(overloaded(DearBeside()))

    def test_no_stream_is_late_by_them(self):
        run = overloaded(DearBeside())
        assert long_ones(run)
        in_time = [name for name in run.requests if run.times[name] and run.ttft(name) <= 0.5]
        assert in_time
        assert max(max(run.lateness(name)) for name in in_time) <= 1e-9

    def test_decodes_run_alone_before_them_though_prompts_wait(self, monkeypatch):
        num = num_pairs(overloaded(DearBeside(), seconds=20))
        alike(monkeypatch)
        assert num > 3 * num_pairs(overloaded(DearBeside(), seconds=20))

    def test_they_take_two_objectives_at_most_and_have_that_in_hand(self):
        run = overloaded(DearBeside(spread=0.3))
        assert long_ones(run)
        for place, step in long_ones(run):
            seconds = run.model.step_time(step.shape)
            assert seconds <= step.budget + 1e-9 <= LONGEST_GAP * TBT + 2e-9
            now = run.planned_at[place]
            due = min(due_of(run, row.request_id, now) for row in step.rows)
            assert now + run.model.step_time(step.shape, CERTAIN) <= due + 1e-9

    def test_the_less_certain_steps_are_the_more_decodes_run_alone(self):
        runs = [overloaded(DearBeside(spread=spread), seconds=20) for spread in (0.0, 1.0)]
        num_long = [len(long_ones(run)) for run in runs]
        num_alone = [sum(not step.shape.num_chunks for step in run.log) for run in runs]
        assert num_alone[0] / num_long[0] < num_alone[1] / num_long[1]


class TestWhereNot:
    @pytest.mark.parametrize(
        ("model", "mode", "objectives"),
        [
            pytest.param(DearBeside(), "gap", {}, id="every gap counts by itself"),
            pytest.param(NeverMeasured(), "stream", {}, id="nobody knows what is certain"),
            pytest.param(DearBeside(), "stream", {"tbt": None, "e2e": 6.0}, id="streams have a pace"),
            pytest.param(DearBeside(), "stream", {"tbt": 1.0}, id="steps are long anyway"),
            pytest.param(FakeStepTime(), "stream", {}, id="prompts cost nothing beside them"),
        ],
    )
    def test_steps_are_alike(self, model, mode, objectives, monkeypatch):
        log = overloaded(model, mode, **objectives).log
        alike(monkeypatch)
        assert overloaded(model, mode, **objectives).log == log

    @pytest.mark.parametrize("mode", SLO_MODES)
    def test_while_all_fit_one_step_nothing_changes(self, mode, monkeypatch):
        log = overloaded(DearBeside(), mode, rate=1.0).log
        alike(monkeypatch)
        assert overloaded(DearBeside(), mode, rate=1.0).log == log
