"""What a plan says against the fleet that it chose."""

from __future__ import annotations

import argparse

import pytest

from onbeat.cli.plan_output import PlanReport, warnings_of
from onbeat.core.slo import SLO
from onbeat.planner.fleets import FleetRun
from onbeat.planner.objectives import ShareObjective, Verdict
from onbeat.planner.plan_task import FleetPlan, PlannedFleet, PlanTask
from onbeat.planner.prices import Prices
from onbeat.planner.search import Bracket, Trial
from onbeat.planner.units import Unit
from tests.pure.planner.test_units import BASE, load_of

UNIT = Unit(settings=BASE, usd_per_hour=1.0, watts=1.0)


def bracket_of(low: float, high: float) -> Bracket:
    missed = Trial(rate=high, verdict=Verdict(is_met=False, reason="", binds="TTFT"))
    return Bracket(low=low, high=high, trials=(missed,), is_finished=True)


def fleet_of(capacities: list[float], shares: list[float]) -> PlannedFleet:
    return PlannedFleet(
        parts=((UNIT, 2),),
        runs=tuple(FleetRun(is_met=True, reason="", attainment=share) for share in shares),
        capacities=tuple(bracket_of(rate, rate * 1.02) for rate in capacities),
    )


def report_of(best: PlannedFleet | None) -> PlanReport:
    load = load_of([(100, 10)] * 3, SLO(ttft=1.0))
    task = PlanTask(rate=10.0, objective=ShareObjective(share=0.9), load=load, runs=(load,), available=())
    plan = FleetPlan(
        best=best,
        alternatives=(),
        failed=(),
        units=(),
        buckets=(),
        left_out={},
        cost_bound=0.0,
        is_exhausted=True,
    )
    return PlanReport(args=argparse.Namespace(model="m"), base=BASE, task=task, plan=plan, prices=Prices())


@pytest.mark.parametrize(
    ("capacities", "shares", "expected"),
    [
        ([12.0, 12.1, 12.2], [0.97, 0.97, 0.98], []),
        ([10.4, 10.4, 10.4], [0.97, 0.97, 0.98], ["the headroom is 4 %, below 10 %"]),
        (
            [14.0, 6.5, 21.0],
            [0.97, 0.97, 0.98],
            ["keeps up, 0 to 32.5 requests/s, begins below the promised 10;"],
        ),
        (
            [12.0, 12.1, 12.2],
            [0.91, 0.99, 1.0],
            ["good requests, 84.4 to 100.0 %, begins below the promised 90 %;"],
        ),
        (
            [10.0, 10.0, 12.0],
            [0.9, 0.95, 0.99],
            ["the headroom is 7 %", "begins below the promised 10;", "begins below the promised 90 %;"],
        ),
    ],
)
def test_a_fleet_near_its_limits_is_not_shown_without_a_word(
    capacities: list[float], shares: list[float], expected: list[str]
) -> None:
    lines = warnings_of(report_of(fleet_of(capacities, shares)))
    assert len(lines) == len(expected)
    for line, part in zip(lines, expected, strict=True):
        assert part in line
        assert "a higher --headroom" in line


def test_without_a_fleet_there_is_nothing_to_warn_of() -> None:
    assert warnings_of(report_of(None)) == []
