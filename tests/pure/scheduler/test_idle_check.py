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


def test_a_fast_machine_has_nothing_to_say() -> None:
    assert idle_misses(LinearStepTime(0.001, 1e-5), SLO_CLASSES) == []


def test_each_missed_objective_is_a_sentence() -> None:
    model = LinearStepTime(0.061, 0.002)
    assert idle_misses(model, SLO_CLASSES) == [
        "class interactive: TTFT 500 ms: prompts above 219 tokens miss it even when idle",
        "class interactive: TBT 50 ms, but one decode alone takes 63 ms here",
        "class standard: TTFT 2000 ms: prompts above 969 tokens miss it even when idle",
    ]


def test_very_slow_machines_are_told_how_slow() -> None:
    model = LinearStepTime(0.3, 0.01)
    assert idle_misses(model, {"chat": SLO(ttft=0.5)}) == [
        "class chat: TTFT 500 ms: prompts above 20 tokens miss it even when idle (128 tokens take 1580 ms)"
    ]
    assert idle_misses(model, {"chat": SLO(ttft=0.1)}) == [
        "class chat: TTFT 100 ms: every prompt misses it even when idle"
    ]
    assert idle_misses(model, {"chat": SLO(e2e=1.0)}) == [
        "class chat: E2E 1000 ms, but a prompt of 128 tokens alone takes 1580 ms here"
    ]


def test_the_decode_reads_its_context() -> None:
    model = LinearStepTime(0.01, 1e-4, per_context_token=1e-4)
    tbt = {"chat": SLO(tbt=0.1)}
    assert idle_misses(model, tbt, context=128) == []
    assert idle_misses(model, tbt, context=1024) == [
        "class chat: TBT 100 ms, but one decode alone takes 112 ms here"
    ]
    assert idle_misses(model, {"chat": SLO(tbt=0.0015)}, context=16) == [
        "class chat: TBT 1.5 ms, but one decode alone takes 12 ms here"
    ]


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
    assert IdleCheck().is_missed(LinearStepTime(base, per_token), SLO(ttft=ttft, tbt=tbt)) == bool(said)


def test_a_verdict_has_a_margin_and_the_speeds_it_rests_on() -> None:
    model, slo = LinearStepTime(0.098, 0.002), SLO(ttft=5.0, tbt=0.095)
    assert IdleCheck().is_missed(model, slo)
    assert not IdleCheck().is_missed(model, slo, margin=1.1)
    assert IdleCheck().speed(model, slo) == "one decode takes 100 ms, a prompt of 1024 tokens takes 2146 ms"


@pytest.mark.parametrize("classes", [{}, {"c": SLO()}])
def test_without_objectives_none_is_missed(classes: dict[str, SLO]) -> None:
    assert idle_misses(LinearStepTime(100.0, 1.0), classes) == []
