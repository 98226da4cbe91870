"""Step times of a target with a draft model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.perfmodel.device_spec import Parallelism, find_device
from onbeat.perfmodel.fitted import FIT_METHODS, FitTarget, fit
from onbeat.perfmodel.inversion import MAX_CHUNK_TOKENS
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.models import SpeculativeDescription, StepTimeDescription, description_from_json
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.predictor import Predictor, ResidualModel
from onbeat.perfmodel.shapes import MeasuredStep
from onbeat.perfmodel.speculative import SpeculativeStepTime, draft_pass
from onbeat.perfmodel.utilisation import SpeculativeOperations, StepOperations
from tests.examples import examples
from tests.pure.perfmodel.shapes import (
    decodes,
    linear_seconds,
    mixed_batches,
    verified,
    verifies,
    with_chunk,
    with_verified,
)
from tests.pure.perfmodel.targets import make_roofline, make_step_time_model

H100 = find_device("h100-sxm")
LLAMA_70B, LLAMA_8B = find_model_spec("Meta-Llama-3-70B"), find_model_spec("Meta-Llama-3-8B")
FP8, TP4 = Precision("fp8", "fp8", "fp8"), Parallelism(tensor=4)


def draft_seconds(shape: BatchShape) -> float:
    return 1e-3 + 1e-5 * shape.num_sequences + 1e-9 * shape.decode_context_tokens


def roofline_of_70b_with_8b() -> SpeculativeStepTime:
    target, draft = (
        make_step_time_model("roofline", model=model, device=H100, parallelism=TP4, precision=FP8)
        for model in (LLAMA_70B, LLAMA_8B)
    )
    return SpeculativeStepTime(target, draft)


def both(sigma: float = 0.1) -> SpeculativeStepTime:
    residual = ResidualModel.log_normal(sigma)
    return SpeculativeStepTime(Predictor(linear_seconds, residual), Predictor(draft_seconds, residual))


def test_the_passes_of_the_draft_model_come_on_top() -> None:
    model: StepTimeModel = both()
    shape = verifies(4, 500, 3, by_model=True)
    expected = linear_seconds(shape) + 3 * (1e-3 + 4e-5 + 4e-9 * 503)
    assert model.step_time(shape) == pytest.approx(expected)
    looked_up = verifies(4, 500, 3)
    assert model.step_time(looked_up) == linear_seconds(looked_up)
    assert model.step_time(BatchShape()) == 0.0
    assert model.step_time(shape, 0.9) > model.step_time(shape)


def test_a_pass_has_the_rows_that_still_want_drafts() -> None:
    shape = with_verified(decodes(2, 100), [(299, 4), (499, 2)])
    shape.num_draft_passes = 4
    assert draft_pass(shape) == BatchShape(
        num_new_tokens=2,
        num_sequences=2,
        num_decodes=2,
        decode_context_tokens=round(2 * (200 + 304 + 502) / 4),
        num_lm_head_rows=2,
    )


@given(
    rows=verified,
    chunk=st.integers(2, 4000),
    cached=st.integers(0, 9000),
    budget=st.floats(1e-3, 0.5),
    passes=st.integers(0, 8),
)
def test_the_inverse_is_that_of_both(
    rows: list[tuple[int, int]], chunk: int, cached: int, budget: float, passes: int
) -> None:
    def growing(shape: BatchShape) -> float:
        return linear_seconds(shape) + 1e-7 * shape.num_new_tokens

    model = SpeculativeStepTime(Predictor(growing), Predictor(draft_seconds))
    shape = with_verified(BatchShape(), [*rows, (700, 3)])
    shape.num_draft_passes = passes
    before = replace(shape)
    budget = max(budget, model.step_time(with_chunk(shape, cached, chunk)))
    longest = model.max_chunk_tokens(shape, cached, budget)
    assert shape == before
    slack = 1e-12
    assert longest + (budget < model.step_time(with_chunk(shape, cached, chunk)) + slack) >= chunk
    assert not longest or model.step_time(with_chunk(shape, cached, longest)) <= budget + slack
    assert longest == MAX_CHUNK_TOKENS or (
        model.step_time(with_chunk(shape, cached, longest + 1)) > budget - slack
    )


def test_no_chunk_fits_where_the_drafts_take_all() -> None:
    shape = verifies(4, 500, 3, by_model=True)
    model = both()
    assert model.max_chunk_tokens(shape, 0, model.step_time(shape) - 1e-6) == 0
    assert model.max_chunk_tokens(shape, 0, 0.0) == 0


def test_both_models_learn_their_share() -> None:
    model = both().with_learning()
    plain, drafted = decodes(4, 500), verifies(4, 500, 3, by_model=True)
    truth = {0: linear_seconds(plain) * 1.2, 3: linear_seconds(drafted) * 1.2 + 3 * 2e-3}
    for _ in range(200):
        model.observe(plain, truth[0])
        model.observe(drafted, truth[3])
    assert model.step_time(plain) == pytest.approx(truth[0], rel=0.01)
    assert model.step_time(drafted) == pytest.approx(truth[3], rel=0.03)
    fresh = model.with_learning()
    assert fresh.step_time(plain) == linear_seconds(plain)


def test_a_model_that_does_not_learn_stays_as_it_is() -> None:
    model = both()
    shape = verifies(4, 500, 3, by_model=True)
    before = model.step_time(shape)
    for _ in range(50):
        model.observe(shape, 1.0)
    assert model.step_time(shape) == before
    assert model.drift is None


def test_a_70b_with_an_8b_draft_gains_at_low_load_alone() -> None:
    """Published for fp8 on four H100 with three drafts: more than 25 % less at low load, none at high."""
    model = roofline_of_70b_with_8b()
    tokens = sum(0.7**position for position in range(4))

    def gain(count: int) -> float:
        plain = model.step_time(decodes(count, 1000))
        return plain / (model.step_time(verifies(count, 1000, 3, by_model=True)) / tokens)

    assert gain(1) > 1 / 0.75
    assert gain(8) > 1 / 0.75
    assert gain(512) < 1.05


def test_the_works_of_both_add_up() -> None:
    target, draft = StepOperations(LLAMA_70B), StepOperations(LLAMA_8B)
    work = SpeculativeOperations(target, draft)
    shape = verifies(4, 500, 3, by_model=True)
    assert work.flops(shape) == target.flops(shape) + 3 * draft.flops(draft_pass(shape))
    assert work.bytes_read(shape) == target.bytes_read(shape) + 3 * draft.bytes_read(draft_pass(shape))
    assert work.flops(decodes(4, 500)) == target.flops(decodes(4, 500))


def describe(method: str | None) -> StepTimeDescription:
    fitted = None
    if method is not None:
        roofline = make_roofline(LLAMA_8B, H100)
        shapes = mixed_batches(40, seed=3, with_drafts=True)
        steps = [MeasuredStep(shape, 1.2 * roofline(shape)) for shape in shapes]
        fitted = fit(steps, FitTarget(model=LLAMA_8B, device=H100), method)
    return StepTimeDescription(
        model=LLAMA_8B, device=H100, parallelism=Parallelism(), precision=Precision(), fitted=fitted
    )


@pytest.mark.parametrize("method", [None, *FIT_METHODS])
def test_a_description_builds_the_same_again(method: str | None) -> None:
    target = describe(method)
    description = SpeculativeDescription(target=target, draft=target)
    again = description_from_json(json.loads(json.dumps(description.as_json())))
    assert isinstance(again, SpeculativeDescription)
    first, second = description.predictor(), again.predictor()
    for shape in (*mixed_batches(20, seed=4, with_drafts=True), verifies(4, 900, 3, by_model=True)):
        assert first.step_time(shape, 0.9) == second.step_time(shape, 0.9)
        first.observe(shape, 0.02)
        second.observe(shape, 0.02)


def test_a_description_of_one_model_is_read_as_before() -> None:
    single = describe("nnls")
    again = description_from_json(json.loads(json.dumps(single.as_json())))
    assert isinstance(again, StepTimeDescription)
    assert again.predictor().step_time(decodes(4, 100)) == single.predictor().step_time(decodes(4, 100))
    with pytest.raises(ConfigError, match="lacks draft"):
        description_from_json({"target": single.as_json()})


@examples(30)
@given(count=st.integers(1, 64), context=st.integers(1, 8000))
def test_more_passes_never_make_a_step_shorter(count: int, context: int) -> None:
    model = roofline_of_70b_with_8b()
    times = [model.step_time(verifies(count, context, num, by_model=True)) for num in range(9)]
    assert times == sorted(times)
