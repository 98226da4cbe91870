"""Placements of DistServe: replicas for prompts, replicas for generation, and how many GPUs each takes.

`across` is DistServe's search where KV goes quickly from any GPU to any other (Algorithm 1): each phase gets
the degrees of parallelism with the highest goodput per GPU, each searched alone, and as many replicas as the
rate needs. `within` is the search where KV must stay within a machine (Algorithm 2): pairs of a replica for
prompts and one for generation that fit one machine together, searched together. What either proposes is
simulated as a whole, and grows by what binds until it keeps the promise.

References
----------
Zhong et al., "DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large Language Model
Serving", OSDI 2024, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Any, Literal

import numpy as np

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import PoolSizes
from onbeat.core.options import change
from onbeat.core.slo import SLO
from onbeat.planner.cases import BuiltCase, Labels
from onbeat.planner.fleets import FleetCapacity, FleetRun, FleetSearch, FleetTask, run_fleet, search_fleet
from onbeat.planner.plan_task import PlanTask, attainment_of
from onbeat.planner.search import SearchOptions
from onbeat.planner.units import Unit
from onbeat.simulator.result import SimulationResult
from onbeat.simulator.setup import build_simulation
from onbeat.workload.offered import OfferedLoad

Search = Literal["across", "within"]

POLICY = "sarathi"
"""Of both pools, as in DistServe: each phase has its own objective, and nobody gives way to another."""
PROMPT_BUDGET = 2048
"""Tokens of a step for prompts; beyond it their throughput falls (Patel et al., Splitwise, ISCA 2024)."""
MACHINE = 8
"""GPUs of one machine."""
PLENTY = 8
"""Replicas for prompts beside one for generation, where generation alone is searched."""
MOST_GROWTH = 8
"""Replicas that are added to a placement until it keeps the promise."""
START = 4.0
"""Requests per second at which a search starts."""
OPTIONS = SearchOptions(tolerance=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledCase:
    """Replicas for prompts and replicas for generation."""

    prefill: tuple[Unit, int]
    decode: tuple[Unit, int]
    labels: Labels = ()

    def build(self) -> BuiltCase:
        """Make the parts anew.

        Raises
        ------
        ConfigError : they do not fit together.
        """
        (prompts, num_prefill), (tokens, num_decode) = self.prefill, self.decode
        pools = PoolSizes(prefill=num_prefill, decode=num_decode)
        first, second = (
            build_simulation(change(settings, policy=POLICY, disaggregate=pools, pool_rule="distserve"))
            for settings in (
                change(prompts.settings, max_num_batched_tokens=PROMPT_BUDGET),
                tokens.settings,
            )
        )
        config = replace(
            first.config, kinds=(first.config.kinds[0],) * num_prefill + (second.config.kinds[-1],)
        )
        return BuiltCase(config, first.step_time, self.num_devices)

    @property
    def num_devices(self) -> int:
        return sum(unit.num_devices * count for unit, count in (self.prefill, self.decode))

    def busy(self, result: SimulationResult) -> dict[str, float]:
        """Return the share of a run in which replicas computed, by what they are for."""
        duration = max(result.duration, 1e-9)
        shares = [counters.busy_seconds / duration for counters in result.replicas]
        num_prefill = self.prefill[1]
        return {
            "prompts": float(np.mean(shares[:num_prefill])),
            "generation": float(np.mean(shares[num_prefill:])),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Two pools, with what simulated runs of the whole showed."""

    search: Search
    case: PooledCase
    runs: tuple[FleetRun, ...]

    @property
    def name(self) -> str:
        (prompts, num_prefill), (tokens, num_decode) = self.case.prefill, self.case.decode
        return f"{prompts.times(num_prefill)} for prompts, {tokens.times(num_decode)} for generation"

    @property
    def usd_per_hour(self) -> float:
        return sum(unit.usd_per_hour * count for unit, count in (self.case.prefill, self.case.decode))

    @property
    def is_kept(self) -> bool:
        return all(run.is_met for run in self.runs)

    @property
    def attainment(self) -> tuple[float, float, float] | None:
        """See `attainment_of`."""
        return attainment_of(self.runs)


Results = Callable[[Any, Sequence[Any], Callable[..., Any]], list[Any]]
"""Runs tasks by a worker, and makes their results (`fleet_plan.Planner.results`)."""


