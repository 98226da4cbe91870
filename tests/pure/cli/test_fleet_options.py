"""What a fleet can be told, by `serve` and by `simulate`."""

from __future__ import annotations

from typing import Any

import pytest

from onbeat.cluster.fleet_options import FleetOptions
from onbeat.core.errors import ConfigError
from onbeat.core.fleet import PoolSizes, parse_pools
from onbeat.scheduler.cluster.fleet_config import FleetConfig
from onbeat.scheduler.cluster.scaling import ScaleBounds


def test_pools_are_all_replicas() -> None:
    options = FleetConfig(disaggregate=parse_pools("decode=2, prefill=1"))
    assert options.disaggregate == PoolSizes(prefill=1, decode=2)
    assert (options.num_replicas, options.num_prefill) == (3, 1)
    assert (FleetConfig(replicas=2).num_replicas, FleetConfig().num_prefill) == (2, 0)


@pytest.mark.parametrize(
    "text", ["", "1,2", "prefill=1", "prefill=0,decode=1", "prefill=1,decode=-1", "prefill=1,decode=1,x=1"]
)
def test_pools_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="prefill=1,decode=2"):
        parse_pools(text)


def test_what_does_not_go_together() -> None:
    pools = PoolSizes(prefill=1, decode=1)
    with pytest.raises(ConfigError, match=r"2.*--replicas.*4"):
        FleetConfig(replicas=4, disaggregate=pools)
    with pytest.raises(ConfigError, match="--kv-transport"):
        FleetOptions(fleet=FleetConfig(disaggregate=pools), kv_transport="none")


def test_a_fleet_that_scales_itself_begins_with_the_fewest() -> None:
    bounds = ScaleBounds(2, 4)
    options = FleetConfig(autoscale=bounds)
    assert (options.first_replicas, options.most_replicas) == (2, 4)
    assert FleetConfig(autoscale=bounds, replicas=3).first_replicas == 3
    assert FleetConfig(autoscale=ScaleBounds(0, 4)).first_replicas == 1, "the model's limits come from it"
    assert (FleetConfig(replicas=2).first_replicas, FleetConfig(replicas=2).most_replicas) == (2, 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"replicas": 5}, r"--replicas 5 .* --autoscale 3\.\.4"),
        ({"replicas": 2}, r"--replicas 2 .* --autoscale 3\.\.4"),
        ({"disaggregate": PoolSizes(prefill=1, decode=1)}, "which of the two pools is short"),
        ({"autoscale_policy": "freeness"}, "choose one of objective"),
    ],
    ids=["too many", "too few", "pools", "no policy"],
)
def test_what_does_not_go_with_scaling(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        FleetConfig(autoscale=ScaleBounds(3, 4), **options)


def test_how_to_scale_is_said_of_fleets_that_do() -> None:
    with pytest.raises(ConfigError, match=r"--autoscale MIN\.\.MAX"):
        FleetConfig(scale_down_seconds=60.0)
