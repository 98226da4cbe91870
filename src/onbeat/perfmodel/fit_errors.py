"""How wrong predictions are, in the measures that the field quotes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from onbeat.typed import Count, NotNegative


@dataclass(frozen=True, slots=True)
class FitErrors:
    """Absolute relative errors, as fractions of the measured time."""

    mean: NotNegative
    p50: NotNegative
    p90: NotNegative
    p95: NotNegative
    num_points: Count

    @classmethod
    def of(cls, predicted: ArrayLike, measured: ArrayLike) -> FitErrors:
        """Compare predictions with measurements, one to one; at least one."""
        errors = np.abs(np.asarray(predicted, dtype=float) / np.asarray(measured, dtype=float) - 1)
        p50, p90, p95 = (float(value) for value in np.percentile(errors, (50, 90, 95)))
        return cls(mean=float(errors.mean()), p50=p50, p90=p90, p95=p95, num_points=int(errors.size))

    def __str__(self) -> str:
        return (
            f"mean {self.mean:.1%}, p50 {self.p50:.1%}, p90 {self.p90:.1%}, p95 {self.p95:.1%} "
            f"on {self.num_points} held-back points"
        )
