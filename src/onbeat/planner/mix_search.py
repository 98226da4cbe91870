"""The cheapest fleet that keeps a promise.

1. Each unit is rated for each size of request (`units`), and searched alone for the rate that it keeps up.
2. Each type of device alone: the fewest replicas whose simulated fleet keeps the promise.
3. Mixes that cost less, by the integer program below; each is simulated as a whole, with the live router.
   One that fails is cut off, with all that have no more of any unit, and the program is solved again.

A fleet is held to one run first, the one that was hardest to keep so far. The cheapest that keeps it is
simulated in all runs; if one of them misses, the search goes on. Fleets that cost more than one that keeps
the promise are not simulated.

The program's loads are estimates. Fleets of one type say between which bounds they are right: their fewest
replicas did, one less did not. The search for mixes goes from the upper bound, by halves, to the lower one,
and from there upwards by cost: what it leaves out costs more than what it found, or failed, or needs more
units than even the lower bound of the loads allows.

The integer program is that of Mélange, solved by HiGHS. The load is cut into buckets of requests of like
size, and each bucket into equal slices. A unit j needs the share `loads[i, j]` of its time for all of bucket
i. Slices of one bucket are alike, so the program counts them: `n[i, j]` slices of bucket i go to units j, and
`B[j]` units are rented:

    minimise    sum_j costs[j] B[j]
    subject to  sum_j n[i, j] = slices                                for each bucket i
                sum_i n[i, j] loads[i, j] / slices <= B[j]            for each unit j
                sum_j devices[j] B[j] <= available[t]  over j of t    for each type of device t

References
----------
Griggs et al., "Melange: Cost Efficient Large Language Model Serving by Exploiting GPU Heterogeneity",
arXiv 2404.14527, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import OnbeatError, counted
from onbeat.core.extras import require
from onbeat.planner.plan_task import PlannedFleet, PlanProgress, PlanTask
from onbeat.planner.units import Bucket, RatedUnit, Unit, longest_request

Array = NDArray[np.float64]
Counts = tuple[int, ...]
"""How many there are of each unit."""

SLACK = 1e-9
"""Of a unit: a load that is 3 but for rounding takes 3 units, not 4."""
COST_STEP = 1e-4
"""Costs that differ by less are equal; more than the tolerance of the solver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixProblem:
    """What has to be served, and what could serve it."""

    costs: tuple[float, ...]
    """Of each unit, in any money an hour."""
    loads: Array
    """(buckets, units): units that all of a bucket needs; infinite where such a unit cannot serve it."""
    slices: int = 8
    """Of each bucket, at least 1."""
    types: tuple[str, ...] = ()
    """Type of device of each unit; empty where their number has no bound."""
    devices: tuple[int, ...] = ()
    """Devices of each unit, beside `types`."""
    available: tuple[tuple[str, float], ...] = ()
    """(type, devices that there are of it); none or infinite is no bound."""


class NoSolution(OnbeatError):
    """The time was over before the program was solved."""


def solve_mix(
    problem: MixProblem, *, too_small: Sequence[Counts] = (), below: float = inf, time_limit: float = 60.0
) -> Counts | None:
    """Return how many of each unit the cheapest mix has; None where there is none.

    Parameters
    ----------
    too_small : mixes known to fail; they, and whatever has no more of any unit, are left out.
    below : the mix must cost less.
    time_limit : seconds.

    Raises
    ------
    NoSolution : the time was over.
    """
    if not np.isfinite(problem.loads).any(axis=1).all():
        return None
    answer = _solve(problem, too_small, below, time_limit=time_limit)
    if answer.status == 1:
        raise NoSolution(f"no cheapest mix was proved within {time_limit:g} s; take fewer kinds of units")
    if answer.x is None:
        return None
    return tuple(round(value) for value in answer.x[: len(problem.costs)])


def lower_bound(problem: MixProblem) -> float:
    """Return what no mix undercuts: the cost where units and slices may be fractions; infinite of none."""
    if not np.isfinite(problem.loads).any(axis=1).all():
        return inf
    answer = _solve(problem, is_whole=False)
    return float(answer.fun) if answer.success else inf