class PlacementSearch:
    """Both searches of DistServe, on one type of device.

    Parameters
    ----------
    units : replicas of that type, by degree; each can hold the model.
    results : runs tasks.
    """

    def __init__(self, task: PlanTask, units: Sequence[Unit], results: Results) -> None:
        self._task, self._units, self._results = task, units, results
        device = units[0].device
        self._available = dict(task.available).get(device, float("inf"))

    def run(self) -> list[Placement]:
        """Return what each search proposes, grown until it keeps the promise or all devices are used."""
        found = []
        proposed: list[tuple[Search, PooledCase | None]] = [
            ("across", self._across()),
            ("within", self._within()),
        ]
        for search, case in proposed:
            grown = None if case is None else self._grown(search, case)
            if grown is not None:
                found.append(grown)
        return found

    def goodputs(self) -> tuple[list[float], list[float]]:
        """Return what one replica of each unit serves alone: of prompts, and of generation, requests/s."""
        load = self._task.runs[0]
        prompts_only = _held_to(replace(load, num_output_tokens=np.ones_like(load.num_output_tokens)), "ttft")
        tokens_only = _held_to(load, "tbt")
        searches = [
            self._search(PooledCase(prefill=(unit, 1), decode=(unit, 1)), prompts_only)
            for unit in self._units
        ]
        searches += [
            self._search(PooledCase(prefill=(unit, PLENTY), decode=(unit, 1)), tokens_only)
            for unit in self._units
        ]
        rates = [each.low for each in self._results(search_fleet, searches, FleetCapacity)]
        return rates[: len(self._units)], rates[len(self._units) :]

    def _across(self) -> PooledCase | None:
        """Return the placement of Algorithm 1."""
        prefill, decode = map(self._best, self.goodputs())
        if prefill is None or decode is None:
            return None
        return PooledCase(prefill=self._enough(*prefill), decode=self._enough(*decode))

    def _best(self, rates: Sequence[float]) -> tuple[Unit, float] | None:
        """Return the unit with the highest rate per device, and its rate; of equals the smallest."""
        pairs = [(unit, rate) for unit, rate in zip(self._units, rates, strict=True) if rate > 0]
        return max(
            pairs, key=lambda pair: (pair[1] / pair[0].num_devices, -pair[0].num_devices), default=None
        )

    def _enough(self, unit: Unit, rate: float) -> tuple[Unit, int]:
        return unit, ceil(self._task.needed_rate / rate - 1e-9)

    def _within(self) -> PooledCase | None:
        """Return the placement of Algorithm 2: as many equal pairs as the rate needs."""
        pairs = [
            PooledCase(prefill=(prompts, 1), decode=(tokens, 1))
            for prompts, tokens in product(self._units, repeat=2)
            if prompts.num_devices + tokens.num_devices <= min(MACHINE, self._available)
        ]
        searches = [self._search(pair, self._task.runs[0]) for pair in pairs]
        rates = [each.low for each in self._results(search_fleet, searches, FleetCapacity)]
        feasible = [
            (rate / pair.num_devices, rate, pair) for rate, pair in zip(rates, pairs, strict=True) if rate
        ]
        if not feasible:
            return None
        _, rate, pair = max(feasible, key=lambda entry: (entry[0], -entry[2].num_devices))
        count = self._enough(pair.prefill[0], rate)[1]
        return PooledCase(prefill=(pair.prefill[0], count), decode=(pair.decode[0], count))

    def _search(self, case: PooledCase, load: OfferedLoad) -> FleetSearch:
        return FleetSearch(case=case, load=load, objective=self._task.objective, start=START, options=OPTIONS)

    def _grown(self, search: Search, case: PooledCase) -> Placement | None:
        """Return a placement with replicas added for what binds; None where the devices do not suffice."""
        last: Placement | None = None
        for _ in range(MOST_GROWTH + 1):
            if case.num_devices > self._available:
                return last
            tasks = [
                FleetTask(case=case, load=load, objective=self._task.objective, to_the_end=True)
                for load in self._task.runs
            ]
            last = Placement(search=search, case=case, runs=tuple(self._results(run_fleet, tasks, FleetRun)))
            if last.is_kept:
                return last
            binds = [run.binds for run in last.runs if not run.is_met]
            (prompts, num_prefill), (tokens, num_decode) = case.prefill, case.decode
            if binds.count("TBT") > len(binds) / 2 or search == "within":
                case = replace(case, decode=(tokens, num_decode + 1))
            if binds.count("TBT") <= len(binds) / 2 or search == "within":
                case = replace(case, prefill=(prompts, num_prefill + 1))
        return last


def _held_to(load: OfferedLoad, name: Literal["ttft", "tbt"]) -> OfferedLoad:
    """Return a load of which one objective alone counts."""
    classes = tuple(
        replace(each, slo=SLO(ttft=each.slo.ttft) if name == "ttft" else SLO(tbt=each.slo.tbt))
        for each in load.classes
    )
    if all(each.slo.is_empty for each in classes):
        raise ConfigError(
            "pools for prompts and for generation need an objective each; give --slo-ttft-ms and --slo-tbt-ms"
        )
    return replace(load, classes=classes)
