"""Runs that have lost their objective for certain, however they would go on, need not go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor

from onbeat.core.step import StepStats
from onbeat.metrics.record import RequestRecord
from onbeat.planner.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """So many may miss a limit; with one more, the objective is lost whatever comes."""

    what: str
    """`gaps above 100 ms`"""
    allowed: int
    count: Callable[[Sequence[RequestRecord]], int]
    """How many of some ended requests (or of their gaps) missed it."""


def allowed_above(num_values: int, percentile: float) -> int:
    """Return how many values may lie above a limit before their percentile does for certain.

    Parameters
    ----------
    percentile : in [0, 100], interpolated linearly (`metrics.summary.percentile`).
    """
    return num_values - 1 - floor((num_values - 1) * percentile / 100)


class Hopeless(Exception):
    """Ends a run; carries the verdict."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


class HopelessWatch:
    """An observer that ends a run by raising `Hopeless`.

    Ended requests are counted in batches; since a batch depends on virtual time alone, so does the end.

    Parameters
    ----------
    allowances : what the objective allows.
    num_requests : that were offered.
    """

    wants_every_step = False

    def __init__(self, allowances: Sequence[Allowance], num_requests: int, *, batch: int = 128) -> None:
        self._allowances = allowances
        self._num_requests = num_requests
        self._batch = batch
        self._counts = [0] * len(allowances)
        self._uncounted: list[RequestRecord] = []
        self._num_ended = 0

    def on_request(self, record: RequestRecord) -> None:
        pass

    def on_step(self, replica: int, stats: StepStats) -> None:
        pass

    def on_finish(self, record: RequestRecord) -> None:
        """Count an ended request.

        Raises
        ------
        Hopeless : one that is too many.
        """
        self._uncounted.append(record)
        if len(self._uncounted) < self._batch:
            return
        self._num_ended += len(self._uncounted)
        for index, allowance in enumerate(self._allowances):
            self._counts[index] += allowance.count(self._uncounted)
            if self._counts[index] > allowance.allowed:
                raise Hopeless(self._verdict(allowance, self._counts[index]))
        self._uncounted = []

    def _verdict(self, allowance: Allowance, count: int) -> Verdict:
        reason = (
            f"{count} {allowance.what}, where {allowance.allowed} are allowed, after {self._num_ended} of "
            f"{self._num_requests} requests"
        )
        return Verdict(is_met=False, reason=reason)
