"""Fits what was measured by every method there is, and keeps the one that predicts unseen steps best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onbeat.perfmodel.fit_errors import FitErrors
from onbeat.perfmodel.fitted import FIT_METHODS, FitTarget, FittedModel
from onbeat.perfmodel.profile import MeasuredStep


def fit_best(
    target: FitTarget, steps: Sequence[MeasuredStep], held_back: Sequence[MeasuredStep] = ()
) -> FittedModel:
    """Fit by every method; the least mean error in cross-validation on `steps` decides.

    Parameters
    ----------
    steps : what is fitted.
    held_back : steps that no decision has seen; where there are some, `errors` of the result is of them.

    Raises
    ------
    ConfigError : too few distinct batches.
    """
    best = min((target.fit(steps, method) for method in FIT_METHODS), key=lambda fitted: fitted.errors.mean)
    if not held_back:
        return best
    errors = FitErrors.of(target.predict(best, held_back), [step.seconds for step in held_back])
    return replace(best, errors=errors)
