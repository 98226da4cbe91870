"""A step-time model of recorded steps, and how far it is off on steps that it was not fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.perfmodel.fitted import MIN_DISTINCT_SHAPES, FitErrors, FitTarget, FittedModel, fit_best
from onbeat.perfmodel.shape_range import ShapeRange
from onbeat.perfmodel.shapes import MeasuredStep

KINDS = ("decode", "prompt", "mixed")
_NUM_BLOCKS = 50
_HELD_BACK_EVERY = 5
_MOST_OF_A_KIND = 800
"""Steps of a kind that are fitted: further ones would say the same, and take minutes."""
_EXCEPTION = 3.0
"""A step that takes so many times longer, or shorter, than is usual for its batch was something else, too:
a compilation, another program."""


@dataclass(frozen=True, slots=True)
class KindErrors:
    """How far predictions of one kind of step are off."""

    kind: str
    num_steps: int
    p50: float
    """Of the absolute relative errors, as are the next."""
    p90: float
    bias: float
    """Relative error of all predicted times together: above 0, steps are predicted too long."""


@dataclass(frozen=True, slots=True)
class StreamFit:
    """What a fit to recorded steps found."""

    fitted: FittedModel
    steps: Sequence[MeasuredStep]
    """That it was fitted to, and those that it was tested on."""
    errors: Sequence[KindErrors]
    """On steps that were held back."""
    num_exceptions: int
    """Steps that were left out of the fit, since they took far longer or shorter than others like them."""


def fit_stream(target: FitTarget, steps: Sequence[MeasuredStep]) -> StreamFit:
    """Fit a step-time model to the steps of a running engine.

    Every fifth of 50 stretches of the recording is held back: steps that follow one another are alike, so
    single ones would not test much.

    Raises
    ------
    ConfigError : too few steps that differ.
    """
    block = max(1, len(steps) // _NUM_BLOCKS)
    is_held = [index // block % _HELD_BACK_EVERY == _HELD_BACK_EVERY // 2 for index in range(len(steps))]
    held_back = [step for step, is_out in zip(steps, is_held, strict=True) if is_out]
    to_fit = _thinned([step for step, is_out in zip(steps, is_held, strict=True) if not is_out])
    if len({_key(step.shape) for step in to_fit}) < MIN_DISTINCT_SHAPES or not held_back:
        raise ConfigError(
            f"the recording has {len(steps)} steps, too few that differ for a fit; record some minutes of "
            "traffic with prompts and answers of several lengths"
        )
    first = fit_best(target, to_fit)
    ratios = np.array([step.seconds for step in to_fit]) / target.predict(first, to_fit)
    usual = [step for step, ratio in zip(to_fit, ratios, strict=True) if 1 / _EXCEPTION < ratio < _EXCEPTION]
    num_exceptions = len(to_fit) - len(usual)
    if num_exceptions:
        first = fit_best(target, usual)
    measured = np.array([step.seconds for step in held_back])
    predicted = target.predict(first, held_back)
    fitted = replace(
        first,
        errors=FitErrors.of(predicted, measured),
        ratios=tuple(sorted(float(ratio) for ratio in measured / predicted)),
        shape_range=ShapeRange.of([step.shape for step in usual]),
    )
    kept = _thinned(held_back)
    return StreamFit(fitted, (*usual, *kept), errors_by_kind(held_back, predicted.tolist()), num_exceptions)


def errors_by_kind(steps: Sequence[MeasuredStep], predicted: Sequence[float]) -> list[KindErrors]:
    """Compare predictions with measurements, one to one, by kind of step and all together."""
    found = []
    measured, told = np.array([step.seconds for step in steps]), np.array(predicted)
    kinds = np.array([kind_of(step.shape) for step in steps])
    for kind in (*KINDS, "all"):
        of_kind = kinds == kind if kind != "all" else np.ones(len(steps), dtype=bool)
        if not of_kind.any():
            continue
        errors = FitErrors.of(told[of_kind], measured[of_kind])
        bias = float(told[of_kind].sum() / measured[of_kind].sum() - 1)
        found.append(KindErrors(kind, errors.num_points, errors.p50, errors.p90, bias))
    return found


def kind_of(shape: BatchShape) -> str:
    """Return which of `KINDS` a step is."""
    if not shape.num_chunks:
        return "decode"
    return "mixed" if shape.num_decodes else "prompt"


def _thinned(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Return at most so many steps of each kind, evenly over the recording."""
    kept = []
    for kind in KINDS:
        of_kind = [step for step in steps if kind_of(step.shape) == kind]
        stride = max(1.0, len(of_kind) / _MOST_OF_A_KIND)
        kept += [of_kind[int(index * stride)] for index in range(min(len(of_kind), _MOST_OF_A_KIND))]
    return kept


def _key(shape: BatchShape) -> tuple[int, ...]:
    return (shape.num_new_tokens, shape.num_decodes, shape.query_key_pairs, shape.decode_context_tokens)
