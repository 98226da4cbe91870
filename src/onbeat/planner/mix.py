"""The cheapest mix of units for a load: the integer program of Mélange, solved by HiGHS.

The load is cut into buckets of requests of like size, and each bucket into equal slices. A unit j needs the
share `loads[i, j]` of its time for all of bucket i. Slices of one bucket are alike, so the program counts
them: `n[i, j]` slices of bucket i go to units j, and `B[j]` units are rented:

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

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError, OnbeatError
from onbeat.core.extras import require

if TYPE_CHECKING:
    from scipy.optimize import LinearConstraint

Array = NDArray[np.float64]
Counts = tuple[int, ...]
"""How many there are of each unit."""

DEFAULT_SLICES = 8
SLACK = 1e-9
"""Of a unit: a load that is 3 but for rounding takes 3 units, not 4."""
COST_STEP = 1e-4
"""Costs that differ by less are equal; more than the tolerance of the solver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixProblem:
    """What has to be served, and what could serve it.

    Raises
    ------
    ConfigError : arrays whose sizes do not fit together, no unit, no bucket, or a cost that is not above 0.
    """

    costs: tuple[float, ...]
    """Of each unit, in any money an hour."""
    loads: Array
    """(buckets, units): units that all of a bucket needs, 0 or more; infinite where such a unit cannot serve
    it."""
    slices: int = DEFAULT_SLICES
    """Of each bucket, at least 1."""
    types: tuple[str, ...] = ()
    """Type of device of each unit; empty where their number has no bound."""
    devices: tuple[int, ...] = ()
    """Devices of each unit, beside `types`."""
    available: tuple[tuple[str, float], ...] = ()
    """(type, devices that there are of it); none or infinite is no bound."""

    def __post_init__(self) -> None:
        if self.loads.ndim != 2 or self.loads.shape[1] != len(self.costs) or 0 in self.loads.shape:
            raise ConfigError(
                f"a mix needs the load of each bucket on each of {len(self.costs)} units, got an array of "
                f"{self.loads.shape}"
            )
        if self.slices < 1:
            raise ConfigError(f"there are {self.slices} slices of a bucket; there must be at least 1")
        if not all(cost > 0 for cost in self.costs) or np.isnan(self.loads).any() or (self.loads < 0).any():
            raise ConfigError("costs must be above 0, and loads 0 or more")
        if len(self.types) != len(self.devices) or len(self.types) not in (0, len(self.costs)):
            raise ConfigError("types and devices belong together, one a unit")

    def most(self) -> Array:
        """Return how many there can be of each unit; infinite where nothing bounds it."""
        bounds = dict(self.available)
        if not self.types:
            return np.full(len(self.costs), inf)
        pairs = zip(self.types, self.devices, strict=True)
        return np.floor([bounds.get(type_, inf) / count for type_, count in pairs])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """How many of each unit, and what each is for."""

    counts: Counts
    cost: float
    shares: Array
    """(buckets, units): the share of each bucket that units of a kind serve; rows add up to 1."""


class NoSolution(OnbeatError):
    """The time was over before the program was solved."""


def solve_mix(
    problem: MixProblem,
    *,
    too_small: Sequence[Counts] = (),
    enough: Sequence[Counts] = (),
    below: float = inf,
    time_limit: float = 60.0,
) -> Mix | None:
    """Return the cheapest mix; None where there is none.

    Parameters
    ----------
    too_small : mixes known to fail; they, and whatever has no more of any unit, are left out.
    enough : mixes known to do; they, and whatever has no less of any unit, are left out.
    below : the mix must cost less.
    time_limit : seconds.

    Raises
    ------
    NoSolution : the time was over.
    """
    if not np.isfinite(problem.loads).any(axis=1).all():
        return None
    program = _Program(problem, too_small, enough, below)
    optimize = _scipy("optimize")
    answer = optimize.milp(
        program.costs,
        integrality=program.integrality,
        bounds=optimize.Bounds(program.lower, program.upper),
        constraints=program.constraints(),
        options={"time_limit": time_limit, "mip_rel_gap": 0.0},
    )
    if answer.status == 1:
        raise NoSolution(f"no cheapest mix was proved within {time_limit:g} s; take fewer kinds of units")
    if answer.x is None:
        return None
    num_buckets, num_units = problem.loads.shape
    counts = tuple(round(value) for value in answer.x[:num_units])
    slices = np.round(answer.x[num_units : num_units * (1 + num_buckets)]).reshape(num_buckets, num_units)
    cost = sum(cost * count for cost, count in zip(problem.costs, counts, strict=True))
    return Mix(counts=counts, cost=cost, shares=slices / problem.slices)


