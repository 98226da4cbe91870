"""What the search asks of an objective, and what it answers: each measure beside its limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor, inf
from typing import Literal, Protocol

from onbeat.metrics.record import RequestRecord
from onbeat.simulator.result import SimulationResult
from onbeat.workload.offered import OfferedLoad

Unit = Literal["s", "share"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One number that an objective limits: seconds from above, a share from below."""

    name: str
    value: float
    limit: float
    unit: Unit = "s"
    is_strict: bool = False
    """Whether the limit itself already misses it."""
    detail: str = ""
    """More numbers that explain it."""
    binds: str = ""
    """Of a share: what most of the others miss, in words."""

    @property
    def is_met(self) -> bool:
        if self.unit == "share":
            return self.value >= self.limit
        return self.value < self.limit if self.is_strict else self.value <= self.limit

    @property
    def pressure(self) -> float:
        """How near the limit is: above 1 it is missed. Shares count what is missed, not what is kept."""
        value, limit = (self.value, self.limit) if self.unit == "s" else (1 - self.value, 1 - self.limit)
        return value / limit if limit > 0 else (inf if value > 0 else 0.0)

    def __str__(self) -> str:
        sign = (
            (">=" if self.unit == "share" else "<") if self.is_met else ("<" if self.unit == "share" else ">")
        )
        text = f"{self.name} {self._format(self.value)} {sign} {self._format(self.limit)}"
        return f"{text} ({self.detail})" if self.detail else text

    def _format(self, value: float) -> str:
        if self.unit == "share":
            return f"{value * 100:.2f} %"
        return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.3f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a run kept an objective, and why or why not."""

    is_met: bool
    reason: str
    """The measure that binds most, with its numbers."""
    measures: tuple[Measure, ...] = ()
    beyond: str = ""
    """See `SimulationResult.beyond`."""


def verdict_of(measures: tuple[Measure, ...]) -> Verdict:
    """Return the verdict that some measures make up: all must be met; the tightest is the reason."""
    missed = [measure for measure in measures if not measure.is_met]
    limiting = max(missed or measures, key=lambda measure: measure.pressure)
    return Verdict(is_met=not missed, reason=str(limiting), measures=measures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """So many may miss a limit; with one more, the objective is missed whatever comes."""

    what: str
    """`gaps above 100 ms`"""
    allowed: int
    count: Callable[[Sequence[RequestRecord]], int]
    """How many of some ended requests (or of their gaps) missed it."""
    is_lost: Callable[[RequestRecord, float], bool] = lambda _record, _now: False
    """Whether a request that has not ended is certain to miss it, at a time in the run."""


def allowed_above(num_values: int, percentile: float) -> int:
    """Return how many values may lie above a limit before their percentile does for certain.

    Parameters
    ----------
    percentile : in [0, 100], interpolated linearly (`metrics.distribution.percentile`).
    """
    return num_values - 1 - floor((num_values - 1) * percentile / 100)


class Objective(Protocol):
    """Judges a finished run."""

    @property
    def name(self) -> str:
        """As the command line spells it."""
        ...

    def judge(self, result: SimulationResult) -> Verdict:
        """Say whether the run kept the objective; one that was not finished did not."""
        ...

    def allowances(self, load: OfferedLoad) -> tuple[Allowance, ...]:
        """Return what the objective allows of a run of this load; beyond that it is missed for certain.

        Raises
        ------
        ConfigError : it cannot judge this load.
        """
        ...


def unfinished(result: SimulationResult) -> Verdict | None:
    """Return the verdict on a run that did not come to its end; None for one that did."""
    if result.is_complete and len(result.records) == result.num_requests:
        return None
    num_ended = len(result.records)
    return Verdict(
        is_met=False, reason=f"the run was not finished: {num_ended} of {result.num_requests} requests ended"
    )
