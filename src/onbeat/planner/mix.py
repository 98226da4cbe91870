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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import OnbeatError
from onbeat.core.extras import require

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
    """What has to be served, and what could serve it."""

    costs: tuple[float, ...]
    """Of each unit, in any money an hour."""
    loads: Array
    """(buckets, units): units that all of a bucket needs; infinite where such a unit cannot serve it."""
    slices: int = DEFAULT_SLICES
    """Of each bucket, at least 1."""
    types: tuple[str, ...] = ()
    """Type of device of each unit; empty where their number has no bound."""
    devices: tuple[int, ...] = ()
    """Devices of each unit, beside `types`."""
    available: tuple[tuple[str, float], ...] = ()
    """(type, devices that there are of it); none or infinite is no bound."""


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
    problem: MixProblem, *, too_small: Sequence[Counts] = (), below: float = inf, time_limit: float = 60.0
) -> Mix | None:
    """Return the cheapest mix; None where there is none.

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
    num_buckets, num_units = problem.loads.shape
    counts = tuple(round(value) for value in answer.x[:num_units])
    slices = np.round(answer.x[num_units : num_units * (1 + num_buckets)]).reshape(num_buckets, num_units)
    cost = sum(cost * count for cost, count in zip(problem.costs, counts, strict=True))
    return Mix(counts=counts, cost=cost, shares=slices / problem.slices)


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