def _solve(
    problem: MixProblem,
    too_small: Sequence[Counts] = (),
    below: float = inf,
    *,
    is_whole: bool = True,
    time_limit: float = 60.0,
) -> Any:
    """Solve the program; its columns: the units, slices by bucket and unit, a choice by cut and unit.

    Parameters
    ----------
    is_whole : whether units and slices are whole numbers.
    """
    num_buckets, num_units = problem.loads.shape
    num_cuts, usable = len(too_small), np.isfinite(problem.loads)
    loads = np.where(usable, problem.loads, 0.0)
    costs, one, nothing = np.array(problem.costs), np.eye(num_units), np.zeros(num_units)
    # As many as serve all that they can; a cut may ask for one more than it excludes.
    most = np.max([np.ceil(loads.sum(axis=0)) + 1, *(np.array(counts) + 1.0 for counts in too_small)], axis=0)
    rows: list[Array] = []
    bounds: list[float] = []

    def add(bound: float, units: Array, slices: Any = 0.0, choices: Any = 0.0) -> None:
        """Ask that a sum is at most a bound."""
        of_slices = np.broadcast_to(slices, (num_buckets, num_units))
        of_choices = np.broadcast_to(choices, (num_cuts, num_units))
        rows.append(np.concatenate([units, of_slices.ravel(), of_choices.ravel()]))
        bounds.append(bound)

    for unit in range(num_units):
        add(SLACK, -one[unit], loads * one[unit] / problem.slices)
    add(-1.0, nothing - 1)  # the slack is not to do without any
    for type_, number in problem.available:
        devices = np.array(problem.devices) * (np.array(problem.types) == type_)
        if number < inf and devices.any():
            add(number, devices.astype(float))
    if below < inf:
        add(below - COST_STEP, costs)
    for cut, counts in enumerate(too_small):  # more of one unit than such a mix has
        own = np.eye(num_cuts)[cut][:, None]
        add(-1.0, nothing, choices=-own)
        for unit, count in enumerate(counts):
            add(0.0, -one[unit], choices=own * one[unit] * (count + 1))
    every, after = np.kron(np.eye(num_buckets), np.ones(num_units)), num_cuts * num_units
    covered = np.pad(every, ((0, 0), (num_units, after)))
    upper = np.concatenate([most, (usable * problem.slices).ravel(), np.ones(after)])
    optimize = require("scipy.optimize", extra="plan", purpose="a plan")
    return optimize.milp(
        np.concatenate([costs, np.zeros(len(upper) - num_units)]),
        integrality=np.full(len(upper), int(is_whole)),
        bounds=optimize.Bounds(0.0, upper),
        constraints=[
            optimize.LinearConstraint(covered, problem.slices, problem.slices),
            optimize.LinearConstraint(np.array(rows), -inf, bounds),
        ],
        options={"time_limit": time_limit, "mip_rel_gap": 0.0},
    )


Parts = tuple[tuple[Unit, int], ...]

HALVINGS = 4
"""Of the way between the bounds of the loads, before mixes are tried by cost."""
GUESS = (0.85, 1.1)
"""Bounds of the load of a unit that no fleet of its own has told, as shares of its estimate."""
FORGONE = 0.25
"""Of requests that may miss, those of the rarest sizes, whose place in a mix is left open."""
ROOM = 1.25
"""Where everything failed, loads are taken to be so much higher, time and again."""


