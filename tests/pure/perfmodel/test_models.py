"""Step-time models by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.perfmodel.device_spec import Parallelism, cpu_device, find_device
from onbeat.perfmodel.fitted import FitTarget, fit
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.models import STEP_TIME_MODELS, by_data_sheet
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.predictor import Predictor, ResidualModel
from onbeat.perfmodel.profile import MachineLimits, Profile, ProfileKey, limited_device, write_profile
from onbeat.perfmodel.shapes import MeasuredStep
from tests.pure.perfmodel.shapes import batch, decodes, mixed_batches
from tests.pure.perfmodel.targets import make_roofline, make_step_time_model

MODEL = find_model_spec("meta-llama/Llama-3.1-8B")
DEVICE = find_device("h100-sxm")
LIMITS = MachineLimits(memory_bandwidth=1e12, peak_flops={"bf16": 3e14})


BF16 = Precision()


def slow_machine(shape: BatchShape, precision: Precision = BF16) -> float:
    """A machine with a third of the data sheet's rates."""
    return make_roofline(MODEL, limited_device(DEVICE, LIMITS), precision=precision)(shape)


def write_fitted(path: Path, precision: Precision = BF16) -> None:
    shapes = mixed_batches(40, seed=21)
    target = FitTarget(model=MODEL, device=limited_device(DEVICE, LIMITS), precision=precision)
    steps = [MeasuredStep(shape, slow_machine(shape, precision)) for shape in shapes]
    fitted = fit(steps, target, "roofline")
    profile = Profile(
        key=ProfileKey(
            model=MODEL.name,
            device=DEVICE.id,
            device_name=DEVICE.name,
            precision=precision,
            parallelism=Parallelism(),
        ),
        onbeat_version="0.1.0",
        created="2026-01-02T03:04:05+00:00",
        steps=steps,
        fitted=fitted,
        limits=LIMITS,
    )
    write_profile(path, profile)


def test_the_table_has_two_kinds() -> None:
    assert list(STEP_TIME_MODELS) == ["roofline", "fitted"]


def test_the_roofline_needs_nothing_and_is_unsure() -> None:
    model = make_step_time_model("roofline", model=MODEL, device=DEVICE)
    shape = decodes(32, 1000)
    assert model.step_time(shape) == make_roofline(MODEL, DEVICE)(shape)
    assert 1.1 < model.step_time(shape, 0.9) / model.step_time(shape) < 1.5


def test_a_fitted_model_predicts_the_machine_of_its_profile(tmp_path: Path) -> None:
    write_fitted(tmp_path / "profile.json")
    model = make_step_time_model("fitted", model=MODEL, device=DEVICE, profile=tmp_path / "profile.json")
    for shape in mixed_batches(20, seed=22):
        inside = model.step_time(shape)
        assert slow_machine(shape) * 0.97 <= inside <= slow_machine(shape) * 1.15
    far = batch([(0, 32_768)])
    assert model.step_time(far) > 1.2 * slow_machine(far)


def test_the_formats_beside_the_weights_are_those_of_the_profile(tmp_path: Path) -> None:
    precision = Precision(weights="int4", kv="fp8", embedding="int4", group=32)
    write_fitted(tmp_path / "profile.json", precision)
    model = make_step_time_model(
        "fitted",
        model=MODEL,
        device=DEVICE,
        precision=Precision(weights="int4"),
        profile=tmp_path / "profile.json",
    )
    shape = decodes(8, 1000)
    assert (model.precision, model.with_learning().precision) == (precision, precision)
    assert model.step_time(shape) == pytest.approx(slow_machine(shape, precision), rel=0.02)
    assert slow_machine(shape, precision) < 0.99 * slow_machine(shape, Precision(weights="int4"))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"model": find_model_spec("Llama-3.1-70B")}, "of model"),
        ({"device": find_device("h200")}, "'h100-sxm', not 'h200'"),
        ({"precision": Precision(weights="fp8")}, "is of bf16 weights, not fp8. Give --dtype bf16"),
        ({"parallelism": Parallelism(tensor=2)}, "of parallelism"),
    ],
)
def test_a_profile_of_something_else_is_refused(
    tmp_path: Path, other: dict[str, object], message: str
) -> None:
    write_fitted(tmp_path / "profile.json")
    wanted = {"model": MODEL, "device": DEVICE, "profile": tmp_path / "profile.json", **other}
    with pytest.raises(ConfigError, match=message):
        make_step_time_model("fitted", **wanted)


def test_only_a_data_sheet_tells_step_times_ahead() -> None:
    target = FitTarget(model=MODEL, device=DEVICE, precision=BF16)
    ahead = by_data_sheet(target)
    assert ahead is not None
    assert ahead.step_time(decodes(32, 1000)) == make_roofline(MODEL, DEVICE)(decodes(32, 1000))
    assert by_data_sheet(replace(target, device=cpu_device(memory_bandwidth=1e11, peak_flops=1e12))) is None
    assert by_data_sheet(replace(target, device=find_device("v100"))) is None


def test_another_kind_in_the_table_is_made_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not come with the package stands beside what does, under the same options."""

    def constant(target: FitTarget, profile: Path | None, _engine: str | None) -> Predictor:
        assert profile is not None
        return Predictor(lambda shape: 0.02 * shape.num_decodes, ResidualModel.log_normal(0.1))

    with pytest.raises(ConfigError, match="roofline, fitted"):
        make_step_time_model("linear", model=MODEL, device=DEVICE)
    monkeypatch.setitem(STEP_TIME_MODELS, "linear", constant)
    model = make_step_time_model("linear", model=MODEL, device=DEVICE, profile=Path("coefficients.json"))
    assert model.step_time(decodes(4, 100)) == pytest.approx(0.08)


def test_a_fit_needs_a_profile() -> None:
    with pytest.raises(ConfigError, match="--profile"):
        make_step_time_model("fitted", model=MODEL, device=DEVICE)


def test_what_cannot_be_made() -> None:
    with pytest.raises(ConfigError, match="'rofline'"):
        make_step_time_model("rofline", model=MODEL, device=DEVICE)
    with pytest.raises(ConfigError, match="no profile"):
        make_step_time_model("roofline", model=MODEL, device=DEVICE, profile=Path("some.json"))
