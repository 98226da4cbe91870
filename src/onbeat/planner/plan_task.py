"""What is planned, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from onbeat.core.errors import OnbeatError
from onbeat.core.fleet import PoolSizes
from onbeat.metrics.distribution import student_half_width
from onbeat.planner.fleets import FleetCase, FleetRun
from onbeat.planner.objectives import ShareObjective
from onbeat.planner.search import Bracket, rate_interval
from onbeat.planner.units import Bucket, RatedUnit, Unit
from onbeat.workload.offered import OfferedLoad


class PlanInterrupted(OnbeatError):
    """Ctrl-C came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTask:
    """What is to be planned.

    Parameters
    ----------
    rate : requests per second that are promised.
    load : all requests that are known, for their sizes.
    runs : the requests of each simulated run, at the rate that is needed.
    available : (device, how many there are).
    most_candidates : mixes that are simulated at most.
    headroom : what the fleet must keep up beyond the promised rate, as a share of it.
    """

    rate: float
    objective: ShareObjective
    load: OfferedLoad
    runs: tuple[OfferedLoad, ...]
    available: tuple[tuple[str, float], ...]
    most_candidates: int = 16
    headroom: float = 0.0

    @property
    def needed_rate(self) -> float:
        """Requests per second that the fleet must keep up."""
        return self.rate * (1 + self.headroom)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFleet:
    """How many of each unit, with what simulated runs of the whole showed."""

    parts: tuple[tuple[Unit, int], ...]
    runs: tuple[FleetRun, ...]
    pools: PoolSizes | None = None
    """See `FleetCase`."""
    capacities: tuple[Bracket, ...] = ()
    """A search for each run; empty where none was made."""

    @property
    def name(self) -> str:
        if self.pools is not None:
            ((unit, _),) = self.parts
            prompts, tokens = unit.times(self.pools.prefill), unit.times(self.pools.decode)
            return f"{prompts} for prompts + {tokens} for generation"
        return " + ".join(unit.times(count) for unit, count in self.parts)

    @property
    def case(self) -> FleetCase:
        """What is simulated."""
        return FleetCase(parts=self.parts, pools=self.pools)

    @property
    def usd_per_hour(self) -> float:
        return sum(unit.usd_per_hour * count for unit, count in self.parts)

    @property
    def watts(self) -> float:
        return sum(unit.watts * count for unit, count in self.parts)

    @property
    def num_replicas(self) -> int:
        return sum(count for _, count in self.parts)

    @property
    def devices(self) -> tuple[str, ...]:
        """Types, each once."""
        return tuple(dict.fromkeys(unit.device for unit, _ in self.parts))

    @property
    def is_kept(self) -> bool:
        """Whether every run kept the promise."""
        return all(run.is_met for run in self.runs)

    @property
    def reason(self) -> str:
        """Of the run that missed, else of the one that was nearest to it."""
        return min(self.runs, key=lambda run: (run.is_met, run.attainment or 0.0)).reason

    @property
    def attainment(self) -> tuple[float, float, float] | None:
        """Mean share of good requests and its interval; None where a run was not finished."""
        shares = [run.attainment for run in self.runs if run.attainment is not None]
        return interval_of(shares) if len(shares) == len(self.runs) else None

    @property
    def capacity(self) -> tuple[float, float, float] | None:
        """Mean highest rate and its interval, requests/s; None where it was not searched."""
        if not self.capacities:
            return None
        rate, (low, high) = rate_interval(self.capacities)
        return rate, low, high

    @property
    def binds(self) -> str:
        """What a little more load would miss."""
        found = [each.limit.binds for each in self.capacities], [run.binds for run in self.runs]
        names = next(filter(None, ([name for name in each if name] for each in found)), [])
        return max(sorted(set(names)), key=names.count) if names else ""

    @property
    def mean_tpot(self) -> float | None:
        """Of the requests of all runs, seconds; None where a run does not know it."""
        found = [run.mean_tpot for run in self.runs if run.mean_tpot is not None]
        return float(np.mean(found)) if found and len(found) == len(self.runs) else None

    @property
    def by_class(self) -> dict[str, float]:
        """Share of good requests of each class of objectives: the mean over the finished runs."""
        return _means([run.by_class for run in self.runs])

    @property
    def busy(self) -> dict[str, float]:
        """Share of the time in which replicas computed, by unit: the mean over the finished runs."""
        return _means([run.busy for run in self.runs])


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """What was found."""

    best: PlannedFleet | None
    """The cheapest that keeps the promise; None where none does."""
    alternatives: tuple[PlannedFleet, ...]
    """Others that keep it, by cost."""
    failed: tuple[PlannedFleet, ...]
    """Those that were simulated and do not, by cost."""
    units: tuple[RatedUnit, ...]
    """With their calibrated rates."""
    buckets: tuple[Bucket, ...]
    pools: Mapping[str, PoolSizes] = field(default_factory=dict)
    """By the name of the unit, how many replicas for prompts and for generation would do, by arithmetic."""
    left_out: dict[str, str]
    """Units that take no part, and why."""
    cost_bound: float
    """By the estimates, no mix costs less, dollars an hour."""
    is_exhausted: bool
    """Whether no cheaper mix was left to try."""
    infeasible: str = ""
    """What binds, where nothing keeps the promise."""
    nearest: tuple[str, ...] = ()
    """Promises that could be kept instead, as flags."""

    @property
    def kept(self) -> list[PlannedFleet]:
        """The fleets that keep the promise, the best one first."""
        return [] if self.best is None else [self.best, *self.alternatives]


def _means(runs: Sequence[Mapping[str, float] | None]) -> dict[str, float]:
    """Return the mean of each number over the runs that have it, by name."""
    found = [run for run in runs if run]
    names = dict.fromkeys(name for run in found for name in run)
    return {name: float(np.mean([run[name] for run in found if name in run])) for name in names}


def interval_of(shares: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and its interval by Student's t, within [0, 1]; of one share, the share itself."""
    mean = float(np.mean(shares))
    if len(shares) == 1:
        return mean, mean, mean
    half = student_half_width(shares)
    return mean, max(0.0, mean - half), min(1.0, mean + half)


@dataclass
class PlanProgress:
    """Who hears how far a plan is."""

    on_stage: Callable[[str], None] = lambda _text: None
    """A stage begins."""
    on_note: Callable[[str], None] = lambda _text: None
    """Something was found out."""
    on_run: Callable[[], None] = lambda: None
    """A simulated run has ended."""