def unservable(units: Sequence[RatedUnit], buckets: Sequence[Bucket], share: float) -> str:
    """Return why so many requests cannot be in time whatever the fleet is; empty where they can.

    Parameters
    ----------
    share : of the requests that must be.
    """
    if not units:
        return "no replica can be made of these devices"
    is_served = np.any([each.rates > 0 for each in units], axis=0).tolist()
    late = [bucket for bucket, is_in_time in zip(buckets, is_served, strict=True) if not is_in_time]
    served = 1 - sum(bucket.share for bucket in late)
    if served >= share - 1e-9:
        return ""
    worst = max(late, key=lambda bucket: bucket.share)
    longest = max(longest_request(each.unit) for each in units)
    if worst.num_prompt_tokens + worst.num_output_tokens > longest:
        return (
            f"{(1 - served) * 100:.3g} % of the requests cannot be served in time, and most of these do not "
            f"fit a context: they have about {worst.name}, and model, memory or --max-model-len allow "
            f"{longest} tokens"
        )
    return (
        f"{served * 100:.3g} % of the requests can be in time, however many replicas there are, and "
        f"{share * 100:g} % must be: most of the others have about {worst.name}, which take longer even alone"
    )


def most_of(unit: Unit, available: Mapping[str, float]) -> float:
    """Return how many there can be of a unit; infinite where nothing bounds it."""
    devices = available.get(unit.device, inf)
    return devices if devices == inf else devices // unit.num_devices


def everything(
    units: Sequence[RatedUnit], buckets: Sequence[Bucket], available: Mapping[str, float]
) -> Parts:
    """Return the fleet of all devices, each type as the unit that serves most.

    Parameters
    ----------
    available : devices of each type, finite.
    """
    best: dict[str, tuple[float, int, RatedUnit]] = {}
    for number, each in enumerate(units):
        unit = each.unit
        most = most_of(unit, available)
        entry = (each.rate(buckets) * most, -number, each)
        best[unit.device] = max(best.get(unit.device, (-1.0, 0, each)), entry, key=lambda one: one[:2])
    return tuple(
        (each.unit, int(most)) for _, _, each in best.values() if (most := most_of(each.unit, available))
    )


def problem_of(
    task: PlanTask, units: Sequence[RatedUnit], buckets: Sequence[Bucket], scales: Sequence[float]
) -> MixProblem:
    """Return the integer program of a plan.

    Parameters
    ----------
    scales : of each unit, what its estimated loads are multiplied by.
    """
    demand = np.array([bucket.share for bucket in buckets]) * task.needed_rate
    with np.errstate(divide="ignore"):
        loads = np.stack([demand / each.rates for each in units], axis=1)
    must = _must_be_served(units, buckets, task.objective.share)
    return MixProblem(
        costs=tuple(each.unit.usd_per_hour for each in units),
        loads=loads[must] * np.array(scales),
        types=tuple(each.unit.device for each in units),
        devices=tuple(each.unit.num_devices for each in units),
        available=task.available,
    )


def _must_be_served(units: Sequence[RatedUnit], buckets: Sequence[Bucket], share: float) -> NDArray[np.bool_]:
    """Return which buckets the program has to place.

    Those that no unit can serve are late wherever they go. Rare ones that only some can serve must not decide
    which units there are: the simulation tells whether the promise is kept without.
    """
    can = np.stack([each.rates > 0 for each in units], axis=1)
    must: NDArray[np.bool_] = np.asarray(can.any(axis=1))
    rare = FORGONE * (1 - share)
    for row in sorted(range(len(can)), key=lambda row: buckets[row].share):
        rare -= buckets[row].share * must[row]
        if rare < 0:
            break
        must[row] = must[row] and can[row].all()
    return must


Judge = Callable[..., PlannedFleet]
"""Simulates a fleet in all runs until one misses or, with `is_glance`, in one run."""


