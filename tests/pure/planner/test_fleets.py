"""Whole fleets: how they are built, and what a run of one shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from onbeat.core.fleet import PoolSizes
from onbeat.core.options import change
from onbeat.core.slo import SLO
from onbeat.planner import fleets
from onbeat.planner.fleet_plan import PlanSearch
from onbeat.planner.fleets import FleetCase, FleetRun, FleetSearch, FleetTask, run_fleet, search_fleet
from onbeat.planner.objectives import ShareObjective
from onbeat.planner.plan_task import PlannedFleet, PlanTask
from onbeat.planner.search import SearchOptions
from onbeat.planner.units import RatedUnit, Unit, buckets_of, pools_for, rate_unit
from onbeat.scheduler.cluster.scaling import ScaleBounds
from onbeat.simulator.simulate import simulate
from tests.pure.planner.fakes import Hearing, quiet
from tests.pure.planner.test_units import BASE, load_of

SHORT = Unit(settings=change(BASE, max_model_len=1024), usd_per_hour=1.0, watts=1.0)
LONG = Unit(settings=change(BASE, max_model_len=8192), usd_per_hour=2.0, watts=1.0)


def test_a_planned_fleet_has_as_many_replicas_as_it_costs() -> None:
    scaled = change(BASE, autoscale=ScaleBounds(4, 4))
    config = FleetCase(parts=((Unit(settings=scaled, usd_per_hour=1.0, watts=1.0), 2),)).build().config
    assert config.num_replicas == 2
    assert config.fleet.autoscale is None


@pytest.mark.parametrize(
    ("sizes", "units", "attainment"),
    [
        ([(100, 10)] * 19 + [(4000, 10)], [SHORT], 0.95),
        ([(100, 10)] * 19 + [(4000, 10)], [SHORT, LONG], 1.0),
        ([(100, 10)] * 16 + [(4000, 10)] * 4, [SHORT], 0.8),
    ],
)
def test_requests_that_no_replica_takes_count_as_not_good(
    sizes: list[tuple[int, int]], units: list[Unit], attainment: float
) -> None:
    task = FleetTask(
        case=FleetCase(parts=tuple((unit, 1) for unit in units)),
        load=load_of(sizes, SLO(ttft=5.0)),
        objective=ShareObjective(share=0.9),
    )
    run = run_fleet(task, quiet())
    assert run is not None
    assert run.attainment == pytest.approx(attainment)
    assert run.is_met == (attainment >= 0.9)
    assert run.binds == ("" if attainment == 1.0 else "refused")


def test_a_fleet_that_takes_no_request_does_not_keep_a_promise() -> None:
    load = load_of([(4000, 10)] * 3, SLO(ttft=5.0))
    task = FleetTask(case=FleetCase(parts=((SHORT, 1),)), load=load, objective=ShareObjective())
    run = run_fleet(task, quiet())
    assert run is not None
    assert not run.is_met


def test_a_load_is_held_against_the_replicas_with_the_longest_context() -> None:
    """Whichever kind is named first: the fleet sends what is long to those that take it."""
    built = FleetCase(parts=((SHORT, 1), (LONG, 1))).build()
    kinds = tuple(reversed(built.config.kinds))
    config = replace(built.config, scheduler=kinds[0].scheduler, kinds=kinds)
    result = simulate(load_of([(100, 10), (4000, 10)]), config, built.step_time)
    assert result.num_completed == 2


def test_a_search_runs_nothing_twice_and_nothing_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []

    def run(task: FleetTask, _context: object) -> FleetRun:
        assert task.load.rate is not None
        rates.append(round(task.load.rate, 3))
        assert not task.to_the_end
        return FleetRun(is_met=task.load.rate < 12.0, reason="too slow", binds="TBT")

    monkeypatch.setattr(fleets, "run_fleet", run)
    search = FleetSearch(
        task=FleetTask(
            case=FleetCase(parts=((SHORT, 1),)),
            load=load_of([(100, 10)] * 20, SLO(ttft=5.0)),
            objective=ShareObjective(share=0.9),
        ),
        start=11.0,
        options=SearchOptions(tolerance=0.105, growth=1.1),
        low=10.0,
    )
    found = search_fleet(search, quiet())
    assert found is not None
    assert len(rates) == len(set(rates)) == 2
    assert 10.0 not in rates
    assert found.low < 12.0 <= found.high <= 1.105 * found.low
    assert found.limit.binds == "TBT", "of the run that missed, which was ended early"


def test_a_run_ends_once_those_late_without_a_first_token_are_too_many() -> None:
    """Prompts that are left behind end last: counted as they end, they would show up when all is over."""
    sizes = [(900, 100)] * 400
    overload = load_of(sizes, SLO(ttft=0.5, tbt=0.05)).at_rate(200.0)
    task = FleetTask(case=FleetCase(parts=((SHORT, 1),)), load=overload, objective=ShareObjective(share=0.9))
    heard = Hearing()
    run, whole = (run_fleet(each, heard.context) for each in (task, replace(task, to_the_end=True)))
    assert heard.events == [run, whole], "progress is told"
    assert run is not None
    assert whole is not None
    assert not run.is_met
    assert not whole.is_met
    assert whole.attainment is not None
    assert run.binds == whole.binds == "TTFT"
    num_ended = int(run.reason.split(" after ")[1].split()[0])
    assert num_ended < 0.5 * len(overload)


def test_pools_are_simulated_as_a_server_with_them_would_run() -> None:
    case = FleetCase(parts=((SHORT, 3),), pools=PoolSizes(prefill=1, decode=2))
    config = case.build().config
    assert (config.num_replicas, config.fleet.disaggregate) == (3, case.pools)
    assert config.kv_link is not None
    task = FleetTask(case=case, load=load_of([(100, 10)] * 20, SLO(ttft=5.0)), objective=ShareObjective())
    run = run_fleet(task, quiet())
    assert run is not None
    assert run.attainment == 1.0


@pytest.mark.parametrize(
    ("needs", "tried"),
    [
        ((2, 1), ["2+1"]),
        ((3, 1), ["2+1", "3+1"]),
        ((2, 3), ["2+1", "2+2", "2+3"]),
        ((9, 1), ["2+1", "3+1", "4+1"]),
    ],
)
def test_a_plan_tries_a_short_list_of_pools_towards_what_was_late(
    needs: tuple[int, int], tried: list[str]
) -> None:
    """`needs` replicas for prompts and for generation keep the promise; fewer are late."""
    load = load_of([(100, 10)] * 20, SLO(ttft=5.0))
    objective = ShareObjective()
    task = PlanTask(rate=1.0, objective=objective, load=load, runs=(load,), available=(("h100-sxm", 8.0),))

    class Pretended(PlanSearch):
        def judge(self, parts: Any, *, pools: Any = None, **_: Any) -> PlannedFleet:
            is_late, is_slow = pools.prefill < needs[0], pools.decode < needs[1]
            run = FleetRun(is_met=not is_late and not is_slow, reason="", binds="TTFT" if is_late else "TBT")
            return PlannedFleet(parts=parts, pools=pools, runs=(run,))

    def apart(cost: float) -> list[PlannedFleet]:
        return Pretended(task=task)._apart(rated, sizes, cost)

    rated = [RatedUnit(unit=each, rates=np.ones(1)) for each in (SHORT, LONG)]
    sizes = {SHORT.name: PoolSizes(prefill=2, decode=1)}
    found = apart(9.0)
    assert [f"{each.pools.prefill}+{each.pools.decode}" for each in found if each.pools] == tried
    assert found[-1].is_kept == (needs != (9, 1))
    assert [each.usd_per_hour < 4.0 for each in apart(4.0)] == [True], "the next would cost as much"
    assert apart(3.0) == [], "it costs as much as a fleet without pools"


def test_pools_are_as_large_as_a_queue_of_prompts_and_steps_of_decodes_ask() -> None:
    def pools(sizes: tuple[int, int], slo: SLO, rate: float) -> PoolSizes | None:
        load = load_of([sizes] * 20, slo)
        return pools_for(rate_unit(LONG, buckets_of(load)), buckets_of(load), rate)

    usual = pools((2000, 200), SLO(ttft=1.0, tbt=0.05), 400.0)
    assert usual is not None
    longer = pools((4000, 200), SLO(ttft=1.0, tbt=0.05), 400.0)
    assert longer is not None
    assert longer.prefill > 1.8 * usual.prefill
    tighter = pools((2000, 200), SLO(ttft=0.15, tbt=0.05), 400.0)
    assert tighter is not None
    assert tighter.prefill > usual.prefill
    assert tighter.decode == usual.decode
    stricter = pools((2000, 200), SLO(ttft=1.0, tbt=0.012), 400.0)
    assert stricter is not None
    assert stricter.decode > usual.decode
    assert stricter.prefill == usual.prefill
    assert pools((2000, 200), SLO(ttft=0.01), 40.0) is None, "not even an idle replica is in time"
