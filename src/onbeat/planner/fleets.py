"""Whole fleets, simulated with the live router, to see whether a mix of units keeps a promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from onbeat.core.fleet import PoolSizes
from onbeat.core.options import change
from onbeat.core.slo import Fate
from onbeat.metrics.attainment import count_missed, judge
from onbeat.metrics.record import RequestRecord
from onbeat.metrics.summary import mean_tpot
from onbeat.planner.cases import BuiltCase, ObjectiveMissed, ReplicaCase, simulate_trial
from onbeat.planner.objectives import ShareObjective, Verdict
from onbeat.planner.parallel import TaskContext
from onbeat.planner.search import Bracket, SearchOptions, Stopped, search_rate
from onbeat.planner.units import Unit, longest_request
from onbeat.scheduler.cluster.fleet_config import FleetConfig
from onbeat.simulator.resolve import resolve
from onbeat.simulator.result import SimulationResult
from onbeat.workload.offered import OfferedLoad

ROUTER = "slo"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCase:
    """Replicas of one kind or several behind the router; each in its own number."""

    parts: tuple[tuple[Unit, int], ...]
    """What replicas of a kind are, and how many, at least 1."""
    pools: PoolSizes | None = None
    """Replicas of the one kind for prompts and for generation; None where each does both."""

    def build(self) -> BuiltCase:
        """Make the parts anew.

        Raises
        ------
        ConfigError : they do not fit together.
        """
        if self.pools is not None:
            ((unit, _),) = self.parts
            apart = change(unit.settings, router=ROUTER, disaggregate=self.pools)
            return ReplicaCase(settings=apart).build()
        built = [(resolve(unit.settings), count) for unit, count in self.ordered()]
        first = built[0][0]
        kinds = tuple(simulation.kind for simulation, count in built for _ in range(count))
        fleet = FleetConfig(replicas=len(kinds), router=ROUTER)
        config = replace(first.config, fleet=fleet, kinds=kinds)
        num_devices = sum(simulation.num_devices * count for simulation, count in built)
        return BuiltCase(config, first.step_time, num_devices)

    def ordered(self) -> list[tuple[Unit, int]]:
        """Return the parts in the order of their replicas: what takes the longest requests first."""
        return sorted(self.parts, key=lambda part: -longest_request(part[0]))

    def busy(self, result: SimulationResult) -> dict[str, float]:
        """Return the share of a run in which replicas computed, by the name of their unit."""
        counters = iter(result.replicas)
        duration = max(result.duration, 1e-9)
        busy = {
            unit.name: float(np.mean([next(counters).busy_seconds / duration for _ in range(count)]))
            for unit, count in self.ordered()
        }
        return {unit.name: busy[unit.name] for unit, _ in self.parts}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTask:
    """One run of one fleet."""

    case: FleetCase
    load: OfferedLoad
    objective: ShareObjective
    to_the_end: bool = False
    """Whether a run that misses is finished, for the sake of its numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRun(Verdict):
    """What one run showed."""

    attainment: float | None = None
    """Share of the requests with objectives that were good; None where the run was ended as missed."""
    busy: Mapping[str, float] | None = None
    """By the name of the unit, the share of the time in which its replicas computed."""
    mean_tpot: float | None = None
    """Of the requests, seconds."""
    by_class: Mapping[str, float] | None = None
    """Share of the good requests of each class of objectives; None where the run was ended as missed."""


def run_fleet(task: FleetTask, context: TaskContext) -> FleetRun | None:
    """Run one fleet, and report that; a worker of `parallel.Pool`. None where it was stopped.

    Requests that no replica takes, since they are too long, count as not good.
    """
    run = _run(task, context)
    if run is not None:
        context.report(run)
    return run


def _run(task: FleetTask, context: TaskContext) -> FleetRun | None:
    objective, load, built = task.objective, task.load, task.case.build()
    fits = load.num_prompt_tokens + load.num_output_tokens <= built.config.max_model_len
    if not fits.any():
        return FleetRun(is_met=False, reason="every request is too long", binds="refused")
    try:
        result = simulate_trial(
            built,
            load if fits.all() else load.take(np.flatnonzero(fits)),
            context.is_stopped,
            watched=None if task.to_the_end else objective,
        )
    except ObjectiveMissed as missed:
        return FleetRun(
            is_met=False, reason=missed.verdict.reason, binds=what_binds(missed.records, objective)
        )
    except Stopped:
        context.stop()
        return None
    too_long = [_refused(load, row) for row in np.flatnonzero(~fits).tolist()]
    result = replace(result, records=[*result.records, *too_long], num_requests=len(load))
    verdict = objective.judge(result)
    return FleetRun(
        is_met=verdict.is_met,
        reason=verdict.reason,
        attainment=verdict.measures[0].value if verdict.measures else None,
        binds=what_binds(result.records, objective),
        busy=task.case.busy(result),
        mean_tpot=mean_tpot(result.records),
        by_class=good_by_class(result.records, objective),
        beyond=result.beyond,
    )


def _refused(load: OfferedLoad, row: int) -> RequestRecord:
    """Return the record of a request that is too long for all replicas."""
    assert load.arrivals is not None
    class_ = load.request_class(row)
    return RequestRecord(
        request_id=str(row),
        arrival=float(load.arrivals[row]),
        num_prompt_tokens=int(load.num_prompt_tokens[row]),
        offered_output_tokens=int(load.num_output_tokens[row]),
        slo=load.slo(row),
        request_class=None if class_ is None else class_.name,
        fate=Fate.REJECTED,
        end=float(load.arrivals[row]),
    )


def good_by_class(records: Sequence[RequestRecord], objective: ShareObjective) -> dict[str, float]:
    """Return the share of good requests of each class of objectives that has any, by its name."""
    judged = judge(records, mode=objective.mode)
    names = sorted({record.request_class for record in judged.requests if record.request_class is not None})
    return {name: float(judged.of_class(name).good.mean()) for name in names}


def what_binds(records: Sequence[RequestRecord], objective: ShareObjective) -> str:
    """Return what most of the requests that are not good missed."""
    missed = count_missed(records, mode=objective.mode)
    return max(sorted(missed), key=missed.__getitem__, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSearch:
    """A search for the highest rate at which a fleet keeps the objective (`search_rate`)."""

    task: FleetTask
    """Its load is stretched and squeezed to the rates that are tried."""
    start: float
    """Requests per second; the nearer to the capacity, the fewer runs."""
    options: SearchOptions
    low: float = 0.0
    high: float = inf


def search_fleet(search: FleetSearch, context: TaskContext) -> Bracket | None:
    """Search one fleet; a worker of `parallel.Pool`. None where it was stopped."""
    task = search.task

    def judge(rate: float) -> Verdict:
        run = run_fleet(replace(task, load=task.load.at_rate(rate)), context)
        if run is None:
            raise Stopped
        return run

    bracket = search_rate(judge, start=search.start, options=search.options, low=search.low, high=search.high)
    return bracket if bracket.is_finished else None
