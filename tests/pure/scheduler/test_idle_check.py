"""What is said of objectives that even an idle machine misses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.slo import SLO, SLO_CLASSES
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.idle_check import Asked, IdleCheck, ShortSteps
from onbeat.scheduler.replica.slo.view import MOST_JOBS
from onbeat.scheduler.triage import CostModel
from tests.pure.scheduler.timed import FakeStepTime, make_request, make_state
from tests.told import numbers


@dataclass(frozen=True)
class LinearStepTime(StepTimeModel):
    """base + seconds a token; a decode also pays for its context."""

    base: float
    per_token: float
    per_context_token: float = 0.0

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        assert q is None
        context = shape.decode_context_tokens
        return self.base + self.per_token * shape.num_new_tokens + self.per_context_token * context

    def max_chunk_tokens(
        self, shape: BatchShape, cached_tokens: int, budget: float, q: float | None = None
    ) -> int:
        return max(0, int((budget - self.base) / self.per_token + 1e-6))

    def observe(self, shape: BatchShape, seconds: float) -> None:
        raise AssertionError("a question teaches nothing")


def idle_misses(model: LinearStepTime, classes: Mapping[str, SLO], **check: int) -> list[str]:
    return IdleCheck(**check).misses(model, classes)


def told(model: LinearStepTime, slo: SLO, **check: int) -> tuple[str, list[float]]:
    """Return the objective that is missed and the numbers of the one sentence about it."""
    (text,) = idle_misses(model, {"chat": slo}, **check)
    name = text.split()[2]
    return name, numbers(text.partition(name)[2])


def test_a_fast_machine_has_nothing_to_say() -> None:
    assert idle_misses(LinearStepTime(0.001, 1e-5), SLO_CLASSES) == []


def test_each_missed_objective_is_a_sentence() -> None:
    model = LinearStepTime(0.061, 0.002)
    tbt, ttft, standard = idle_misses(model, SLO_CLASSES)
    assert numbers(ttft) == [500, 219]
    assert numbers(tbt) == [50, 63]
    assert numbers(standard) == [2000, 969]
    assert [text.split(": ")[0] for text in (ttft, tbt, standard)] == [
        "class interactive",
        "class interactive",
        "class standard",
    ]


def test_very_slow_machines_are_told_how_slow() -> None:
    model = LinearStepTime(0.3, 0.01)
    assert told(model, SLO(ttft=0.5)) == ("TTFT", [500, 20, 128, 1580])
    assert told(model, SLO(ttft=0.1)) == ("TTFT", [100])
    assert told(model, SLO(e2e=1.0)) == ("E2E", [1000, 128, 1580])


def test_the_decode_reads_its_context() -> None:
    model = LinearStepTime(0.01, 1e-4, per_context_token=1e-4)
    tbt = {"chat": SLO(tbt=0.1)}
    assert idle_misses(model, tbt, context=128) == []
    assert told(model, tbt["chat"], context=1024) == ("TBT", [100, 112])
    assert told(model, SLO(tbt=0.0015), context=16) == ("TBT", [1.5, 12])


def test_only_prompts_that_the_model_takes_count() -> None:
    model = LinearStepTime(0.061, 0.002)
    assert idle_misses(model, {"chat": SLO(ttft=0.5)}, long=200) == []


@given(
    base=st.floats(1e-4, 1.0),
    per_token=st.floats(1e-6, 1e-2),
    ttft=st.floats(1e-3, 10),
    tbt=st.floats(1e-3, 10),
)
def test_it_speaks_exactly_when_an_objective_is_missed(
    base: float, per_token: float, ttft: float, tbt: float
) -> None:
    said = idle_misses(LinearStepTime(base, per_token), {"c": SLO(ttft=ttft, tbt=tbt)})
    assert any("TTFT" in text for text in said) == (base + 1024 * per_token > ttft)
    assert any("TBT" in text for text in said) == (base + per_token > tbt)


@pytest.mark.parametrize("classes", [{}, {"c": SLO()}])
def test_without_objectives_none_is_missed(classes: dict[str, SLO]) -> None:
    assert idle_misses(LinearStepTime(100.0, 1.0), classes) == []


class TestShortSteps:
    """A third of the requests want a token in 10 ms, so that steps have 1 ms for prompts, a fifth of what
    these need. The others would all be in time in steps of 0.2 s."""

    FAST, SLOW = SLO(ttft=0.5, tbt=0.01), SLO(ttft=2.0, tbt=0.2)

    @pytest.fixture(autouse=True)
    def begin(self) -> None:
        self.cost_model = CostModel(FakeStepTime(fixed=8e-3), None)
        self.short_steps = ShortSteps(self.cost_model)
        self.now = 0.0

    def send(
        self,
        *,
        rate: float = 10.0,
        num: int = MOST_JOBS,
        slos: Sequence[SLO] = (FAST, SLOW, SLOW),
        fast_weight: float = 1.0,
        is_kept: bool = False,
        num_late: int = 1,
    ) -> float:
        """Send requests; return the shortest objective that is worth keeping then."""
        for index in range(num):
            self.now += 1 / rate
            slo = slos[index % len(slos)]
            weight = fast_weight if slo is self.FAST else 1.0
            state = make_state(make_request("r", 500, 20, arrival=self.now, slo=slo, weight=weight))
            plan: Any = SimpleNamespace(now=self.now, running=[], max_num_seqs=256, tell_apart=lambda: None)
            costs, num_left = self.cost_model.costs, state.slo.num_left
            self.short_steps.asked.append(Asked(self.now, 500, 0, costs, weight, num_left, state.slo))
            if num_late or self.cost_model.least_tbt:
                self.short_steps.weigh(plan)
            if is_kept:
                state.slo.note_delivery(self.now)
        return self.cost_model.least_tbt

    def test_are_given_up_where_they_keep_out_more_than_they_are_worth(self) -> None:
        assert self.send(num=MOST_JOBS - 1) == 0, "too few have come to say"
        assert self.send(num=1) == 0.2
        self.cost_model.take()
        assert self.cost_model.shortest_tbt == 0.2

    @pytest.mark.parametrize(
        "load",
        [
            {"is_kept": True},
            {"num_late": 0},
            {"rate": 1.0},
            {"fast_weight": 8.0},
            {"slos": (*[FAST] * 5, SLOW)},
            {"slos": (FAST,)},
        ],
    )
    def test_stay_where_they_are_worth_it(self, load) -> None:
        """They are kept; nobody is late; there is time for all; they weigh more, or are most; or are all."""
        assert self.send(**load) == 0

    def test_come_back_once_there_is_time_for_them(self) -> None:
        assert self.send() == 0.2
        assert self.send(rate=1.0, num_late=0) == 0
