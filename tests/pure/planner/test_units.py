"""Buckets of a load, and what units serve of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.options import make
from onbeat.core.slo import SLO
from onbeat.planner.prices import Prices
from onbeat.planner.units import RatedUnit, buckets_of, make_units, rate_unit, rows_of, without_dominated
from onbeat.simulator.deployment import Deployment
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.slo_classes import SLOClass

BASE = make(Deployment, model="meta-llama/Llama-3.1-8B", device="h100-sxm")


def load_of(sizes: list[tuple[int, int]], *slos: SLO) -> OfferedLoad:
    prompts, outputs = (np.array(column) for column in zip(*sizes, strict=True))
    load = OfferedLoad(
        name="test",
        num_prompt_tokens=prompts,
        num_output_tokens=outputs,
        arrivals=np.arange(1.0, len(sizes) + 1),
    )
    classes = [SLOClass(name=str(n), slo=slo, share=1 / len(slos)) for n, slo in enumerate(slos)]
    return load.with_classes(classes, seed=0) if slos else load


def rated(load: OfferedLoad, device: str, *degrees: int) -> list[RatedUnit]:
    units, _ = make_units(BASE, degrees=degrees, available={device: 8}, prices=Prices())
    return [rate_unit(unit, buckets_of(load)) for unit in units]


def test_buckets_hold_each_request_once_by_size_and_class() -> None:
    load = load_of([(100, 10), (110, 12), (3000, 10), (3000, 400)] * 4, SLO(ttft=1.0), SLO(ttft=9.0))
    buckets = buckets_of(load)
    assert sum(bucket.share for bucket in buckets) == pytest.approx(1.0)
    assert rows_of(buckets).tolist() == list(range(16))
    assert {bucket.slo.ttft for bucket in buckets} == {1.0, 9.0}
    small = [bucket for bucket in buckets if bucket.num_prompt_tokens < 128]
    assert {bucket.num_prompt_tokens for bucket in small} <= {100, 105, 110, 103, 107, 102, 108, 106, 104}


def test_a_tighter_objective_and_a_longer_request_leave_less() -> None:
    def rate(
        sizes: list[tuple[int, int]], tbt: float, *, ttft: float = 5.0, device: str = "h100-sxm"
    ) -> float:
        load = load_of(sizes, SLO(ttft=ttft, tbt=tbt))
        return rated(load, device, 1)[0].rate(buckets_of(load))

    assert rate([(1000, 200)], 0.02) < rate([(1000, 200)], 0.05)
    assert rate([(8000, 200)], 0.05) < rate([(1000, 200)], 0.05)
    assert rate([(1000, 200)], 0.1, device="l4") < rate([(1000, 200)], 0.1)
    assert rate([(1000, 200)], 0.05, ttft=0.5, device="l4") == 0  # its memory is read in more than that
    assert rate([(30_000, 200)], 0.1, ttft=0.5, device="h100-sxm") == 0


def test_units_that_serve_no_more_for_their_money_are_left_out() -> None:
    load = load_of([(1000, 200)], SLO(ttft=1.0, tbt=0.1))
    kept, left_out = without_dominated(rated(load, "h100-sxm", 1, 2, 4))
    assert [each.unit.name for each in kept] == ["H100-SXM"]
    assert "H100-SXM" in left_out["4 H100-SXM"]
    tight = load_of([(1000, 200)], SLO(ttft=0.1, tbt=0.004))
    kept, left_out = without_dominated(rated(tight, "h100-sxm", 1, 4))
    assert [each.unit.name for each in kept] == ["4 H100-SXM"]
    assert "even alone" in left_out["H100-SXM"]


def test_what_cannot_be_a_unit_says_why() -> None:
    large = make(Deployment, model="meta-llama/Llama-3.1-70B", device="l4")
    units, left_out = make_units(large, degrees=[1, 8, 16], available={"l4": 8}, prices=Prices())
    assert [unit.name for unit in units] == ["8 L4"]
    assert units[0].usd_per_hour == pytest.approx(5.6)
    assert units[0].watts == 8 * 72
    assert "fit" in left_out["L4"]
    assert "only 8 L4" in left_out["16 L4"]
    with pytest.raises(ConfigError, match="price of l40s"):
        make_units(BASE, degrees=[1], available={"l40s": 1}, prices=Prices())


def test_two_devices_a_replica_pay_under_a_tight_objective_alone() -> None:
    """MLC's engine study: tensor parallelism is worth its devices where tokens must come quickly."""

    def per_device(tbt: float) -> list[float]:
        load = load_of([(300, 500)], SLO(tbt=tbt))
        buckets = buckets_of(load)
        return [each.rate(buckets) / each.unit.num_devices for each in rated(load, "h100-sxm", 1, 2)]

    one, two = per_device(0.007)
    assert two > one > 0
    one, two = per_device(0.015)
    assert two <= 1.05 * one


def test_what_a_dollar_serves_never_falls_as_the_objective_gets_longer() -> None:
    def best(tbt: float) -> float:
        load = load_of([(686, 197), (417, 139), (1678, 484), (100, 300)], SLO(tbt=tbt))
        found = [each for device in ("h100-sxm", "l4", "a10g") for each in rated(load, device, 1, 2)]
        all_sizes = [each for each in found if (each.rates > 0).all()]
        return max((each.rate(buckets_of(load)) / each.unit.usd_per_hour for each in all_sizes), default=0.0)

    served = [best(tbt) for tbt in (0.005, 0.007, 0.01, 0.02, 0.06, 0.1, 0.3)]
    assert served == sorted(served)
    assert any(later > 1.3 * earlier for earlier, later in pairwise(served))
