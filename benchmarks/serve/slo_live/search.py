"""Where attainment crosses a level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Point:
    """One run: its rate, and how many of its requests were good."""

    round: int
    rate: float
    num_offered: int
    num_good: int

    @property
    def attainment(self) -> float:
        return self.num_good / self.num_offered


@dataclass(frozen=True)
class Capacity:
    """The rate at which attainment crosses the level."""

    rate: float
    bound: str = ""
    """`at least` or `at most` where no run lay on the other side of the level."""

    def __str__(self) -> str:
        return f"{self.bound} {self.rate:.2f}".strip()


def crossing(points: Sequence[Point], *, level: float) -> Capacity:
    """Return where attainment crosses the level, linear between the rates that were run.

    Runs of one rate are pooled. Where chance makes attainment rise with the rate, neighbouring rates are
    pooled too until it falls (isotonic regression), each at the mean of its rates.

    References
    ----------
    Ayer et al., "An Empirical Distribution Function for Sampling with Incomplete Information", 1955 (pooling
    of adjacent violators).
    """
    if not points:
        raise ValueError("no runs, no crossing")
    blocks = _falling([_Block.of(rate, points) for rate in sorted({point.rate for point in points})])
    if blocks[0].attainment < level:
        return Capacity(blocks[0].rate, "at most")
    for below, above in pairwise(blocks):
        if above.attainment < level:
            share = (below.attainment - level) / (below.attainment - above.attainment)
            return Capacity(below.rate * (above.rate / below.rate) ** share)
    return Capacity(blocks[-1].rate, "at least")


def without_each_round(points: Sequence[Point], *, level: float) -> list[Capacity]:
    """Return the crossings of the runs with one round left out at a time: how far chance moves it."""
    rounds = sorted({point.round for point in points})
    if len(rounds) < 2:
        return []
    return [crossing([point for point in points if point.round != left], level=level) for left in rounds]


@dataclass(frozen=True)
class _Block:
    num_offered: int
    num_good: int
    log_rate: float
    """Sum over requests of the logarithm of their rate."""

    @classmethod
    def of(cls, rate: float, points: Sequence[Point]) -> _Block:
        own = [point for point in points if point.rate == rate]
        offered = sum(point.num_offered for point in own)
        return cls(offered, sum(point.num_good for point in own), offered * math.log(rate))

    @property
    def attainment(self) -> float:
        return self.num_good / self.num_offered

    @property
    def rate(self) -> float:
        return math.exp(self.log_rate / self.num_offered)

    def __add__(self, other: _Block) -> _Block:
        return _Block(
            self.num_offered + other.num_offered,
            self.num_good + other.num_good,
            self.log_rate + other.log_rate,
        )


def _falling(blocks: list[_Block]) -> list[_Block]:
    merged: list[_Block] = []
    for block in blocks:
        merged.append(block)
        while len(merged) > 1 and merged[-1].attainment > merged[-2].attainment:
            last = merged.pop()
            merged[-1] = merged[-1] + last
    return merged


def ramp_crossing(
    good: NDArray[np.bool_], *, start_rate: float, end_rate: float, level: float, window: int = 25
) -> float:
    """Return about the rate at which the requests of a growing load cease to keep the level.

    Parameters
    ----------
    good : by arrival.
    start_rate, end_rate : of a linear ramp.
    window : requests whose share of good ones is held against the level.
    """
    num_requests = len(good)
    window = min(window, num_requests)
    shares = np.convolve(good, np.full(window, 1 / window), mode="valid")
    failing = np.flatnonzero(shares < level)
    # The window that fails first has just taken in the last bad request that it may not have.
    last = int(failing[0]) + round(level * window) if failing.size else num_requests
    return start_rate + (end_rate - start_rate) * last / num_requests
