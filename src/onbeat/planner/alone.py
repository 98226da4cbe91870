"""What each unit serves alone, by simulation: how far queues keep it from its steady rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onbeat.planner.buckets import Bucket, rows_of
from onbeat.planner.fleets import FleetCapacity, FleetCase, FleetSearch, search_fleet
from onbeat.planner.plan_task import PlanTask, Progress
from onbeat.planner.search import SearchOptions
from onbeat.planner.units import RatedUnit, longest_request, share_in_time, without_dominated

SEARCH_SECONDS = 30.0
"""About so long is the load of a search."""
LEAST_REQUESTS, MOST_REQUESTS = 200, 4000
"""Of that load."""
OPTIONS = SearchOptions(tolerance=0.1, growth=1.3)
"""Its start is an estimate."""


class AloneSearch:
    """Holds the estimates against what units keep up alone.

    Parameters
    ----------
    buckets : of the load.
    results : runs tasks by a worker, and tells of each result (`fleet_plan.Planner.results`).
    """

    def __init__(
        self, task: PlanTask, buckets: Sequence[Bucket], results: Callable[..., list[Any]], progress: Progress
    ) -> None:
        self._task, self._buckets, self._results, self._progress = task, buckets, results, progress
        self._known: dict[str, RatedUnit] = {}
        self._useless: dict[str, str] = {}

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
            f"searching how many requests/s each of {len(rated)} kind(s) of replica serves"
        )
        share = self._task.objective.share
        searches: list[FleetSearch] = []
        searched: list[RatedUnit] = []
        for each in rated:
            search = self._search_of(each)
            in_time = share_in_time(each.unit, search.load)
            if in_time < share:
                self._useless[each.unit.name] = (
                    f"even idle it serves {in_time * 100:.3g} % of the requests in time, and "
                    f"{share * 100:g} % must be"
                )
                continue
            searches.append(search)
            searched.append(each)

        def note(index: int, capacity: FleetCapacity) -> None:
            self._progress.on_note(f"a replica of {searched[index].unit.name}: {capacity.low:.3g} requests/s")

        found = self._results(search_fleet, searches, note)
        for each, search, capacity in zip(searched, searches, found, strict=True):
            if capacity.low <= search.start * OPTIONS.idle_share:
                self._useless[each.unit.name] = f"alone it keeps the objective at no rate ({capacity.binds})"
                continue
            self._known[each.unit.name] = each.calibrated(capacity.low / search.start)

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
        return FleetSearch(
            case=FleetCase(parts=((rated.unit, 1),)),
            load=load.take(rows),
            objective=self._task.objective,
            start=start,
            options=OPTIONS,
            known=((start * OPTIONS.idle_share, True),),  # `share_in_time` has said so
        )
