"""Whether a fleet kept the promise of its plan: the share of good requests, with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLOMode
from onbeat.metrics.attainment import judge
from onbeat.metrics.distribution import LEVEL, student_half_width
from onbeat.metrics.measured import MeasuredRequest
from onbeat.metrics.summary import mean_tpot

NUM_BATCHES = 10
LEAST_REQUESTS = 50
"""Fewer say nothing of a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPromise:
    """What a run says of a promise."""

    promised: float
    """Share of the requests that must be good."""
    share: float
    low: float
    high: float
    """Ends of the interval of the share, by Student's t over batches of neighbouring requests: a queue makes
    neighbours late together, so that single requests would feign too sure an answer."""
    num_requests: int

    @property
    def is_kept(self) -> bool:
        return self.share >= self.promised

    @property
    def is_certain(self) -> bool:
        """Whether the whole interval says the same."""
        return self.low >= self.promised or self.high < self.promised

    def __str__(self) -> str:
        points = (self.share - self.promised) * 100
        verdict = "kept" if self.is_kept else "broken"
        doubt = "" if self.is_certain else ", which is within the interval: a longer run would tell"
        return (
            f"promise {verdict} by {abs(points):.1f} points{doubt}: {self.share * 100:.1f} % of "
            f"{self.num_requests:,} requests were good ({self.low * 100:.1f} to {self.high * 100:.1f} at "
            f"{LEVEL * 100:g} %), {self.promised * 100:g} % promised"
        )


def compare_pace(requests: Sequence[MeasuredRequest], planned: float) -> str:
    """Say how long the tokens of a run took beside those of the plan's simulations: what a plan gets wrong.

    Parameters
    ----------
    planned : mean TPOT, seconds.
    """
    measured = mean_tpot(requests)
    if measured is None:
        return "no request had two tokens, so nothing tells how long steps took"
    return (
        f"mean TPOT {measured * 1e3:.2f} ms, {planned * 1e3:.2f} ms in the plan's simulations "
        f"({(measured / planned - 1) * 100:+.0f} %)"
    )


def refuse_too_few(num_requests: int, promised: float) -> None:
    """Raise ConfigError if a share of so many requests says nothing."""
    if num_requests < LEAST_REQUESTS:
        raise ConfigError(
            f"{num_requests} requests with objectives are too few to judge a share of "
            f"{promised * 100:g} %; send {LEAST_REQUESTS} or more (--num-prompts)"
        )


def check_promise(
    requests: Sequence[MeasuredRequest], *, promised: float, mode: SLOMode = "stream"
) -> KeptPromise:
    """Judge the requests of a run, in the order in which they were sent.

    Raises
    ------
    ConfigError : too few of them have objectives.
    """
    judged = judge(requests, mode=mode)
    refuse_too_few(len(judged.requests), promised)
    share = float(judged.good.mean())
    means = np.array([batch.mean() for batch in np.array_split(judged.good, NUM_BATCHES)])
    half = student_half_width(means)
    return KeptPromise(
        promised=promised,
        share=share,
        low=max(0.0, share - half),
        high=min(1.0, share + half),
        num_requests=len(judged.requests),
    )
