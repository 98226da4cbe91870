"""A plan as a whole: what is told first, and that it does not depend on the number of processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from onbeat.core.slo import SLO
from onbeat.planner import fleet_plan
from onbeat.planner.fleet_plan import PlanSearch
from onbeat.planner.fleets import FleetRun, FleetSearch, FleetTask
from onbeat.planner.objectives import ShareObjective
from onbeat.planner.parallel import Pool
from onbeat.planner.plan_task import FleetPlan, PlanInterrupted, PlanTask
from onbeat.planner.search import Bracket, search_rate
from onbeat.planner.units import buckets_of
from tests.pure.planner.fakes import quiet
from tests.pure.planner.test_mix_search import unit
from tests.pure.planner.test_units import load_of

RATE = 10.0
TRUTHS = {"l4": 2.1, "a10g": 4.6}
COSTS = {"l4": 1.0, "a10g": 2.1}


def run(task: FleetTask, *_: Any) -> FleetRun:
    """A fleet serves what its devices do; a run needs the more the longer its prompts are."""
    served = sum(TRUTHS[each.device] * count for each, count in task.case.parts)
    load = task.load
    assert load.arrivals is not None
    needed = float(load.num_output_tokens.mean()) / 10 * len(load) / float(load.arrivals[-1])
    good = min(1.0, 0.9 * served / needed)
    return FleetRun(
        is_met=good >= 0.9, reason=f"{good:.3f}", attainment=good, binds="" if good == 1 else "TTFT"
    )


def search(task: FleetSearch, *_: Any) -> Bracket:
    def judge(rate: float) -> FleetRun:
        return run(replace(task.task, load=task.task.load.at_rate(rate)))

    return search_rate(judge, start=task.start, options=task.options, low=task.low, high=task.high)


class Eager(Pool):
    """Runs ahead whatever is likely, and counts it."""

    def __init__(self, most: float = float("inf")) -> None:
        super().__init__(1)
        self.num_begun, self.most = 0, most

    @property
    def num_idle(self) -> int:
        return 3

    def begin(self, worker: Any, task: Any) -> Callable[[], Any]:
        self.num_begun += 1
        found = worker(task, quiet()) if self.num_begun <= self.most else None
        return lambda: found

    def run(self, worker: Any, tasks: Any, **_: Any) -> list[Any]:
        return [worker(task, quiet()) for task in tasks]


class Counting(Eager):
    """Begins nothing ahead."""

    num_idle = 0


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[FleetPlan]]:
    """Return the plans that a pool finds, one after the other."""
    monkeypatch.setattr(fleet_plan, "run_fleet", run)
    monkeypatch.setattr(fleet_plan, "search_fleet", search)
    rates = {"l4": 2.0, "a10g": 5.0}

    def plan(pool: Pool, **changes: Any) -> list[FleetPlan]:
        runs = tuple(load_of([(100, each)] * 40, SLO(ttft=5.0)).at_rate(RATE) for each in (9, 10, 12, 11))
        task = PlanTask(
            rate=RATE,
            objective=ShareObjective(share=0.9),
            load=runs[0],
            runs=runs,
            available=(("l4", 20.0), ("a10g", 20.0)),
        )
        buckets = buckets_of(task.load)
        units = [unit(each, COSTS[each], [rates[each]] * len(buckets)) for each in rates]
        found = []
        for each in PlanSearch(task=replace(task, **changes), pool=pool).plans(units, {}):
            found.append(each)
        return found

    return plan


def test_a_plan_does_not_depend_on_what_idle_processes_run_ahead(plans: Any) -> None:
    alone, ahead = Counting(), Eager()
    first, last = plans(alone), plans(ahead)
    assert ahead.num_begun > alone.num_begun
    assert [each.best for each in first] == [each.best for each in last]
    assert [each.failed for each in first] == [each.failed for each in last]
    assert first[-1].alternatives == last[-1].alternatives


def test_the_answer_comes_first_and_stays(plans: Any) -> None:
    found, whole = plans(Counting())
    assert found.best is not None
    assert len(found.best.runs) == 4, "it has been simulated in all runs"
    assert found.best.usd_per_hour == pytest.approx(6.0), "6 L4 serve 12.6; 5, or 1 and 2 A10G, do not"
    assert whole.best.parts == found.best.parts
    assert found.best.capacity is None
    assert whole.best.capacity is not None
    assert whole.best.capacity[0] >= RATE


def test_what_cannot_be_kept_is_told_first_and_then_what_could_be(plans: Any) -> None:
    found, whole = plans(Counting(), available=(("l4", 2.0), ("a10g", 1.0)))
    assert found.best is None
    assert found.infeasible == whole.infeasible != ""
    assert found.nearest == ()
    assert whole.nearest


def test_an_interruption_before_the_answer_is_an_error(plans: Any) -> None:
    with pytest.raises(PlanInterrupted):
        plans(Eager(most=2))
