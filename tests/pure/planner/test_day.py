"""Fleets by the hour: the file of rates, and what is planned for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from onbeat.core.errors import ConfigError
from onbeat.planner.day import plan_hours, read_rates
from onbeat.planner.plan_task import FleetPlan


def nothing_for(rate: float) -> FleetPlan:
    return FleetPlan(
        rate=rate,
        needed_rate=rate,
        best=None,
        alternatives=(),
        failed=(),
        units=(),
        buckets=(),
        left_out={},
        cost_bound=0.0,
        is_exhausted=True,
        infeasible=f"{rate:g} requests/s are too many",
    )


def test_equal_rates_are_planned_once_the_highest_first() -> None:
    asked: list[float] = []

    def plan_of(rate: float) -> FleetPlan:
        asked.append(rate)
        return nothing_for(rate)

    hours = plan_hours((2.0, 0.0, 5.0, 2.0), plan_of)
    assert asked == [5.0, 2.0]
    assert [(hour.hour, hour.rate) for hour in hours] == [(0, 2.0), (1, 0.0), (2, 5.0), (3, 2.0)]
    assert hours[0].infeasible == "2 requests/s are too many"
    assert hours[1].infeasible == ""
    assert hours[1].usd == 0


def test_reads_the_rate_of_each_hour(tmp_path: Path) -> None:
    path = tmp_path / "day.csv"
    path.write_text("hour, rate\n0, 2.5\n1, 0\n2, 10\n", encoding="utf-8")
    assert read_rates(path) == (2.5, 0.0, 10.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lacks the column hour, rate; it has no header"),
        ("hour,rate\n", "has a header but no hours"),
        ("hour,rate\n0,0\n", "no hour with requests"),
        ("time,rate\n0,1\n", "lacks the column hour; it has time, rate"),
        ("hour,rate\n0,1,2\n", "line 2: the header names 2 columns"),
        ("hour,rate\n0\n", "line 2: the header names 2 columns"),
        ("hour,rate\n0,many\n", "rate 'many' is no number"),
        ("hour,rate\n0,-1\n", "rate '-1' is no number"),
        ("hour,rate\n0,nan\n", "rate 'nan' is no number"),
        ("hour,rate\n0,1\n2,1\n", "line 3: hour '2', expected 1"),
    ],
)
def test_says_what_is_wrong_with_the_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "day.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_rates(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.csv"):
        read_rates(tmp_path / "nowhere.csv")
