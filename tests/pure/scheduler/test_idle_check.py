"""What is said of objectives that even an idle machine misses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.slo import SLO, SLO_CLASSES
from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.idle_check import IdleCheck
from tests.told import numbers


@dataclass(frozen=True)
class LinearStepTime:
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
