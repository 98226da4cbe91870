"""The planner: what units serve, which fleets keep the promise, how much room they have.

What each unit serves alone, by simulation: how far queues keep it from its steady rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf, isfinite, sqrt
from operator import attrgetter
from typing import Any, TypeVar

from onbeat.core.errors import counted
from onbeat.core.fleet import PoolSizes
from onbeat.core.options import changed
from onbeat.planner.fleets import FleetCase, FleetRun, FleetSearch, FleetTask, run_fleet, search_fleet
from onbeat.planner.mix_search import MixSearch, Parts, everything, most_of, unservable
from onbeat.planner.objectives import with_longer_objectives
from onbeat.planner.parallel import Pool, Worker
from onbeat.planner.plan_task import FleetPlan, PlanInterrupted, PlannedFleet, PlanProgress, PlanTask
from onbeat.planner.search import Bracket, SearchOptions
from onbeat.planner.units import (
    Bucket,
    RatedUnit,
    buckets_of,
    longest_request,
    pools_for,
    rate_unit,
    rows_of,
    share_in_time,
    without_dominated,
)
from onbeat.report.units import rate_text
from onbeat.workload.offered import OfferedLoad

SEARCH_SECONDS = 30.0
"""About so long is the load of a search: in less, queues do not grow, and fast units seem to serve more."""
LEAST_REQUESTS, MOST_REQUESTS = 200, 4000
"""Of that load."""
OPTIONS = SearchOptions(tolerance=0.3, growth=1.3)
"""Coarse: what a unit serves alone only says which fleets are tried first."""


@dataclass
class AloneSearch:
    """Holds the estimates against what units keep up alone.

    Parameters
    ----------
    buckets : of the load.
    results : runs tasks by a worker (`Planner.results`).
    """

    _task: PlanTask
    _buckets: Sequence[Bucket]
    _results: Callable[..., list[Any]]
    _progress: PlanProgress
    _known: dict[str, RatedUnit] = field(default_factory=dict, init=False)
    _useless: dict[str, str] = field(default_factory=dict, init=False)

    def calibrated(self, rated: Sequence[RatedUnit]) -> tuple[list[RatedUnit], dict[str, str]]:
        """Return the units worth their money with what they keep up, and why others are left out, by name.

        Units that another one beats are left out by the estimates, unless that one keeps up far less than it
        was estimated to.
        """
        while True:
            candidates = [
                self._known.get(each.unit.name, each) for each in rated if each.unit.name not in self._useless
            ]
            worthy, dominated = without_dominated(candidates)
            new = [each for each in worthy if each.unit.name not in self._known]
            if not new:
                left_out = {name: why for name, why in dominated.items() if name not in self._known}
                kept = [each for each in candidates if each.unit.name in self._known]
                return kept, self._useless | left_out
            self._search(new)

    def _search(self, rated: Sequence[RatedUnit]) -> None:
        """Search what units keep up; those that are late even idle are not simulated."""
        self._progress.on_stage(
            f"searching how many requests/s each of {counted(len(rated), 'kind')} of replica serves"
        )
        share = self._task.objective.share
        searches: dict[int, FleetSearch] = {}
        for number, each in enumerate(rated):
            search = self._search_of(each)
            in_time = share_in_time(each.unit, search.task.load)
            if in_time >= share:
                searches[number] = search
            else:
                self._useless[each.unit.name] = (
                    f"even idle it serves {in_time * 100:.3g} % of the requests in time, and "
                    f"{share * 100:g} % must be"
                )
        found: list[Bracket] = self._results(search_fleet, list(searches.values()))
        for (number, search), bracket in zip(searches.items(), found, strict=True):
            each = rated[number]
            if bracket.low <= search.low:
                why = f"alone it keeps the objective at no rate ({bracket.limit.binds})"
                self._useless[each.unit.name] = why
                continue
            rate = sqrt(bracket.low * bracket.high) if isfinite(bracket.high) else bracket.low
            self._progress.on_note(f"a replica of {each.unit.name}: about {rate_text(rate, 2)}")
            self._known[each.unit.name] = each.calibrated(rate / search.start)

    def _search_of(self, rated: RatedUnit) -> FleetSearch:
        """Return the search for what one unit serves of the requests that it can serve at all."""
        start = rated.rate(self._buckets)
        most = round(min(max(start * SEARCH_SECONDS, LEAST_REQUESTS), MOST_REQUESTS))
        load = self._task.load
        served = zip(self._buckets, rated.rates, strict=True)
        rows = rows_of([bucket for bucket, rate in served if rate > 0])
        # A bucket that fits by its mean may have longer requests, which go to other units.
        lengths = load.num_prompt_tokens[rows] + load.num_output_tokens[rows]
        rows = rows[lengths <= longest_request(rated.unit)][:most]
        case = FleetCase(parts=((rated.unit, 1),))
        return FleetSearch(
            task=FleetTask(case=case, load=load.take(rows), objective=self._task.objective),
            start=start,
            options=OPTIONS,
            low=start * OPTIONS.idle_share,  # `share_in_time` has said so
        )


_cost = attrgetter("usd_per_hour")

T = TypeVar("T")
R = TypeVar("R")

HEADROOM = SearchOptions(tolerance=0.105, growth=sqrt(2))
"""Of the search for the rate that a fleet keeps up: two halvings of a factor are the tolerance."""
MOST_APART = 3
"""Fleets of two pools that are simulated."""
LONGER = (1.25, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 50.0)
"""How much longer objectives are tried, where the promise cannot be kept."""
RATE_TRIES = 8
"""Lower and lower rates that are tried, where a fleet does not keep what its runs kept one by one."""
PLENTY = 2.0
"""Times the replicas that the estimates ask for, where nothing bounds the devices."""


Key = tuple[FleetCase, int, bool]
"""A fleet, the number of the run, and whether it goes on to the end."""


@dataclass
class PlanSearch:
    """Looks for the cheapest fleet.

    What is asked next follows from answers alone, so a plan is the same with any number of processes. Idle
    ones run ahead what is likely to be asked.
    """

    task: PlanTask
    pool: Pool = field(default_factory=lambda: Pool(1))
    progress: PlanProgress = field(default_factory=PlanProgress)
    _order: list[int] = field(default_factory=list, init=False)
    """Of the runs: those that are hardest to keep first, by the estimates and then by what was missed."""
    _runs: dict[Key, FleetRun] = field(default_factory=dict, init=False)
    _begun: dict[Key, Callable[[], FleetRun | None]] = field(default_factory=dict, init=False)
    """Runs that idle processes are at."""
    _cheapest: PlannedFleet | None = field(default=None, init=False)
    """Of those that have kept the promise so far; its other runs will be asked for."""

    def __post_init__(self) -> None:
        self._order = list(range(len(self.task.runs)))

    def plans(self, rated: Sequence[RatedUnit], left_out: dict[str, str]) -> Iterator[FleetPlan]:
        """Yield the answer as soon as it is found, and then once more with all that is told beside it.

        Parameters
        ----------
        rated : units with their rates for the buckets of the load.
        left_out : units that take no part, and why.

        Raises
        ------
        PlanInterrupted : Ctrl-C came.
        """
        buckets = buckets_of(self.task.load)
        why = unservable(rated, buckets, self.task.objective.share)
        if not rated and left_out:
            why += f": {next(iter(left_out.values()))}"
        alone = AloneSearch(self.task, buckets, self.results, self.progress)
        units, useless = ([], {}) if why else alone.calibrated(rated)
        left_out = left_out | useless
        if not units:
            why = why or "; ".join(f"{name}: {reason}" for name, reason in useless.items())
        search = MixSearch(self.task, units, buckets, self.judge, self.progress)
        pools: dict[str, PoolSizes] = {}
        apart: list[PlannedFleet] = []
        if not why:
            self._sort_runs(units[0])
            best = search.run()
            rate = self.task.needed_rate
            pools = {each.unit.name: sizes for each in units if (sizes := pools_for(each, buckets, rate))}
            apart = [] if best is None else self._apart(units, pools, best.usd_per_hour)

        def plan() -> FleetPlan:
            fleets = [*search.fleets, *apart]
            proved = [each for each in fleets if each.is_kept and len(each.runs) == len(self.task.runs)]
            kept = sorted(proved, key=_cost)
            shown = self._at_promise(_worth_showing(kept))
            return FleetPlan(
                best=shown[0] if shown else None,
                alternatives=tuple(shown[1:]),
                failed=tuple(sorted((fleet for fleet in fleets if not fleet.is_kept), key=_cost)),
                units=tuple(units),
                buckets=buckets,
                pools=pools,
                left_out=left_out,
                cost_bound=search.cost_bound,
                is_exhausted=search.is_exhausted,
                infeasible="" if shown else why or search.infeasible,
            )

        found = plan()
        yield found
        if found.best is None:
            yield replace(found, nearest=self._nearest(rated, units, buckets))
            return
        search.confirm_alone()
        found = plan()
        best = found.best
        assert best is not None, "it was proved before"
        yield replace(found, best=self._with_capacities(best))

    def _sort_runs(self, rated: RatedUnit) -> None:
        """Order the runs by what a unit would serve of each, the least first."""
        rates = []
        for run in self.task.runs:
            buckets = buckets_of(run)
            rates.append(rate_unit(rated.unit, buckets).rate(buckets))
        self._order.sort(key=rates.__getitem__)

    def _apart(
        self, units: Sequence[RatedUnit], pools: Mapping[str, PoolSizes], cost: float
    ) -> list[PlannedFleet]:
        """Simulate prompts and generation on replicas of their own where they may cost less, by arithmetic.

        Parameters
        ----------
        pools : by the name of the unit, how many replicas would do.
        cost : of the cheapest other fleet, dollars an hour.

        Returns
        -------
        Fleets, the cheapest first, of each unit on towards what the last one lacked; the last one keeps the
        promise, if any does.
        """
        found: list[PlannedFleet] = []
        left = [(each.unit, pools[each.unit.name]) for each in units if each.unit.name in pools]
        while left and len(found) < MOST_APART and not (found and found[-1].is_kept):
            unit, sizes = min(left, key=lambda each: each[0].usd_per_hour * each[1].num_replicas)
            left.remove((unit, sizes))
            most = min(most_of(unit, dict(self.task.available)), ceil(cost / unit.usd_per_hour - 1e-9) - 1)
            if sizes.num_replicas <= most:
                self.progress.on_stage("trying prompts and generation on replicas of their own")
                found.append(self.judge(((unit, sizes.num_replicas),), pools=sizes))
                lacks = "prefill" if found[-1].binds == "TTFT" else "decode"
                left.append((unit, replace(sizes, **{lacks: getattr(sizes, lacks) + 1})))
        return found

    def _nearest(
        self, rated: Sequence[RatedUnit], units: Sequence[RatedUnit], buckets: Sequence[Bucket]
    ) -> tuple[str, ...]:
        """Return promises that are kept where this one cannot be: a share, a rate, longer objectives.

        Each has been simulated, and was kept in every run.
        """
        self.progress.on_stage("looking for what could be kept instead")
        parts = everything(units, buckets, self._bounds(units, buckets)) if units else None
        nearest = []
        if parts is not None:
            fleet = self.judge(parts, to_the_end=True)
            lowest = min(run.attainment or 0.0 for run in fleet.runs)
            if lowest >= 0.01:
                nearest.append(f"--objective attainment:{floor(lowest * 100) / 100:g}")
            nearest += self._kept_rate(fleet)
        for factor in LONGER:
            longer = buckets_of(with_longer_objectives(self.task.load, factor))
            rerated = [rate_unit(each.unit, longer) for each in rated]
            if unservable(rerated, longer, self.task.objective.share):
                continue
            runs = tuple(with_longer_objectives(load, factor) for load in self.task.runs)
            with_longer = replace(self, task=replace(self.task, runs=runs))
            all_devices = parts or everything(rerated, longer, self._bounds(rerated, longer))
            if with_longer.judge(all_devices).is_kept:
                nearest.append(_as_flags(with_longer_objectives(self.task.load, factor), factor))
                break
        return tuple(nearest)

    def _kept_rate(self, fleet: PlannedFleet) -> list[str]:
        """Return the highest rate that a fleet keeps in every run, as flags; nothing where there is none."""
        fleet = self._with_capacities(fleet)
        rate = min(each.low for each in fleet.capacities) / (1 + self.task.headroom)
        for _ in range(RATE_TRIES if rate > 0 else 0):
            rate = float(f"{0.995 * rate:.3g}")
            needed = rate * (1 + self.task.headroom)
            runs = tuple(load.at_rate(needed) for load in self.task.runs)
            if replace(self, task=replace(self.task, rate=rate, runs=runs)).judge(fleet.parts).is_kept:
                # As many requests as here: by itself a run has fewer at a lower rate, and they are others.
                return [f"--rate {rate:g} --num-prompts {len(runs[0])}"]
        return []

    def _bounds(self, rated: Sequence[RatedUnit], buckets: Sequence[Bucket]) -> dict[str, float]:
        """Return the devices that there are; of a type without bound, more than a fleet should take."""
        needed = PLENTY * self.task.needed_rate

        def enough(each: RatedUnit) -> int:
            rate = each.rate(buckets)
            return each.unit.num_devices * (ceil(needed / rate) if rate > 0 else 1)

        bounds = dict(self.task.available)
        for device in [device for device, number in bounds.items() if number == inf]:
            bounds[device] = max((enough(each) for each in rated if each.unit.device == device), default=0)
        return bounds

    # ---- what is simulated ----

    def judge(
        self,
        parts: Parts,
        *,
        pools: PoolSizes | None = None,
        to_the_end: bool = False,
        is_glance: bool = False,
        likely: Sequence[Parts] = (),
    ) -> PlannedFleet:
        """Simulate a fleet at the needed rate; one that misses in a run is not tried in the others.

        Parameters
        ----------
        to_the_end : finish runs that miss, and try the others all the same.
        is_glance : one run is enough, that which is hardest to keep.
        likely : fleets that may be asked for next.
        """
        case, order = FleetCase(parts=parts, pools=pools), self._order[: 1 if is_glance else None]
        ahead = [(FleetCase(parts=each), self._order[0], False) for each in likely]
        if self._cheapest is not None:
            ahead += [(self._cheapest.case, number, False) for number in self._order]
        runs: dict[int, FleetRun] = {}
        for position, number in enumerate(order):
            others = [(case, other, to_the_end) for other in order[position + 1 :]]
            runs[number] = run = self._run((case, number, to_the_end), [*others, *ahead])
            if not run.is_met and not to_the_end:
                self._order.remove(number)
                self._order.insert(0, number)
                break
        fleet = PlannedFleet(parts=parts, pools=pools, runs=tuple(runs[number] for number in sorted(runs)))
        if fleet.is_kept and (self._cheapest is None or _cost(fleet) < _cost(self._cheapest)):
            self._cheapest = fleet
        return fleet

    def _run(self, key: Key, likely: Sequence[Key]) -> FleetRun:
        """Return a run; idle processes begin those that may be asked for next."""
        if key not in self._runs:
            begun = self._begun.pop(key, None) or self._begin(key)
            for each in likely:
                if each not in self._runs and each not in self._begun and self.pool.num_idle:
                    self._begun[each] = self._begin(each)
            run = begun()
            if run is None:
                raise PlanInterrupted("interrupted: nothing is planned")
            self.progress.on_run()
            self._runs[key] = run
        return self._runs[key]

    def _begin(self, key: Key) -> Callable[[], FleetRun | None]:
        case, number, to_the_end = key
        load, objective = self.task.runs[number], self.task.objective
        task = FleetTask(case=case, load=load, objective=objective, to_the_end=to_the_end)
        return self.pool.begin(run_fleet, task)

    def _with_capacities(self, fleet: PlannedFleet) -> PlannedFleet:
        """Search the highest rate of a fleet in each run, from the rate that it is to serve."""
        self.progress.on_stage("searching the highest rate that the fleet keeps up")
        needed = self.task.needed_rate
        searches = [
            FleetSearch(
                task=FleetTask(case=fleet.case, load=load, objective=self.task.objective),
                start=needed * HEADROOM.growth if run.is_met else needed,
                options=HEADROOM,
                low=needed if run.is_met else 0.0,
                high=inf if run.is_met else needed,
            )
            for load, run in zip(self.task.runs, fleet.runs, strict=True)
        ]
        return replace(fleet, capacities=tuple(self.results(search_fleet, searches)))

    def _at_promise(self, fleets: Sequence[PlannedFleet]) -> list[PlannedFleet]:
        """Return fleets that keep the promise with headroom, with what they do at the promised rate."""
        if not self.task.headroom:
            return list(fleets)
        runs = tuple(load.at_rate(self.task.rate) for load in self.task.runs)
        at_promise = replace(self, task=replace(self.task, runs=runs, headroom=0.0))
        judged = [
            replace(fleet, runs=at_promise.judge(fleet.parts, pools=fleet.pools).runs) for fleet in fleets
        ]
        return [fleet for fleet in judged if fleet.is_kept]

    def results(self, worker: Worker[T, R | None], tasks: Sequence[T]) -> list[R]:
        """Return the results of tasks.

        Raises
        ------
        PlanInterrupted : Ctrl-C came.
        """
        heard = self.pool.run(worker, tasks, on_event=lambda _index, _run: self.progress.on_run())
        results = [result for result in heard if result is not None]
        if len(results) < len(tasks):
            raise PlanInterrupted("interrupted: nothing is planned")
        return results


def _as_flags(load: OfferedLoad, factor: float) -> str:
    """Return the objectives of a load as flags; of several classes, how much longer they are."""
    if len(load.classes) != 1:
        return f"objectives {factor:g} times as long"
    limits = changed(load.classes[0].slo)
    return " ".join(f"{each.flag} {limit * 1e3:g}" for each, limit in limits.items())


def _worth_showing(kept: Sequence[PlannedFleet]) -> list[PlannedFleet]:
    """Return of fleets, by cost, the first two, and the first of equal replicas on each type."""
    alone: dict[tuple[str, ...], PlannedFleet] = {}
    for fleet in kept:
        if len(fleet.parts) == 1 and fleet.pools is None:
            alone.setdefault(fleet.devices, fleet)
    shown = [*kept[:2], *alone.values()]
    return [fleet for fleet in kept if fleet in shown]
