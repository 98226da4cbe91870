"""Whole fleets: how they are built, and what a run of one shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onbeat.core.options import change
from onbeat.core.slo import SLO
from onbeat.planner.fleets import FleetCase, FleetTask, run_fleet
from onbeat.planner.share_objectives import AttainmentObjective
from onbeat.planner.units import Unit
from onbeat.scheduler.cluster.scaling import ScaleBounds
from onbeat.simulator.simulate import simulate
from tests.pure.planner.fakes import QuietContext
from tests.pure.planner.test_units import BASE, load_of

SHORT = Unit(settings=change(BASE, max_model_len=1024), usd_per_hour=1.0, watts=1.0)
LONG = Unit(settings=change(BASE, max_model_len=8192), usd_per_hour=2.0, watts=1.0)


def test_a_planned_fleet_has_as_many_replicas_as_it_costs() -> None:
    scaled = change(BASE, autoscale=ScaleBounds(4, 4))
    config = FleetCase(parts=((Unit(settings=scaled, usd_per_hour=1.0, watts=1.0), 2),)).build().config
    assert config.num_replicas == 2
    assert config.autoscale is None


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
        objective=AttainmentObjective(share=0.9),
    )
    run = run_fleet(task, QuietContext())
    assert run is not None
    assert run.attainment == pytest.approx(attainment)
    assert run.is_met == (attainment >= 0.9)
    assert run.binds == ("" if attainment == 1.0 else "refused")


def test_a_fleet_that_takes_no_request_does_not_keep_a_promise() -> None:
    load = load_of([(4000, 10)] * 3, SLO(ttft=5.0))
    task = FleetTask(case=FleetCase(parts=((SHORT, 1),)), load=load, objective=AttainmentObjective())
    run = run_fleet(task, QuietContext())
    assert run is not None
    assert not run.is_met


def test_a_load_is_held_against_the_replicas_with_the_longest_context() -> None:
    """Whichever kind is named first: the fleet sends what is long to those that take it."""
    built = FleetCase(parts=((SHORT, 1), (LONG, 1))).build()
    kinds = tuple(reversed(built.config.kinds))
    config = replace(built.config, scheduler=kinds[0].scheduler, kinds=kinds)
    result = simulate(load_of([(100, 10), (4000, 10)]), config, built.step_time)
    assert result.num_completed == 2
