"""Pools for prompts and for generation: what both searches propose, and how that grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.options import make
from onbeat.core.slo import SLO
from onbeat.planner.fleets import FleetCapacity, FleetRun, FleetSearch
from onbeat.planner.placement import PLENTY, PlacementSearch, PooledCase
from onbeat.planner.plan_task import PlanTask
from onbeat.planner.prices import Prices
from onbeat.planner.share_objectives import AttainmentObjective
from onbeat.planner.units import Unit, make_units
from onbeat.simulator.settings import ReplicaSettings
from tests.pure.planner.test_units import load_of

BASE = make(ReplicaSettings, model="meta-llama/Llama-3.1-8B", device="h100-sxm")


def units() -> list[Unit]:
    found, _ = make_units(
        BASE,
        devices=["h100-sxm"],
        tensor_parallel=[1, 2],
        pipeline_parallel=[1, 2],
        available={"h100-sxm": 2},
        prices=Prices(),
    )
    return found


class World:
    """Rates by what a replica is for and its name; fleets keep the promise once they are large enough."""

    def __init__(
        self, prompts: dict[str, float], tokens: dict[str, float], *, needs: tuple[int, int]
    ) -> None:
        self.prompts, self.tokens, self.needs = prompts, tokens, needs
        self.load = load_of([(1000, 100)] * 8, SLO(ttft=0.5, tbt=0.05))
        self.loads: list[Any] = []

    def results(self, _worker: Any, tasks: Sequence[Any], _make: Callable[..., Any]) -> list[Any]:
        return [self.search(task) if isinstance(task, FleetSearch) else self.run(task.case) for task in tasks]

    def search(self, task: FleetSearch) -> FleetCapacity:
        assert isinstance(task.case, PooledCase)
        self.loads.append(task.load)
        (one, num_prompts), (two, _) = task.case.prefill, task.case.decode
        if task.load.num_output_tokens.max() == 1:
            rate = self.prompts[one.name]
        elif num_prompts == PLENTY:
            rate = self.tokens[two.name]
        else:
            rate = min(self.prompts[one.name], self.tokens[two.name])
        return FleetCapacity(low=rate, high=rate, binds="TTFT")

    def run(self, case: PooledCase) -> FleetRun:
        lacks_prompts = case.prefill[1] < self.needs[0]
        is_met = not lacks_prompts and case.decode[1] >= self.needs[1]
        return FleetRun(is_met=is_met, reason="", attainment=1.0, binds="TTFT" if lacks_prompts else "TBT")

    def place(self, rate: float, available: int) -> list[Any]:
        task = PlanTask(
            rate=rate,
            objective=AttainmentObjective(share=0.9),
            load=self.load,
            runs=(self.load,),
            available=(("h100-sxm", available),),
        )
        return PlacementSearch(task, units(), self.results).run()


PROMPTS = {"H100-SXM": 4.0, "2 H100-SXM": 9.0, "2 H100-SXM in 2 stages": 8.0}
TOKENS = {"H100-SXM": 10.0, "2 H100-SXM": 12.0, "2 H100-SXM in 2 stages": 15.0}


def test_each_phase_has_the_degree_with_the_most_per_device() -> None:
    across, within = World(PROMPTS, TOKENS, needs=(1, 1)).place(18.0, 16)
    assert across.name == "2 \u00d7 (2 H100-SXM) for prompts, 2 \u00d7 H100-SXM for generation"
    assert across.usd_per_hour == pytest.approx(6 * 6.88)
    # Of pairs, two and one give 9 with three devices.
    assert within.name == "2 \u00d7 (2 H100-SXM) for prompts, 2 \u00d7 H100-SXM for generation"
    assert across.is_kept


def test_placements_grow_by_what_binds() -> None:
    across, _ = World(PROMPTS, TOKENS, needs=(4, 3)).place(18.0, 64)
    assert across.name == "4 \u00d7 (2 H100-SXM) for prompts, 3 \u00d7 H100-SXM for generation"
    assert World(PROMPTS, TOKENS, needs=(4, 3)).place(18.0, 4) == []


def test_phases_are_searched_by_their_own_objective() -> None:
    world = World(PROMPTS, TOKENS, needs=(1, 1))
    world.place(5.0, 16)
    assert [load.slo(0) for load in world.loads[:3]] == [SLO(ttft=0.5)] * 3
    assert [load.slo(0) for load in world.loads[3:6]] == [SLO(tbt=0.05)] * 3
    world.load = load_of([(1000, 100)], SLO(ttft=0.5))
    with pytest.raises(ConfigError, match="need an objective each"):
        world.place(5.0, 16)


def test_pools_are_built_with_their_own_degrees() -> None:
    one, two, _ = units()
    built = PooledCase(prefill=(one, 2), decode=(two, 1)).build()
    config = built.config
    assert (config.fleet.num_prefill, config.num_replicas, built.num_devices) == (2, 3, 4)
    prefill, same, decode = config.kinds
    assert same is prefill
    assert decode.scheduler.num_blocks > prefill.scheduler.num_blocks
    assert config.kv_link is not None