class MixSearch:
    """Tries fleets of one type, then mixes that cost less.

    Parameters
    ----------
    judge : simulates a fleet, in all runs or, at a glance, in one.
    units : with calibrated rates for the buckets.
    """

    def __init__(
        self,
        task: PlanTask,
        units: Sequence[RatedUnit],
        buckets: Sequence[Bucket],
        judge: Judge,
        progress: PlanProgress,
    ) -> None:
        self._task, self._units, self._buckets = task, units, buckets
        self._simulate, self._progress = judge, progress
        self._available = dict(task.available)
        self._known: dict[Counts, PlannedFleet] = {}
        self._fewest: dict[int, int] = {}
        """Fewest replicas of a unit that do alone."""
        self._best: PlannedFleet | None = None
        self._left = task.most_candidates
        """Mixes that may still be simulated."""
        self.is_exhausted = False
        self.infeasible = ""
        self.cost_bound = 0.0

    @property
    def fleets(self) -> list[PlannedFleet]:
        """All that were simulated."""
        return list(self._known.values())

    def run(self) -> PlannedFleet | None:
        """Return the cheapest that keeps the promise; None where none was found."""
        self.infeasible = unservable(self._units, self._buckets, self._task.objective.share)
        if self.infeasible:
            return None
        while True:
            for number in self._singles():
                self._find_fewest(number)
            self._find_mix()
            if self._best is None:
                self._grow()
            if self._best is None or self._confirm(self._best):
                return self._best

    def confirm_alone(self) -> None:
        """Simulate the cheapest fleet of one kind in all runs, to set the best one against."""
        alone = [fleet for fleet in self._known.values() if fleet.is_kept and len(fleet.parts) == 1]
        for fleet in sorted(alone, key=lambda each: each.usd_per_hour):
            if self._confirm(fleet):
                return

    def _confirm(self, fleet: PlannedFleet) -> bool:
        """Simulate a fleet that kept the promise at a glance in all runs; return whether it still does."""
        counts = next(each for each, known in self._known.items() if known is fleet)
        if len(fleet.runs) < len(self._task.runs):
            self._known[counts] = fleet = self._note(self._simulate(fleet.parts, is_glance=False))
        if not fleet.is_kept:
            self._fewest.clear()
            kept = [each for each in self._known.values() if each.is_kept]
            self._best = min(kept, key=lambda each: each.usd_per_hour, default=None)
        elif self._best is not None and fleet.parts == self._best.parts:
            self._best = fleet
        return fleet.is_kept

    # ---- fleets of one type ----

    def _singles(self) -> list[int]:
        """Return the unit of each device that alone is cheapest by the estimates."""
        cheapest: dict[str, tuple[float, int]] = {}
        for number, each in enumerate(self._units):
            served = sum(b.share for b, rate in zip(self._buckets, each.rates, strict=True) if rate > 0)
            if served < self._task.objective.share - 1e-9:
                continue
            cost = ceil(self._load(number)) * each.unit.usd_per_hour
            cheapest[each.unit.device] = min(cheapest.get(each.unit.device, (inf, 0)), (cost, number))
        return [number for _, number in sorted(cheapest.values())]

    def _load(self, number: int) -> float:
        """Return the replicas of a unit that all requests need, by the estimate."""
        return self._task.needed_rate / self._units[number].rate(self._buckets)

    def _find_fewest(self, number: int) -> None:
        """Find the fewest replicas of one unit that do, if they cost less than the best fleet so far."""
        unit = self._units[number].unit
        most = int(min(most_of(self._units[number].unit, self._available), 1e6))
        if self._best is not None and {one for one, _ in self._best.parts} != {unit}:
            most = min(most, ceil(self._best.usd_per_hour / unit.usd_per_hour - 1e-9) - 1)
        if number in self._fewest or most < 1:
            return
        self._progress.on_stage(f"simulating fleets of equal replicas, {unit.name} each")
        low, high, step = 0, most + 1, 1
        count = max(1, min(round(self._load(number)), most))
        while True:
            likely = [((unit, other),) for other in (count + 1, count - 1) if low < other < high]
            if self._judge(self._counts({number: count}), likely).is_kept:
                high = count
            else:
                low = count
            if low >= most:
                return
            if high - low == 1:
                break
            if low and high <= most:
                count = (low + high) // 2
            else:
                count = max(high - step, 1) if high <= most else min(low + step, most)
                step *= 2
        self._fewest[number] = high

    # ---- mixes ----

    def _find_mix(self) -> None:
        """Find a mix that costs less than the best fleet of one type."""
        self._progress.on_stage("simulating mixes")
        self.cost_bound, self.is_exhausted = lower_bound(self._problem(0.0)), False
        low, high = 0.0, 1.0
        position = 1.0
        for _ in range(HALVINGS):
            if not self._left:
                return
            mix = self._cheapest(position)
            if mix is not None and not self._try(mix):
                low = position
            else:
                high = position
            position = (low + high) / 2
        while self._left:
            mix = self._cheapest(0.0)
            if mix is None:
                self.is_exhausted = True
                return
            self._try(mix)

    def _try(self, mix: Counts) -> bool:
        """Simulate a mix that counts among the candidates."""
        self._left -= 1
        return self._judge(mix).is_kept

    def _grow(self) -> None:
        """Find any fleet, where all that the estimates proposed have failed."""
        position = 1.0
        for _ in range(2 * HALVINGS):
            mix = self._cheapest(position)
            if mix is None:
                break
            if self._judge(mix).is_kept:
                return
            position = position * ROOM + 0.5
        self._try_everything()

    def _try_everything(self) -> None:
        """Simulate all devices that there are."""
        if any(most_of(each.unit, self._available) == inf for each in self._units):
            self.infeasible = "no fleet that was simulated keeps the promise"
            return
        counts = dict(everything(self._units, self._buckets, self._available))
        fleet = self._judge(tuple(counts.get(each.unit, 0) for each in self._units))
        if not fleet.is_kept:
            self.infeasible = f"all devices together, {fleet.name}, are too few: {fleet.reason}"

    def _cheapest(self, position: float) -> Counts | None:
        """Return the cheapest mix that is worth a try.

        Parameters
        ----------
        position : of the loads between their lower bound (0) and their upper bound (1); beyond, too.
        """
        failed = [counts for counts, fleet in self._known.items() if not fleet.is_kept]
        below = inf if self._best is None else self._best.usd_per_hour
        return solve_mix(self._problem(position), too_small=failed, below=below)

    def _problem(self, position: float) -> MixProblem:
        bounds = map(self._bounds, range(len(self._units)))
        scales = [low + position * (high - low) for low, high in bounds]
        return problem_of(self._task, self._units, self._buckets, scales)

    def _bounds(self, number: int) -> tuple[float, float]:
        """Return between which shares of its estimate the load of a unit lies."""
        fewest = self._fewest.get(number)
        # Many replicas share their queues, and come near to the steady rate; beyond it they do not come.
        steady = min(GUESS[0], self._units[number].factor)
        if fewest is None:
            return steady, GUESS[1]
        load = self._load(number)
        if fewest == 1:  # one was enough for certain, but not by how much
            return min(steady, 1 / load), min(1.0, 1 / load)
        return (fewest - 1 + 1e-6) / load, fewest / load

    def _counts(self, some: dict[int, int]) -> Counts:
        return tuple(some.get(number, 0) for number in range(len(self._units)))

    def _judge(self, counts: Counts, likely: Sequence[Parts] = ()) -> PlannedFleet:
        fleet = self._known.get(counts)
        if fleet is not None:
            return fleet
        parts = tuple((each.unit, count) for each, count in zip(self._units, counts, strict=True) if count)
        fleet = self._known[counts] = self._note(self._simulate(parts, is_glance=True, likely=likely))
        is_cheaper = self._best is None or fleet.usd_per_hour < self._best.usd_per_hour - 1e-9
        if fleet.is_kept and is_cheaper:
            self._best = fleet
        return fleet

    def _note(self, fleet: PlannedFleet) -> PlannedFleet:
        """Say what a simulation showed."""
        num_runs, num_all = len(fleet.runs), len(self._task.runs)
        some = "" if num_runs == num_all else f" so far, in {num_runs} of {counted(num_all, 'run')}"
        verdict = (
            f"keeps the promise{some}" if fleet.is_kept else f"does not keep the promise: {fleet.reason}"
        )
        self._progress.on_note(f"{fleet.name} (${fleet.usd_per_hour:.2f}/h) {verdict}")
        return fleet
