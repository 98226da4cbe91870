"""How much longer or shorter than predicted a virtual step takes."""

from __future__ import annotations

from hashlib import blake2b
from math import exp
from statistics import NormalDist

_NORMAL = NormalDist()
_SCALE = 2.0**-53


class StepNoise:
    """Log-normal factors with mean 1, each a function of (seed, replica, step) alone.

    They do not depend on the order in which they are asked for, so runs are equal whatever is looked at
    ahead, and two policies on one replica meet the same luck in their n-th step.

    Parameters
    ----------
    sigma : standard deviation of the factor's logarithm, above 0.
    seed, replica : whose noise it is.
    """

    def __init__(self, sigma: float, *, seed: int, replica: int) -> None:
        self._sigma = sigma
        self._log_mean = -sigma * sigma / 2
        self._key = f"{seed}:{replica}".encode()

    def factor(self, step: int) -> float:
        """Return what the time of a step is multiplied by.

        Parameters
        ----------
        step : its number on this replica, from 0.
        """
        digest = blake2b(step.to_bytes(8, "little"), digest_size=8, key=self._key).digest()
        # 53 bits, moved off 0 and 1, where the normal distribution has no value.
        uniform = ((int.from_bytes(digest, "little") >> 11) + 0.5) * _SCALE
        return exp(self._log_mean + self._sigma * _NORMAL.inv_cdf(uniform))


def make_noise(sigma: float, *, seed: int, replica: int) -> StepNoise | None:
    """Return the noise of a replica; None where steps take exactly what is predicted."""
    return StepNoise(sigma, seed=seed, replica=replica) if sigma else None
