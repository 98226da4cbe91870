"""Calibrate the roofline: its few parameters, so that it meets measured steps.

Damped Gauss-Newton on the log of predicted / measured. A weak prior keeps a parameter at its default where
nothing was measured that depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.perfmodel.device_spec import DeviceSpec
from onbeat.perfmodel.model_sizes import ModelSpec
from onbeat.perfmodel.parallelism import Parallelism
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.roofline import RooflineParameters, default_parameters, make_roofline, roofline_seconds

PRIOR_WEIGHT = 0.05
"""Cost of a parameter at e times its default, as a relative error of one measured step."""

OUTLIER = 0.1
"""Relative error from which on a step is rather an exception than evidence."""

_LOG_LIMIT = float(np.log(30.0))


class RooflineForm:
    """The roofline as `fitted.Form`."""

    def __init__(
        self, model: ModelSpec, device: DeviceSpec, parallelism: Parallelism, precision: Precision
    ) -> None:
        self._model = model
        self._device = device
        self._parallelism = parallelism
        self._precision = precision

    def fit(self, matrix: NDArray[np.float64], seconds: NDArray[np.float64]) -> dict[str, float]:
        """Return the calibrated fields of `RooflineParameters`."""
        from scipy.optimize import least_squares  # slow to import, and few commands fit

        defaults = asdict(default_parameters(self._device))
        names = list(defaults)
        start = np.array([defaults[name] for name in names])
        target = np.log(seconds)

        def residuals(log_factors: NDArray[np.float64]) -> NDArray[np.float64]:
            parameters = dict(zip(names, start * np.exp(log_factors), strict=True))
            error = np.log(self.predict(matrix, parameters)) - target
            return np.concatenate([error, PRIOR_WEIGHT * log_factors])

        # Errors beyond OUTLIER count linearly: a machine that does other work now and then stalls a step.
        found = least_squares(
            residuals,
            np.zeros(len(names)),
            bounds=(-_LOG_LIMIT, _LOG_LIMIT),
            loss="soft_l1",
            f_scale=OUTLIER,
        )
        return {name: float(value) for name, value in zip(names, start * np.exp(found.x), strict=True)}

    def predict(self, matrix: NDArray[np.float64], parameters: Mapping[str, float]) -> NDArray[np.float64]:
        """Return seconds for the rows of a shape matrix."""
        return roofline_seconds(
            matrix,
            self._model,
            self._device,
            parallelism=self._parallelism,
            precision=self._precision,
            parameters=_parameters(parameters),
        )

    def closure(self, parameters: Mapping[str, float]) -> Callable[[BatchShape], float]:
        """Return the roofline with these parameters."""
        return make_roofline(
            self._model,
            self._device,
            parallelism=self._parallelism,
            precision=self._precision,
            parameters=_parameters(parameters),
        )


def _parameters(values: Mapping[str, float]) -> RooflineParameters:
    known = {field.name for field in fields(RooflineParameters)}
    if values.keys() != known:
        unlike = ", ".join(sorted(values.keys() ^ known))
        raise ConfigError(
            f"the fitted parameters are not those of this onbeat's roofline; they differ in {unlike}: run "
            "`onbeat profile MODEL` again"
        )
    return RooflineParameters(**values)
