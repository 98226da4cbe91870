"""Step-time models by name.

A description is a model that learns, as plain values: whoever reads them builds the very same one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from onbeat.core.errors import ConfigError
from onbeat.core.hints import likely_meant
from onbeat.perfmodel.device_spec import CPU
from onbeat.perfmodel.engines import find_engine, make_engine_roofline
from onbeat.perfmodel.fitted import FitTarget, FittedModel, make_form
from onbeat.perfmodel.predictor import Predictor, ResidualModel
from onbeat.perfmodel.profile import ServerTerms, check_profile, limited_device, read_profile
from onbeat.perfmodel.recent import DriftAlarm
from onbeat.perfmodel.roofline import Paces, at_paces, make_roofline
from onbeat.perfmodel.shapes import MeasuredStep
from onbeat.perfmodel.speculative import SpeculativeStepTime
from onbeat.typed import convert

ROOFLINE_SIGMA = 0.17
"""Spread of log(measured / predicted) of the roofline from data sheets: a median error of 12 %."""
ENGINE_SIGMA = 0.10
"""The same with an engine's terms, on held-back deployments (docs/maintainers/calibration.md)."""


def make_step_time_model(
    kind: str,
    target: FitTarget,
    *,
    profile: Path | None = None,
    engine: str | None = None,
) -> Predictor:
    """Return a step-time model of a replica by the name of its kind.

    Parameters
    ----------
    kind : one of `STEP_TIME_MODELS`.
    profile : `fitted`: a file that `onbeat profile` wrote; `roofline`: none.
    engine : as `find_engine` takes it; its terms go to the roofline, other kinds measure what they model.

    Returns
    -------
    A predictor that does not learn; `Predictor.with_learning` returns one that does.

    Raises
    ------
    ConfigError : an unknown kind or engine; a profile that is missing, superfluous, unreadable or of
        something else; an engine where the kind takes none.
    """
    require_step_time(kind)
    if engine is not None and kind != "roofline":
        raise ConfigError(
            f"--engine {engine} adds the terms of an engine to the roofline, but the step-time model {kind} "
            "rests on measurements; leave --engine out, or choose --step-time roofline"
        )
    return STEP_TIME_MODELS[kind](target, profile, engine)


def require_step_time(kind: str) -> str:
    """Return the name of a kind as it is.

    Raises
    ------
    ConfigError : there is none of this name; a near match is named.
    """
    if kind not in STEP_TIME_MODELS:
        near = likely_meant(kind, STEP_TIME_MODELS)
        hint = f"did you mean {near}? " if near else ""
        raise ConfigError(
            f"unknown step-time model {kind!r}: {hint}choose one of {', '.join(STEP_TIME_MODELS)}"
        )
    return kind


def by_data_sheet(target: FitTarget) -> Predictor | None:
    """Return step times that are known before anything is measured: they bound the largest step by default.

    None where no data sheet tells them, as of a CPU.
    """
    is_told = target.device.id != CPU and target.precision.compute in target.device.peak_flops
    return roofline_predictor(target) if is_told else None


def roofline_predictor(target: FitTarget, paces: Paces = ()) -> Predictor:
    """Return the predictor of data sheets alone, or of these and how far a few steps were from them."""
    roofline = make_roofline(target)
    if paces:
        roofline = at_paces(roofline, paces)
    return Predictor(roofline, ResidualModel.log_normal(ROOFLINE_SIGMA))


def fitted_predictor(
    fitted: FittedModel, target: FitTarget | None = None, *, server: ServerTerms | None = None
) -> Predictor:
    """Return the predictor of a fit: with the quantiles of its held-back errors, and its range.

    Parameters
    ----------
    target : what was fitted for, unless it was by `nnls`; see `limited_device` where the limits of its device
        were measured.
    server : what the engine does beside its steps; None is nothing.
    """
    return Predictor(
        make_form(fitted.method, target).closure(fitted.parameters),
        ResidualModel(fitted.ratios),
        fitted.shape_range,
        errors=fitted.errors,
        server=server,
        precision=None if target is None else target.precision,
    )


def _roofline(target: FitTarget, profile: Path | None, name: str | None) -> Predictor:
    if profile is not None:
        raise ConfigError(
            f"the roofline takes no profile (got {profile}): leave it out, or choose "
            "--step-time fitted, which calibrates the roofline by it"
        )
    if name is None:
        return roofline_predictor(target)
    engine = find_engine(name)
    return Predictor(
        make_engine_roofline(engine, target),
        ResidualModel.log_normal(ENGINE_SIGMA),
        server=ServerTerms(steps_ahead=engine.steps_ahead, request_seconds=engine.request_seconds),
    )


def _fitted(asked: FitTarget, path: Path | None, _engine: str | None) -> Predictor:
    if path is None:
        raise ConfigError(
            "the step-time model fitted needs a profile: --profile FILE, written by `onbeat profile MODEL`"
        )
    profile = read_profile(path)
    precision, weights = profile.key.precision, asked.precision.weights
    check_profile(
        profile, path, model=asked.model.name, device=asked.device.id, parallelism=asked.parallelism
    )
    if precision.weights != weights:  # all other formats are what it says
        raise ConfigError(
            f"the profile {path} is of {precision.weights} weights, not {weights}. Give --dtype "
            f"{precision.weights}, or name a profile that matches"
        )
    target = replace(asked, device=limited_device(asked.device, profile.limits), precision=precision)
    return fitted_predictor(profile.fitted, target, server=profile.server)


STEP_TIME_MODELS: dict[str, Callable[[FitTarget, Path | None, str | None], Predictor]] = {
    "roofline": _roofline,
    "fitted": _fitted,
}


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
        return fitted_predictor(self.fitted).with_learning(DriftAlarm())


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
