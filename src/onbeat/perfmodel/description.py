"""A step-time model that learns, as plain values: whoever reads them builds the very same one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from onbeat.core.errors import ConfigError
from onbeat.files import check_numbers
from onbeat.perfmodel.correction import DriftAlarm
from onbeat.perfmodel.device_spec import DeviceSpec
from onbeat.perfmodel.fit_errors import FitErrors
from onbeat.perfmodel.fitted import FitTarget, FittedModel
from onbeat.perfmodel.model_sizes import ModelSpec
from onbeat.perfmodel.models import fitted_predictor, roofline_predictor
from onbeat.perfmodel.nnls import NNLSForm
from onbeat.perfmodel.parallelism import Parallelism
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.predictor import Predictor
from onbeat.perfmodel.profile import MeasuredStep
from onbeat.perfmodel.residual import ResidualModel
from onbeat.perfmodel.roofline import Paces
from onbeat.perfmodel.shape_range import ShapeRange
from onbeat.perfmodel.speculative import SpeculativeStepTime

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeDescription(FitTarget):
    """What a live engine predicts its steps with; its device has the measured limits where there are some."""

    fitted: FittedModel | None = None
    """None is the roofline alone."""
    paces: Paces = ()
    """What few steps took that were timed before the first one, over the roofline."""

    def predictor(self) -> Predictor:
        """Return the model as it is before its first step: it learns from each one that it is told of."""
        if self.fitted is None:
            return roofline_predictor(self, self.paces).with_learning(DriftAlarm())
        return fitted_predictor(self.fitted, self).with_learning(DriftAlarm())

    def corrected(self, steps: Sequence[MeasuredStep]) -> StepTimeDescription:
        """Return the roofline that meets these steps, which rise by their tokens."""
        time = roofline_predictor(self).step_time
        paces = tuple((step.shape.num_new_tokens, step.seconds / time(step.shape)) for step in steps)
        return replace(self, paces=paces)

    def as_json(self) -> dict[str, Any]:
        """Return plain values, numbers in full."""
        fitted = self.fitted
        return {
            "model": _values(self.model),
            "device": _values(self.device),
            "parallelism": _values(self.parallelism),
            "precision": _values(self.precision),
            "fitted": None if fitted is None else _fitted_values(fitted),
            "paces": [list(pace) for pace in self.paces],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeDescription:
    """What a live engine with a draft model predicts its steps with."""

    target: StepTimeDescription
    draft: StepTimeDescription

    def predictor(self) -> SpeculativeStepTime:
        """Return the model as it is before its first step: it learns from each one that it is told of."""
        return SpeculativeStepTime(self.target.predictor(), self.draft.predictor())

    def as_json(self) -> dict[str, Any]:
        """Return plain values, numbers in full."""
        return {"target": self.target.as_json(), "draft": self.draft.as_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDescription:
    """What predicts the steps of an engine of which only its steps are known, such as vLLM."""

    fitted: FittedModel
    """By `nnls`, which needs neither model nor device."""

    def predictor(self) -> Predictor:
        """Return the model as it is before its first step: it learns from each one that it is told of."""
        fitted = self.fitted
        plain = Predictor(
            NNLSForm().closure(fitted.parameters),
            ResidualModel(fitted.ratios),
            fitted.shape_range,
            errors=fitted.errors,
        )
        return plain.with_learning(DriftAlarm())

    def as_json(self) -> dict[str, Any]:
        """Return plain values, numbers in full."""
        return {"fitted": _fitted_values(self.fitted)}


AnyDescription = StepTimeDescription | SpeculativeDescription | MeasuredDescription


def description_from_json(values: Mapping[str, Any]) -> AnyDescription:
    """Return what `as_json` of either kind described.

    Raises
    ------
    ConfigError : a value is missing or damaged, or this version knows none of the kind.
    """
    check_numbers(values, "the description of a step-time model")
    try:
        if "target" in values:
            target, draft = _single(values["target"]), _single(values["draft"])
            return SpeculativeDescription(target=target, draft=draft)
        if "model" not in values:
            return MeasuredDescription(fitted=_fitted(values["fitted"]))
        return _single(values)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"the step-time model was described by another version of onbeat ({error}); use that version"
        ) from error


def _single(values: Mapping[str, Any]) -> StepTimeDescription:
    fitted = values["fitted"]
    return StepTimeDescription(
        model=_build(ModelSpec, values["model"]),
        device=_device(values["device"]),
        parallelism=_build(Parallelism, values["parallelism"]),
        precision=_build(Precision, values["precision"]),
        fitted=None if fitted is None else _fitted(fitted),
        paces=tuple((int(tokens), float(pace)) for tokens, pace in values.get("paces", ())),
    )


def _device(values: Mapping[str, Any]) -> DeviceSpec:
    rates = tuple((int(rows), float(rate)) for rows, rate in values.get("product_rates", ()))
    return _build(DeviceSpec, {**values, "product_rates": rates})


def _fitted(values: Mapping[str, Any]) -> FittedModel:
    return FittedModel(
        method=values["method"],
        parameters=values["parameters"],
        errors=_build(FitErrors, values["errors"]),
        ratios=tuple(values["ratios"]),
        shape_range=_build(ShapeRange, values["shape_range"]),
    )


def _fitted_values(fitted: FittedModel) -> dict[str, Any]:
    return _values(fitted) | {
        "errors": _values(fitted.errors),
        "ratios": list(fitted.ratios),
        "shape_range": _values(fitted.shape_range),
    }


def _values(item: Any) -> dict[str, Any]:
    """Return a dataclass's fields; mappings become dicts (read-only ones cannot be written as JSON)."""
    found = {field.name: getattr(item, field.name) for field in fields(item)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in found.items()}


def _build(kind: type[T], values: Mapping[str, Any]) -> T:
    return kind(**values)
