"""`onbeat plan`: the cheapest fleet that keeps a promise, proved by simulation."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console

from onbeat.cli.args import INFEASIBLE, INTERRUPTED
from onbeat.core.extras import require

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from onbeat.cli.plan_options import PlanOptions
    from onbeat.cli.plan_output import PlanReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    from onbeat.cli.plan_options import add_plan_arguments

    add_plan_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Plan; returns the exit code."""
    require("scipy", extra="plan", purpose="onbeat plan")
    from onbeat.cli.options import read_options
    from onbeat.cli.outputs import check_writable, deliver, files_of
    from onbeat.cli.plan_files import not_served, save_plan
    from onbeat.cli.plan_options import PlanOptions, PlanOutput
    from onbeat.cli.plan_output import plan_result
    from onbeat.planner.plan_task import PlanInterrupted

    console = Console(stderr=True, highlight=False)
    options, output = read_options(args, PlanOptions), read_options(args, PlanOutput)
    own = output.result
    check_writable(files_of(output))
    try:
        report = _plan(args, options, console, is_quiet=own.disable_tqdm)
    except PlanInterrupted as error:
        console.print(str(error), markup=False)
        return INTERRUPTED
    others: dict[Path | None, Callable[[Path], None]] = {}
    if report.plan.best is not None:
        others[output.output] = lambda path: save_plan(path, report)
        if note := not_served(report.base):
            console.print(f"warning: {note}", markup=False, soft_wrap=True)
    deliver(plan_result(report), console, json=own.json, report=own.report, others=others)
    return INFEASIBLE if report.plan.best is None else 0


def _plan(args: argparse.Namespace, options: PlanOptions, console: Console, *, is_quiet: bool) -> PlanReport:
    from onbeat.cli.plan_options import base_settings, parse_degrees, parse_gpus, plan_task
    from onbeat.cli.plan_output import PlanReport
    from onbeat.cli.plan_progress import show_progress
    from onbeat.planner.buckets import buckets_of
    from onbeat.planner.fleet_plan import Planner
    from onbeat.planner.prices import Prices
    from onbeat.planner.units import choices_of, longest_request, make_units, rate_unit
    from onbeat.simulator.resolve import what_binds
    from onbeat.workload.offered import LongerThanContext

    available = parse_gpus(options.gpus)
    prices = Prices(options.prices)
    base = base_settings(args, next(iter(available)))
    units, left_out = make_units(
        base,
        devices=list(available),
        tensor_parallel=parse_degrees(options.tensor_parallel),
        available=available,
        prices=prices,
    )
    longest = max(map(longest_request, units), default=1 << 30)
    try:
        task = plan_task(args, options, available, longest)
    except LongerThanContext as error:
        unit = max(units, key=longest_request)
        raise what_binds(unit.settings, error, choices_of(available[unit.device])) from None
    with show_progress(console, is_quiet=is_quiet) as progress:
        buckets = buckets_of(task.load)
        planner = Planner(task=task, jobs=options.study.jobs, progress=progress)
        plan = planner.plan([rate_unit(unit, buckets) for unit in units], left_out)
    return PlanReport(args=args, base=base, task=task, plan=plan, prices=prices)
