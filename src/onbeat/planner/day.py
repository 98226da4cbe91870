"""Fleets by the hour, for a load whose rate goes up and down with the day."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from onbeat.core.errors import ConfigError
from onbeat.files import read_csv
from onbeat.planner.plan_task import Fleet, FleetPlan

COLUMNS = ("hour", "rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hour:
    """The cheapest fleet of one hour."""

    hour: int
    """From 0."""
    rate: float
    """Requests per second."""
    fleet: Fleet | None
    """None where there are no requests, or where no fleet keeps the promise."""
    infeasible: str = ""
    """What binds, where none does."""

    @property
    def usd(self) -> float:
        return self.fleet.usd_per_hour if self.fleet is not None else 0.0


def plan_hours(rates: Sequence[float], plan_of: Callable[[float], FleetPlan]) -> tuple[Hour, ...]:
    """Return the fleet of each hour; equal rates are planned once, the highest first.

    Parameters
    ----------
    rates : requests per second of each hour, at least 0.
    plan_of : finds the cheapest fleet for a rate.
    """
    plans = {rate: plan_of(rate) for rate in sorted(set(rates), reverse=True) if rate > 0}
    hours = []
    for hour, rate in enumerate(rates):
        plan = plans.get(rate)
        fleet, why = (None, "") if plan is None else (plan.best, plan.infeasible)
        hours.append(Hour(hour=hour, rate=rate, fleet=fleet, infeasible=why))
    return tuple(hours)


def read_rates(path: Path) -> tuple[float, ...]:
    """Read the requests per second of each hour: a CSV with the columns `hour` (0, 1, 2, ...) and `rate`.

    Raises
    ------
    ConfigError : the file cannot be read, or says something else.
    """
    rows = read_csv(path, "the rates by hour in", columns=COLUMNS, rows="hours")
    rates = [_rate(f"{path}, line {line}", hour, row) for hour, (line, row) in enumerate(rows)]
    if not any(rates):
        raise ConfigError(f"{path} has no hour with requests; give a row an hour, such as 0,2.5")
    return tuple(rates)


def _rate(where: str, hour: int, row: dict[str, str]) -> float:
    """Return the rate of an hour."""
    try:
        rate = float(row["rate"])
    except ValueError:
        rate = -1.0
    if not 0 <= rate < inf:
        raise ConfigError(f"{where}: rate {row['rate']!r} is no number of requests per second, such as 2.5")
    if row["hour"].strip() != str(hour):
        raise ConfigError(
            f"{where}: hour {row['hour']!r}, expected {hour}: give every hour from 0 on, in order"
        )
    return rate
