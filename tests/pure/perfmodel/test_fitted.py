"""Fits to steps whose true times are known."""

from __future__ import annotations

import math
import random
from dataclasses import asdict

import numpy as np
import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.perfmodel.device_spec import Parallelism, find_device
from onbeat.perfmodel.fitted import (
    FEATURES,
    FIT_METHODS,
    FitErrors,
    FitTarget,
    FittedModel,
    NNLSForm,
    fit,
    make_form,
)
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.models import fitted_predictor
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.roofline import RooflineParameters
from onbeat.perfmodel.shapes import MeasuredStep, shape_matrix
from tests.pure.perfmodel.shapes import batch, decodes, mixed_batches
from tests.pure.perfmodel.targets import make_roofline

MODEL = find_model_spec("meta-llama/Llama-3.1-8B")
DEVICE = find_device("h100-sxm")
SINGLE, BF16 = Parallelism(), Precision()


def fit_here(shapes: list[BatchShape], seconds: list[float], method: str = "roofline") -> FittedModel:
    target = FitTarget(model=MODEL, device=DEVICE, parallelism=SINGLE, precision=BF16)
    return fit([MeasuredStep(*pair) for pair in zip(shapes, seconds, strict=True)], target, method)


def linear(shape: BatchShape) -> float:
    return 4e-3 + 2e-5 * shape.num_new_tokens + 1e-8 * shape.decode_context_tokens + 1e-4 * shape.num_chunks


def test_nnls_finds_a_linear_truth_and_both_evaluations_agree() -> None:
    shapes = mixed_batches(60, seed=3)
    matrix = shape_matrix(shapes)
    parameters = NNLSForm().fit(matrix, np.array([linear(shape) for shape in shapes]))
    closure = NNLSForm().closure(parameters)
    unseen = mixed_batches(40, seed=4)
    assert [closure(shape) for shape in unseen] == pytest.approx(
        [linear(shape) for shape in unseen], rel=1e-4
    )
    assert NNLSForm().predict(shape_matrix(unseen), parameters) == pytest.approx(
        [closure(shape) for shape in unseen]
    )
    assert all(parameters[name] >= 0 for name in FEATURES)


def test_nnls_never_predicts_nothing() -> None:
    """Chunks alone were measured, and their time is proportional to their tokens."""
    shapes = [batch([(0, size)]) for size in (16, 32, 64, 128, 256, 300, 400, 512)]
    parameters = NNLSForm().fit(
        shape_matrix(shapes), np.array([1e-3 * shape.query_key_pairs for shape in shapes])
    )
    assert NNLSForm().closure(parameters)(decodes(1, 1)) > 0


@pytest.mark.parametrize("tensor", [1, 4])
def test_the_roofline_finds_its_own_parameters_again(tensor: int) -> None:
    parallelism = Parallelism(tensor=tensor)
    defaults = asdict(RooflineParameters())
    moved = {
        name: value * (1.3 if index % 2 else 0.8) for index, (name, value) in enumerate(defaults.items())
    }
    truth = make_roofline(
        MODEL, DEVICE, parallelism=parallelism, precision=BF16, parameters=RooflineParameters(**moved)
    )
    shapes = mixed_batches(60, seed=5)
    target = FitTarget(model=MODEL, device=DEVICE, parallelism=parallelism, precision=BF16)
    fitted = fit([MeasuredStep(shape, truth(shape)) for shape in shapes], target, "roofline")
    assert fitted.errors.p50 < 0.01
    assert fitted.errors.p90 < 0.03
    form = make_form("roofline", target)
    closure = form.closure(fitted.parameters)
    unseen = mixed_batches(40, seed=6)
    assert FitErrors.of([closure(s) for s in unseen], [truth(s) for s in unseen]).p90 < 0.03
    assert form.predict(shape_matrix(unseen), fitted.parameters) == pytest.approx(
        [closure(shape) for shape in unseen], rel=1e-6
    )


@pytest.mark.parametrize("method", FIT_METHODS)
def test_the_stated_error_is_that_of_steps_the_fit_has_not_seen(method: str) -> None:
    truth = make_roofline(MODEL, DEVICE, parallelism=SINGLE, precision=BF16)
    rng = random.Random(7)
    shapes = mixed_batches(80, seed=8)
    fitted = fit_here(shapes, [truth(shape) * math.exp(rng.gauss(0, 0.1)) for shape in shapes], method)
    unseen = mixed_batches(200, seed=9)
    noisy = [truth(shape) * math.exp(rng.gauss(0, 0.1)) for shape in unseen]
    predictor = fitted_predictor(
        fitted, FitTarget(model=MODEL, device=DEVICE, parallelism=SINGLE, precision=BF16)
    )
    found = FitErrors.of([predictor.step_time(shape) for shape in unseen], noisy)
    assert fitted.errors.num_points == 80
    assert found.p50 == pytest.approx(fitted.errors.p50, rel=0.5)
    # The 90 % quantile holds for about 90 % of new steps.
    covered = sum(
        seconds <= predictor.step_time(shape, 0.9) for shape, seconds in zip(unseen, noisy, strict=True)
    )
    assert 0.8 <= covered / len(unseen) <= 0.98


def test_repeats_of_a_batch_are_held_back_together() -> None:
    """Else a fit would be tested on what it has seen: here every distinct batch has a time of its own."""
    rng = random.Random(10)
    distinct = mixed_batches(10, seed=11)
    own = [rng.uniform(0.01, 1.0) for _ in distinct]
    fitted = fit_here(distinct * 5, own * 5, "nnls")
    assert fitted.errors.p50 > 0.2


def test_a_fit_is_deterministic() -> None:
    shapes = mixed_batches(20, seed=12)
    seconds = [linear(shape) for shape in shapes]
    assert fit_here(shapes, seconds) == fit_here(shapes, seconds)


def test_measurements_that_cannot_be_fitted() -> None:
    shapes = mixed_batches(20, seed=14)
    with pytest.raises(ConfigError, match="2 distinct"):
        fit_here(shapes[:2] * 10, [1.0] * 20)
    with pytest.raises(ConfigError, match="'forest'"):
        fit_here(shapes, [1.0] * 20, "forest")


@pytest.mark.parametrize("method", FIT_METHODS)
def test_parameters_of_another_form_are_refused(method: str) -> None:
    form = make_form(method, FitTarget(model=MODEL, device=DEVICE, parallelism=SINGLE, precision=BF16))
    with pytest.raises(ConfigError, match=r"`onbeat.*MODEL`"):
        form.closure({**asdict(RooflineParameters()), "speed": 1.0})
