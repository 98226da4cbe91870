"""Fits what was measured by every method there is, and keeps the one that predicts unseen steps best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from onbeat.perfmodel.device_spec import DeviceSpec
from onbeat.perfmodel.fit_errors import FitErrors
from onbeat.perfmodel.fitted import FIT_METHODS, FittedModel, fit, make_form
from onbeat.perfmodel.model_spec import ModelSpec
from onbeat.perfmodel.parallelism import Parallelism
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.profile import MeasuredStep
from onbeat.perfmodel.shapes import shape_matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class FitTarget:
    """What is fitted."""

    model: ModelSpec
    device: DeviceSpec
    precision: Precision
    parallelism: Parallelism = field(default_factory=Parallelism)

    def fit(self, steps: Sequence[MeasuredStep], method: str) -> FittedModel:
        """Fit one method; its errors are of cross-validation.

        Raises
        ------
        ConfigError : too few distinct batches.
        """
        return fit(
            [step.shape for step in steps],
            [step.seconds for step in steps],
            model=self.model,
            device=self.device,
            parallelism=self.parallelism,
            precision=self.precision,
            method=method,
        )

    def predict(self, fitted: FittedModel, steps: Sequence[MeasuredStep]) -> NDArray[np.float64]:
        """Return the predicted seconds of some steps."""
        form = make_form(
            fitted.method,
            model=self.model,
            device=self.device,
            parallelism=self.parallelism,
            precision=self.precision,
        )
        return form.predict(shape_matrix(step.shape for step in steps), fitted.parameters)


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
