"""A step-time model that learns, as plain values: whoever reads them builds the very same one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from onbeat.perfmodel.correction import DriftAlarm
from onbeat.perfmodel.fitted import FitTarget, FittedModel, NNLSForm
from onbeat.perfmodel.models import fitted_predictor, roofline_predictor
from onbeat.perfmodel.predictor import Predictor
from onbeat.perfmodel.residual import ResidualModel
from onbeat.perfmodel.roofline import Paces
from onbeat.perfmodel.shapes import MeasuredStep
from onbeat.perfmodel.speculative import SpeculativeStepTime
from onbeat.typed import convert


def _plain(description: Any) -> dict[str, Any]:
    """Return plain values, numbers in full."""
    values: dict[str, Any] = msgspec.to_builtins(description, enc_hook=dict)
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeDescription(FitTarget):
    """What a live engine predicts its steps with; its device has the measured limits where there are some."""

    fitted: FittedModel | None = None
    """None is the roofline alone."""
    paces: Paces = ()
    """What few steps took that were timed before the first one, over the roofline."""

    as_json = _plain

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeDescription:
    """What a live engine with a draft model predicts its steps with."""

    target: StepTimeDescription
    draft: StepTimeDescription

    as_json = _plain

    def predictor(self) -> SpeculativeStepTime:
        """Return the model as it is before its first step: it learns from each one that it is told of."""
        return SpeculativeStepTime(self.target.predictor(), self.draft.predictor())


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDescription:
    """What predicts the steps of an engine of which only its steps are known, such as vLLM."""

    fitted: FittedModel
    """By `nnls`, which needs neither model nor device."""

    as_json = _plain

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


AnyDescription = StepTimeDescription | SpeculativeDescription | MeasuredDescription


def description_from_json(values: Mapping[str, Any]) -> AnyDescription:
    """Return what `as_json` of any kind described.

    Raises
    ------
    ConfigError : a value is missing or damaged, or this version knows none of the kind.
    """
    kind: type[AnyDescription] = MeasuredDescription
    if "target" in values:
        kind = SpeculativeDescription
    elif "model" in values:
        kind = StepTimeDescription
    where = "the description of a step-time model"
    return convert(kind, dict(values), where, hint="; use the version of onbeat that described it")
