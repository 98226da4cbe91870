"""What units serve alone: whom the estimates leave out, and who comes back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from onbeat.core.options import change
from onbeat.core.slo import SLO
from onbeat.planner.fleet_plan import AloneSearch, PlanSearch
from onbeat.planner.fleets import FleetSearch
from onbeat.planner.objectives import ShareObjective
from onbeat.planner.plan_task import PlanProgress, PlanTask
from onbeat.planner.search import Bracket
from onbeat.planner.units import RatedUnit, Unit, buckets_of
from onbeat.workload.offered import OfferedLoad
from tests.pure.planner.test_units import BASE, load_of
from tests.told import numbers

SLOW = SLO(ttft=5.0)


def task_of(load: OfferedLoad, **devices: float) -> PlanTask:
    return PlanTask(
        rate=2.0,
        objective=ShareObjective(share=0.9),
        load=load,
        runs=(load,),
        available=tuple(devices.items()) or (("h100-sxm", 4.0),),
    )


def rated(load: OfferedLoad, degree: int, rate: float) -> RatedUnit:
    unit = Unit(settings=change(BASE, tensor_parallel=degree), usd_per_hour=float(degree), watts=1.0)
    return RatedUnit(unit=unit, rates=np.full(len(buckets_of(load)), rate))


class Searches:
    """Answers searches by the degree of the unit, and counts them."""

    def __init__(self, truths: dict[int, float]) -> None:
        self.truths = truths
        self.searched: list[int] = []

    def __call__(self, _worker: Any, tasks: Sequence[FleetSearch]) -> list[Bracket]:
        found = []
        for task in tasks:
            degree = task.task.case.parts[0][0].num_devices
            self.searched.append(degree)
            low = self.truths[degree]
            found.append(Bracket(low=low, high=low, trials=(), is_finished=True))
        return found


@pytest.mark.parametrize(
    ("truths", "searched", "kept_rates"),
    [
        ({1: 9.0}, [1], [9.0]),
        ({1: 0.01, 2: 18.0}, [1, 2], [0.01, 18.0]),
        ({1: 0.002, 2: 18.0}, [1, 2], [18.0]),
    ],
    ids=["as estimated", "far below", "nothing"],
)
def test_a_unit_comes_back_where_the_one_that_beat_it_keeps_up_far_less_than_estimated(
    truths: dict[int, float], searched: list[int], kept_rates: list[float]
) -> None:
    load = load_of([(100, 10)] * 20, SLOW)
    searches = Searches(truths)
    alone = AloneSearch(task_of(load), buckets_of(load), searches, PlanProgress())
    kept, left_out = alone.calibrated([rated(load, 1, 10.0), rated(load, 2, 20.0)])
    assert searches.searched == searched
    assert [each.rate(buckets_of(load)) for each in kept] == pytest.approx(kept_rates)
    assert len(left_out) == 2 - len(kept)


def test_a_unit_that_is_late_even_idle_is_not_simulated_and_the_next_is_tried() -> None:
    # 15 % of the requests are late whatever happens, though the mean of their bucket is in time.
    load = load_of([(2200, 10)] * 17 + [(4000, 10)] * 3, SLO(ttft=0.09))
    searches = Searches({1: 9.0, 2: 18.0})
    alone = AloneSearch(task_of(load), buckets_of(load), searches, PlanProgress())
    kept, left_out = alone.calibrated([rated(load, 1, 10.0), rated(load, 2, 20.0)])
    assert searches.searched == [2]
    assert [each.unit.name for each in kept] == ["2 H100-SXM"]
    assert "even idle" in left_out["H100-SXM"]
    assert numbers(left_out["H100-SXM"]) == [85, 90]


def test_what_no_unit_keeps_is_told_as_late_and_not_as_a_want_of_memory() -> None:
    load = load_of([(2200, 10)] * 17 + [(4000, 10)] * 3, SLO(ttft=0.09))
    plan, _ = PlanSearch(task=task_of(load)).plans([rated(load, 1, 10.0)], {})
    assert plan.best is None
    assert re.search(r"H100-SXM: even idle .*85 %", plan.infeasible)
    assert "model" not in plan.infeasible