def lower_bound(problem: MixProblem) -> float:
    """Return what no mix undercuts: the cost where units and slices may be fractions; infinite of none."""
    if not np.isfinite(problem.loads).any(axis=1).all():
        return inf
    program = _Program(problem, (), (), inf)
    (covered, *others) = program.constraints()
    upper, matrix = (
        np.concatenate([each.ub for each in others]),
        np.concatenate([each.A.toarray() for each in others]),
    )
    bounds = list(zip(program.lower, program.upper, strict=True))
    answer = _scipy("optimize").linprog(
        program.costs, A_ub=matrix, b_ub=upper, A_eq=covered.A, b_eq=covered.ub, bounds=bounds
    )
    return float(answer.fun) if answer.success else inf


def _scipy(part: str) -> Any:
    return require(f"scipy.{part}", extra="plan", purpose="a plan")


class _Rows:
    """Rows of a sparse matrix with upper bounds, one after another."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.upper: list[float] = []

    def add(self, columns: Sequence[int], values: Sequence[float], upper: float) -> None:
        self.entries += [
            (len(self.upper), column, value) for column, value in zip(columns, values, strict=True)
        ]
        self.upper.append(upper)

    def constraint(self, num_columns: int, *, is_equality: bool = False) -> LinearConstraint:
        rows, columns, values = zip(*self.entries, strict=True)
        shape = (len(self.upper), num_columns)
        matrix = _scipy("sparse").coo_array((values, (rows, columns)), shape=shape).tocsr()
        lower = self.upper if is_equality else -inf
        return _scipy("optimize").LinearConstraint(matrix, lower, self.upper)


class _Program:
    """Columns: the units, then slices by bucket and unit, then one choice for each unit of each cut."""

    def __init__(
        self, problem: MixProblem, too_small: Sequence[Counts], enough: Sequence[Counts], below: float
    ) -> None:
        self._problem, self._below = problem, below
        num_buckets, self._num_units = problem.loads.shape
        self._cuts = [(counts, True) for counts in too_small] + [(counts, False) for counts in enough]
        self._num_counts = self._num_units * (1 + num_buckets)
        self._num_columns = self._num_counts + self._num_units * len(self._cuts)
        self._most = np.minimum(problem.most(), self._most_needed())
        self.costs = np.zeros(self._num_columns)
        self.costs[: self._num_units] = problem.costs
        self.integrality = np.ones(self._num_columns)
        self.lower = np.zeros(self._num_columns)
        self.upper = np.ones(self._num_columns)
        self.upper[: self._num_units] = self._most
        usable = np.isfinite(problem.loads).ravel()
        self.upper[self._num_units : self._num_counts] = usable * problem.slices

    def _most_needed(self) -> Array:
        """Return how many of each unit serve all that it can; a cut may ask for one more than it excludes."""
        loads = np.where(np.isfinite(self._problem.loads), self._problem.loads, 0.0).sum(axis=0)
        most: Array = np.ceil(loads) + 1
        for counts, _ in self._cuts:
            most = np.maximum(most, np.array(counts) + 1)
        return most

    def constraints(self) -> list[LinearConstraint]:
        """Return what must hold: first, with equality, that each bucket is served."""
        problem, width = self._problem, self._num_units
        num_buckets = len(problem.loads)
        covered, bounded = _Rows(), _Rows()
        for bucket in range(num_buckets):
            columns = [self._slice(bucket, unit) for unit in range(width)]
            covered.add(columns, [1.0] * width, problem.slices)
        for unit in range(width):
            served = [bucket for bucket in range(num_buckets) if np.isfinite(problem.loads[bucket, unit])]
            values = [problem.loads[bucket, unit] / problem.slices for bucket in served]
            columns = [self._slice(bucket, unit) for bucket in served]
            bounded.add([*columns, unit], [*values, -1.0], SLACK)
        bounded.add(range(width), [-1.0] * width, -1.0)  # the slack is not to do without any
        for type_, number in problem.available:
            own = [unit for unit in range(width) if problem.types[unit] == type_]
            if own and number < inf:
                bounded.add(own, [float(problem.devices[unit]) for unit in own], number)
        if self._below < inf:
            bounded.add(range(width), problem.costs, self._below - COST_STEP)
        for number, (counts, is_too_small) in enumerate(self._cuts):
            self._cut(bounded, number, counts, is_too_small=is_too_small)
        return [
            covered.constraint(self._num_columns, is_equality=True),
            bounded.constraint(self._num_columns),
        ]

    def _cut(self, rows: _Rows, number: int, counts: Counts, *, is_too_small: bool) -> None:
        """Ask for more of one unit than a mix has, or for less."""
        choices = [self._num_counts + number * self._num_units + unit for unit in range(self._num_units)]
        rows.add(choices, [-1.0] * len(choices), -1.0)
        for unit, choice in enumerate(choices):
            count, most = float(counts[unit]), float(self._most[unit])
            if is_too_small:
                rows.add([unit, choice], [-1.0, count + 1], 0.0)
            elif count == 0:
                rows.add([choice], [1.0], 0.0)
            else:
                rows.add([unit, choice], [1.0, most - count + 1], most)

    def _slice(self, bucket: int, unit: int) -> int:
        column: int = self._num_units * (1 + bucket) + unit
        return column
