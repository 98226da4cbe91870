"""Whole fleets: how they are built, and what a run of one shows."""

from __future__ import annotations

from onbeat.core.options import change
from onbeat.planner.fleets import FleetCase
from onbeat.planner.units import Unit
from onbeat.scheduler.cluster.scaling import ScaleBounds
from tests.pure.planner.test_units import BASE


def test_a_planned_fleet_has_as_many_replicas_as_it_costs() -> None:
    scaled = change(BASE, autoscale=ScaleBounds(4, 4))
    config = FleetCase(parts=((Unit(settings=scaled, usd_per_hour=1.0, watts=1.0), 2),)).build().config
    assert config.num_replicas == 2
    assert config.autoscale is None
