"""Measures many batches against noise: interleaved rounds in random order, and the median of each batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from onbeat.engine.profiling.batches import MeasuredBatch
from onbeat.perfmodel.shapes import MeasuredStep

MIN_RUNS = 3
"""Runs that even a long batch gets where time allows: the median of fewer follows every disturbance."""
_COSTLY_SHARE = 3.0
"""A batch that took this many times its share of the budget waits until all others have had more runs."""

OnRun = Callable[[float], None]
"""Hears after each run which share of the campaign is done, in [0, 1]."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """How long to measure.

    Parameters
    ----------
    seconds : the budget; measuring ends with the first run beyond it. Batches that had no run by then are
        left out.
    max_rounds : runs of each batch at most.
    """

    seconds: float
    max_rounds: int = 15
    seed: int = 0

    def measure(
        self,
        run: Callable[[MeasuredBatch], float],
        batches: Sequence[MeasuredBatch],
        on_run: OnRun = lambda _: None,
    ) -> list[MeasuredStep | None]:
        """Return the median time of each batch, in their order; None where the time did not suffice.

        Every round goes through the batches in another order, so that neither the batch before nor a slow
        minute of the machine is always the same batch's lot.
        """
        rng = np.random.default_rng(self.seed)
        times: list[list[float]] = [[] for _ in batches]
        start = time.perf_counter()
        fair_share = self.seconds / max(len(batches), 1)
        for round_index in range(self.max_rounds):
            for index in rng.permutation(len(batches)).tolist():
                if round_index >= MIN_RUNS and sum(times[index]) > _COSTLY_SHARE * fair_share:
                    continue
                elapsed = time.perf_counter() - start
                if elapsed >= self.seconds:
                    return _medians(batches, times)
                times[index].append(run(batches[index]))
                by_time = elapsed / self.seconds
                by_rounds = round_index / self.max_rounds
                on_run(min(max(by_time, by_rounds), 1.0))
        return _medians(batches, times)


def _medians(batches: Sequence[MeasuredBatch], times: list[list[float]]) -> list[MeasuredStep | None]:
    return [
        MeasuredStep(batch.shape, median(runs)) if runs else None
        for batch, runs in zip(batches, times, strict=True)
    ]
