"""Runs the searches and the sweeps of `onbeat capacity`, with progress."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console

from onbeat.cli.args import count
from onbeat.cli.capacity_options import numbers
from onbeat.cli.capacity_plan import PlannedCase
from onbeat.cli.capacity_progress import CapacityProgress
from onbeat.planner.capacity import Capacity, CapacityTask, Outcome, Repeat, combine_repeats, find_capacity
from onbeat.planner.frontier import FrontierPoint, Level, LevelTask, run_level
from onbeat.planner.parallel import run_tasks
from onbeat.planner.search import SearchOptions


def sweep_levels(args: argparse.Namespace) -> list[Level]:
    """Return the levels that the flags of a sweep name: closed loops, then open ones."""
    closed = numbers("--sweep-concurrency", args.sweep_concurrency, count)
    open_ = numbers("--sweep-rate", args.sweep_rate, float)
    return [Level(concurrency=each) for each in closed] + [Level(request_rate=each) for each in open_]


def search_options(args: argparse.Namespace) -> SearchOptions:
    """Return how a rate is searched for.

    Raises
    ------
    ConfigError : a tolerance that no search can reach.
    """
    return SearchOptions(tolerance=args.tolerance)


def search(
    args: argparse.Namespace, planned: Sequence[PlannedCase], console: Console
) -> tuple[list[Capacity], bool]:
    """Search the capacity of every case; also return whether Ctrl-C ended it."""
    options = search_options(args)
    tasks = [
        CapacityTask(case=each.case, load=load, objective=each.objective, options=options)
        for each in planned
        for load in each.loads
        if each.objective is not None and not each.error
    ]
    labels = [task.case.labels for task in tasks]
    with CapacityProgress(console, labels, is_quiet=args.disable_tqdm) as progress:
        repeats = iter(
            run_tasks(
                find_capacity, tasks, jobs=args.jobs, on_event=progress.on_event, on_result=progress.on_result
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
    args: argparse.Namespace, planned: Sequence[PlannedCase], levels: Sequence[Level], console: Console
) -> tuple[list[FrontierPoint], bool]:
    """Run every case at every level; also return whether Ctrl-C ended it."""
    tasks = [
        LevelTask(case=each.case, load=each.loads[0], level=level) for each in planned for level in levels
    ]
    labels = [task.case.labels for task in tasks]
    with CapacityProgress(console, labels, is_quiet=args.disable_tqdm) as progress:
        results = run_tasks(
            run_level, tasks, jobs=args.jobs, on_event=progress.on_event, on_result=progress.on_result
        )
    points = [point for point in results if point is not None]
    return points, len(points) < len(tasks)
