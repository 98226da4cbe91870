"""The step-time model of a record: described in full, built again, learning the same."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.core.step_time import seconds_of_each
from onbeat.perfmodel.device_spec import Parallelism, cpu_device, find_device
from onbeat.perfmodel.fitted import FitTarget, fit
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.models import (
    SpeculativeDescription,
    StepTimeDescription,
    description_from_json,
    roofline_predictor,
)
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.shapes import MeasuredStep
from onbeat.recording.log import RecordHeader
from onbeat.scheduler.scheduler_config import SpeculationConfig
from onbeat.simulator.replay.model import learning_model, recorded_step_time_model
from tests.pure.recording.recorded import make_header
from tests.pure.scheduler.driver import make_config

MODEL = find_model_spec("smollm2-135m-instruct")
FP32 = Precision(weights="fp32", kv="fp32", compute="fp32")


def shape_of(num_decodes: int, chunk: int) -> BatchShape:
    shape = BatchShape()
    for _ in range(num_decodes):
        shape.add(100, 1, samples=True)
    if chunk:
        shape.add(0, chunk, samples=True)
    return shape


SHAPES = [shape_of(decodes, chunk) for decodes in (1, 2, 5, 9) for chunk in (0, 16, 100, 300)]


def describe(kind: str) -> StepTimeDescription:
    device = cpu_device(memory_bandwidth=2e10, peak_flops={"fp32": 1e11})
    fitted = None
    if kind != "bare":
        steps = [
            MeasuredStep(shape, 0.01 + 1e-3 * shape.num_new_tokens + 1e-4 * shape.num_decodes)
            for shape in SHAPES
        ]
        target = FitTarget(model=MODEL, device=device, parallelism=Parallelism(), precision=FP32)
        fitted = fit(steps, target, kind)
    return StepTimeDescription(
        model=MODEL, device=device, parallelism=Parallelism(), precision=FP32, fitted=fitted
    )


TIMED = [
    MeasuredStep(shape, factor * describe("bare").predictor().step_time(shape))
    for shape, factor in ((shape_of(1, 0), 2.0), (shape_of(0, 128), 9.0))
]


@pytest.mark.parametrize("kind", ["bare", "corrected", "roofline", "nnls"])
def test_a_described_model_predicts_and_learns_the_same(kind: str) -> None:
    description = describe("bare").corrected(TIMED) if kind == "corrected" else describe(kind)
    text = orjson.dumps(description.as_json())
    again = description_from_json(orjson.loads(text))
    assert again == description
    ours, theirs = description.predictor(), again.predictor()
    for _ in range(30):
        for index, shape in enumerate(SHAPES):
            assert ours.step_time(shape) == theirs.step_time(shape)
            assert ours.step_time(shape, 0.9) == theirs.step_time(shape, 0.9)
            for model in (ours, theirs):
                model.observe(shape, 0.02 + 2e-3 * index)
    assert ours.drift == theirs.drift
    assert ours.step_time(SHAPES[3]) != description.predictor().step_time(SHAPES[3]), "it learned"


def test_what_was_timed_is_predicted_and_what_lies_between_lies_between() -> None:
    """A decode twice, a prompt nine times as long as the roofline says: no common factor meets both."""
    plain, model = describe("bare").predictor(), describe("bare").corrected(TIMED).predictor()
    for step in TIMED:
        assert model.step_time(step.shape) == pytest.approx(step.seconds)
    factors = [
        model.step_time(shape_of(0, tokens)) / plain.step_time(shape_of(0, tokens))
        for tokens in (2, 8, 16, 64, 128, 512)
    ]
    assert factors == sorted(factors)
    assert 2 < factors[0] < 3
    assert factors[2] == pytest.approx((2 * 9) ** 0.5 * (2 / 9) ** (0.5 - 4 / 7))
    assert factors[4:] == pytest.approx([9, 9])
    (decode, _) = TIMED
    alone = describe("bare").corrected([decode]).predictor()
    assert alone.step_time(shape_of(0, 128)) == pytest.approx(2 * plain.step_time(shape_of(0, 128)))


def test_times_of_a_run_are_those_of_its_steps_one_by_one() -> None:
    model = roofline_predictor(describe("bare"), ((1, 2.0), (128, 9.0)))
    shape, contexts = shape_of(9, 0), [900 + 9 * step for step in range(9)]
    assert list(model.step_times(shape, contexts)) == seconds_of_each(model.step_time, shape, contexts)


def test_a_device_of_a_data_sheet_can_be_described() -> None:
    description = StepTimeDescription(
        model=MODEL,
        device=find_device("h100-sxm"),
        parallelism=Parallelism(),
        precision=Precision(),
    )
    again = description_from_json(orjson.loads(orjson.dumps(description.as_json())))
    assert again.predictor().step_time(SHAPES[0]) == description.predictor().step_time(SHAPES[0])


def test_a_description_of_another_version_is_refused() -> None:
    values = describe("bare").as_json()
    values["model"]["num_heads_of_tomorrow"] = 3
    with pytest.raises(ConfigError, match="num_heads_of_tomorrow"):
        description_from_json(values)
    del values["device"], values["model"]["num_heads_of_tomorrow"]
    with pytest.raises(ConfigError, match="lacks device"):
        description_from_json(values)


@pytest.mark.parametrize("number", [-1, 1e308, float("nan"), 10**400])
def test_a_damaged_description_is_refused(number: float) -> None:
    values = describe("bare").as_json()
    values["device"]["memory_bandwidth"] = number
    with pytest.raises(ConfigError, match=r"device\.memory_bandwidth"):
        description_from_json(values)


def header(**changes):
    engine = {"model_name": "SmolLM2-135M-Instruct", "device": "h100-sxm", "dtype": "bfloat16"}
    return make_header(make_config(), **{"engine": engine, **changes})


def test_the_engine_s_own_model_comes_first() -> None:
    description = describe("nnls")
    recorded = header(step_time=description.as_json())
    own = learning_model(recorded)
    assert own is not None
    for shape in SHAPES:
        assert own.step_time(shape) == description.predictor().step_time(shape)
        assert recorded_step_time_model(recorded).step_time(shape) == own.step_time(shape)
    assert learning_model(header()) is None
    other = recorded_step_time_model(recorded, kind="roofline")
    assert other.step_time(SHAPES[0]) != own.step_time(SHAPES[0])


def test_without_one_it_is_the_roofline_of_the_recorded_names() -> None:
    plain = recorded_step_time_model(header())
    assert plain.step_time(SHAPES[0]) == recorded_step_time_model(header(), kind="roofline").step_time(
        SHAPES[0]
    )
    slower = recorded_step_time_model(header(), device="l4")
    assert slower.step_time(SHAPES[0]) > plain.step_time(SHAPES[0])


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"dtype": "float64"}, "in 'float64'"),
        ({"model_name": "nobody/knows"}, "unknown model 'nobody/knows'"),
        ({"device": "cuda:0"}, "cuda:0"),
    ],
)
def test_what_has_no_model_is_named(engine, message: str) -> None:
    recorded = header()
    recorded = header(engine={**recorded.engine, **engine})
    with pytest.raises(ConfigError, match=message):
        recorded_step_time_model(recorded)


def test_a_run_with_a_draft_model_is_predicted_by_its_own_model_only() -> None:
    """Nothing else knows the time of the draft model's passes."""
    target = draft = describe("bare")
    speculation = SpeculationConfig(num_speculative_tokens=4, runs_model=True)
    description = SpeculativeDescription(target=target, draft=draft).as_json()
    config = make_config(speculation=speculation)
    own = make_header(config, step_time=orjson.loads(orjson.dumps(description)))
    shape = BatchShape(num_draft_passes=4)
    shape.add_verify(100, 4)
    model = recorded_step_time_model(own)
    assert model.step_time(shape) > target.predictor().step_time(shape)
    assert learning_model(own) is not None
    cases: tuple[tuple[RecordHeader, dict[str, Any]], ...] = (
        (own, {"kind": "roofline"}),
        (make_header(config), {}),
    )
    for header, given in cases:
        with pytest.raises(ConfigError, match="step-time model"):
            recorded_step_time_model(header, **given)
