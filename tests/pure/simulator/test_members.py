"""Replicas that join or leave while a simulation runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onbeat.core.errors import ConfigError
from onbeat.scheduler.cluster.routers import ROUTERS
from onbeat.simulator.config import MemberChange
from onbeat.simulator.simulate import simulate
from tests.pure.simulator.loads import ShapeTime, linear_time, make_config, make_load, random_load

SECOND = ShapeTime(lambda shape: 1.0)


@pytest.mark.parametrize("router", ROUTERS)
def test_a_replica_serves_from_when_it_joins_and_drains_when_it_leaves(router):
    changes = (MemberChange(10.0, 1, joins=True), MemberChange(20.0, 0, joins=False))
    load = random_load(300, rate=10.0, seed=2)
    config = make_config(router=router, num_replicas=2, member_changes=changes)
    result = simulate(load, config, ShapeTime(lambda shape: 0.2))
    assert result.num_completed == 300
    of = {name: [each for each in result.records if each.replica == name] for name in "01"}
    assert all(each.arrival >= 10.0 for each in of["1"])
    assert all(each.arrival < 20.0 for each in of["0"])
    assert any(each.end > 20.0 for each in of["0"])  # what it had
    assert any(each.arrival < 20.0 for each in of["1"])
    assert all(each.num_leaked_blocks == 0 for each in result.replicas)


def test_a_change_comes_before_the_requests_of_its_instant():
    config = make_config(num_replicas=2, member_changes=(MemberChange(1.0, 0, joins=False),))
    records = simulate(make_load([8] * 3, [1] * 3, [0.0, 1.0, 1.0]), config, SECOND).records
    assert [record.replica for record in records] == ["0", "1", "1"]


def test_members_that_never_change_make_no_difference():
    load = random_load(100, rate=20.0, seed=3)
    config = make_config(num_replicas=3)
    late = replace(config, member_changes=(MemberChange(1e6, 0, joins=False),))
    assert simulate(load, config, linear_time()).records == simulate(load, late, linear_time()).records


def test_the_last_member_stays():
    config = make_config(member_changes=(MemberChange(1.0, 0, joins=False),))
    with pytest.raises(ConfigError, match="replica 0 cannot leave"):
        simulate(make_load([8] * 2, [1] * 2, [0.0, 2.0]), config, SECOND)


@pytest.mark.parametrize(
    "change", [(-1.0, 0, True), (float("nan"), 0, True), (1.0, 2, False), (1.0, -1, True)]
)
def test_impossible_changes_are_refused(change):
    with pytest.raises(ConfigError, match="2 replicas, counted from 0"):
        make_config(num_replicas=2, member_changes=(MemberChange(*change),))
