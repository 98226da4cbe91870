"""Times of single rows by table: close to the model, and few questions to it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.idle_estimates import PrefillEstimate


@dataclass
class RooflineStep:
    """A device in small: weights to read or tokens to multiply, attention, and context to read."""

    fixed: float = 5e-3
    per_token: float = 4e-5
    per_pair: float = 1e-9
    per_context: float = 1e-7
    num_calls: int = 0

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        self.num_calls += 1
        context = shape.decode_context_tokens + shape.chunk_cached_tokens
        linear = max(self.fixed, shape.num_new_tokens * self.per_token)
        mean = linear + shape.query_key_pairs * self.per_pair + context * self.per_context
        return mean if q is None else mean * (1 + q)

    def max_chunk_tokens(
        self, shape: BatchShape, cached_tokens: int, budget: float, q: float | None = None
    ) -> int:
        raise NotImplementedError

    def observe(self, shape: BatchShape, seconds: float) -> None: ...


def exact(model: RooflineStep, cached_tokens: int, num_tokens: int, q: float | None = None) -> float:
    shape = BatchShape()
    shape.add(cached_tokens, num_tokens, samples=True)
    return model.step_time(shape, q)


@settings(max_examples=300, deadline=None)
@given(
    cached_tokens=st.integers(0, 200_000),
    num_tokens=st.integers(1, 200_000),
    q=st.sampled_from([None, 0.9]),
    kink=st.integers(10, 1000),
)
def test_lies_a_little_above_the_model(
    cached_tokens: int, num_tokens: int, q: float | None, kink: int
) -> None:
    model = RooflineStep(fixed=kink * 4e-5)
    expected = exact(model, cached_tokens, num_tokens, q)
    assert expected * (1 - 1e-9) <= PrefillEstimate(model, q).seconds(cached_tokens, num_tokens)
    assert PrefillEstimate(model, q).seconds(cached_tokens, num_tokens) <= expected * (1 + 1 / 16)


@settings(max_examples=200, deadline=None)
@given(cached_tokens=st.integers(0, 200_000), num_tokens=st.integers(2, 200_000))
def test_is_exact_where_the_model_is_linear_in_each(cached_tokens: int, num_tokens: int) -> None:
    class Bilinear(RooflineStep):
        def step_time(self, shape: BatchShape, q: float | None = None) -> float:
            pairs = shape.query_key_pairs - shape.num_new_tokens * (shape.num_new_tokens + 1) // 2
            return 0.01 + shape.num_new_tokens * 1e-4 + shape.chunk_cached_tokens * 1e-6 + pairs * 1e-9

    if num_tokens < 8:
        num_tokens *= 8  # a single token is a decode row, another kind
    model = Bilinear()
    estimate = PrefillEstimate(model).seconds(cached_tokens, num_tokens)
    assert estimate == pytest.approx(exact(model, cached_tokens, num_tokens), rel=1e-9)


def test_a_square_is_overestimated_by_a_64th_at_most() -> None:
    class Square(RooflineStep):
        def step_time(self, shape: BatchShape, q: float | None = None) -> float:
            return shape.sum_chunk_squares * 1e-9

    model = Square()
    estimate = PrefillEstimate(model)
    ratios = [estimate.seconds(0, n) / exact(model, 0, n) for n in range(8, 5000)]
    assert min(ratios) >= 1 - 1e-12
    assert max(ratios) <= 1 + 1 / 64 + 1e-12
    assert max(ratios) > 1.01


def test_nothing_to_compute_takes_no_time() -> None:
    assert PrefillEstimate(RooflineStep()).seconds(100, 0) == 0.0


def test_a_decode_reads_its_context() -> None:
    model = RooflineStep()
    estimate = PrefillEstimate(model)
    for context in (0, 1, 7, 8, 1000, 12_345):
        assert estimate.decode_seconds(context) == pytest.approx(
            model.fixed + (context + 1) * model.per_context
        )


def test_asks_the_model_seldom() -> None:
    model = RooflineStep()
    estimate = PrefillEstimate(model)
    for num_tokens in range(1, 8193):
        estimate.seconds(0, num_tokens)
        estimate.seconds(512, num_tokens)
    assert model.num_calls < 200
    num_calls = model.num_calls
    for num_tokens in range(1, 8193):
        estimate.seconds(0, num_tokens)
    assert model.num_calls == num_calls


def test_a_model_that_learns_is_asked_anew_once_told_to_forget() -> None:
    model = RooflineStep()
    estimate = PrefillEstimate(model)
    before = estimate.seconds(0, 1000)
    model.per_token *= 2
    assert estimate.seconds(0, 1000) == before
    estimate.forget()
    assert estimate.seconds(0, 1000) == pytest.approx(exact(model, 0, 1000), rel=0.02)
    assert estimate.seconds(0, 1000) > before
