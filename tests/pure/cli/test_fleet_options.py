"""What `onbeat serve` can be told of a fleet."""

from __future__ import annotations

import pytest

from onbeat.cluster.config import FleetOptions
from onbeat.core.errors import ConfigError
from onbeat.core.fleet import PoolSizes, parse_pools


def test_pools_are_all_replicas() -> None:
    options = FleetOptions(disaggregate=parse_pools("decode=2, prefill=1"))
    assert options.disaggregate == PoolSizes(prefill=1, decode=2)
    assert (options.num_replicas, options.num_prefill) == (3, 1)
    assert (FleetOptions(replicas=2).num_replicas, FleetOptions().num_prefill) == (2, 0)


@pytest.mark.parametrize(
    "text", ["", "1,2", "prefill=1", "prefill=0,decode=1", "prefill=1,decode=-1", "prefill=1,decode=1,x=1"]
)
def test_pools_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"such as prefill=1,decode=2"):
        parse_pools(text)


def test_what_does_not_go_together() -> None:
    pools = PoolSizes(prefill=1, decode=1)
    with pytest.raises(ConfigError, match="is 2 replicas, but --replicas is 4"):
        FleetOptions(replicas=4, disaggregate=pools)
    with pytest.raises(ConfigError, match="leave out --kv-transport none"):
        FleetOptions(disaggregate=pools, kv_transport="none")
