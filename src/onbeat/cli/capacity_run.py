"""Runs the searches and the sweeps of `onbeat capacity`, with progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from onbeat.cli.capacity_options import CapacityOptions
from onbeat.cli.capacity_plan import PlannedCase
from onbeat.core.slo import SLOMode
from onbeat.planner.capacity import Capacity, CapacityTask, Outcome, Repeat, combine_repeats, find_capacity
from onbeat.planner.cases import Labels, case_name
from onbeat.planner.frontier import FrontierPoint, LevelTask, run_level
from onbeat.planner.parallel import run_tasks
from onbeat.planner.search import SearchOptions, Trial
from onbeat.report.run import Level
from onbeat.report.units import significant


class CapacityProgress(Progress):
    """Shows how many searches are done, and the latest run.

    Parameters
    ----------
    labels : case of each task.
    is_quiet : show nothing.
    """

    def __init__(self, console: Console, labels: Sequence[Labels], *, is_quiet: bool) -> None:
        self._labels = labels
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            disable=is_quiet or not console.is_terminal,
            refresh_per_second=4,
        )
        self._task = self.add_task("searching", total=len(labels), note="")

    def on_event(self, index: int, event: Trial | FrontierPoint) -> None:
        if isinstance(event, Trial):
            met = "kept" if event.verdict.is_met else "missed"
            note = f"{significant(event.rate)} requests/s {met}: {event.verdict.reason}"
        elif event.run is not None:  # one that cannot run is not reported
            note = f"{event.level.name}: {event.run.output_throughput_per_gpu:,.0f} tokens/s per GPU"
        self.update(self._task, note=f"{case_name(self._labels[index])}: {note}")

    def on_result(self, _index: int, _result: object) -> None:
        self.advance(self._task)


def search_options(options: CapacityOptions) -> SearchOptions:
    """Return how a rate is searched for.

    Raises
    ------
    ConfigError : a tolerance that no search can reach.
    """
    return SearchOptions(tolerance=options.tolerance)


def search(
    options: CapacityOptions, planned: Sequence[PlannedCase], console: Console
) -> tuple[list[Capacity], bool]:
    """Search the capacity of every case; also return whether Ctrl-C ended it."""
    how = search_options(options)
    tasks = [
        CapacityTask(
            case=each.case,
            load=load,
            objective=each.objective,
            options=how,
            has_asides=options.output.report is not None and repeat == 0,
        )
        for each in planned
        for repeat, load in enumerate(each.loads)
        if each.objective is not None and not each.error
    ]
    labels = [task.case.labels for task in tasks]
    with CapacityProgress(console, labels, is_quiet=options.output.disable_tqdm) as progress:
        repeats = iter(
            run_tasks(
                find_capacity,
                tasks,
                jobs=options.study.jobs,
                on_event=progress.on_event,
                on_result=progress.on_result,
            )
        )
    capacities = []
    for each in planned:
        if each.objective is None:
            continue
        if each.error:
            found: list[Repeat | None] = [Repeat(bracket=None, reason=each.error)]
        else:
            found = [next(repeats) for _ in each.loads]
        capacities.append(combine_repeats(each.case.labels, found))
    return capacities, any(each.outcome is Outcome.INTERRUPTED for each in capacities)


def sweep(
    options: CapacityOptions,
    planned: Sequence[PlannedCase],
    levels: Sequence[Level],
    *,
    slo_mode: SLOMode,
    console: Console,
) -> tuple[list[FrontierPoint], bool]:
    """Run every case at every level; also return whether Ctrl-C ended it."""
    tasks = [
        LevelTask(case=each.case, load=each.loads[0], level=level, slo_mode=slo_mode)
        for each in planned
        for level in levels
    ]
    labels = [task.case.labels for task in tasks]
    with CapacityProgress(console, labels, is_quiet=options.output.disable_tqdm) as progress:
        results = run_tasks(
            run_level,
            tasks,
            jobs=options.study.jobs,
            on_event=progress.on_event,
            on_result=progress.on_result,
        )
    errors = {each.case.labels: each.error for each in planned}
    points = [
        replace(point, error=errors[point.labels] or point.error) for point in results if point is not None
    ]
    return points, len(points) < len(tasks)
