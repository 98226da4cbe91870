"""`onbeat capacity`: the highest rate that a configuration serves within an objective."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rich.console import Console

from onbeat.cli.args import INFEASIBLE, INTERRUPTED
from onbeat.core.extras import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onbeat.cli.capacity_output import CapacityReport
    from onbeat.cli.capacity_plan import PlannedCase
    from onbeat.planner.cases import Labels
    from onbeat.planner.frontier import FrontierPoint

SHORT_LOAD = 30.0
"""Seconds: the delays that objectives limit take some of them to build up."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    from onbeat.cli.capacity_options import CapacityOptions
    from onbeat.cli.options import add_options
    from onbeat.cli.simulate_options import add_simulation_arguments

    add_simulation_arguments(parser)
    add_options(parser, CapacityOptions)


def run(args: argparse.Namespace) -> int:
    """Search; returns the exit code."""
    require("scipy", extra="plan", purpose="onbeat capacity")
    from onbeat.cli.capacity_options import CapacityOptions
    from onbeat.cli.capacity_output import CapacityReport, to_document, write_page
    from onbeat.cli.capacity_plan import plan_cases
    from onbeat.cli.capacity_run import search, search_options, sweep
    from onbeat.cli.options import read_options
    from onbeat.cli.outputs import check_writable, save_all
    from onbeat.report.result import write_document

    console = Console(stderr=True, highlight=False)
    options = read_options(args, CapacityOptions)
    output = options.output
    levels = options.levels()
    search_options(options)
    check_writable({"--json": output.json, "--report": output.report})
    planned = plan_cases(args, options)
    lead = _lead(args, planned)
    console.print(lead, markup=False, soft_wrap=True)
    capacities, is_stopped = search(options, planned, console)
    points: list[FrontierPoint] = []
    if levels and not is_stopped:
        points, is_stopped = sweep(options, planned, levels, slo_mode=args.slo_mode, console=console)
    report = CapacityReport(
        title=f"Capacity of {_what(args, planned)}",
        lead=lead,
        settings=_settings(args, planned),
        capacities=capacities,
        points=points,
        promises=_promises(planned),
        share=next((getattr(each.objective, "share", None) for each in planned), None),
        is_interrupted=is_stopped,
    )
    _show(report)
    writers = {
        output.json: lambda path: write_document(path, to_document(report)),
        output.report: lambda path: write_page(path, report),
    }
    save_all(writers, console)
    if is_stopped:
        return INTERRUPTED
    return INFEASIBLE if report.is_infeasible else 0


def _show(report: CapacityReport) -> None:
    from onbeat.cli.capacity_output import INTERRUPTED_NOTE, rich_tables
    from onbeat.cli.outputs import result_console
    from onbeat.planner.capacity import Outcome
    from onbeat.planner.cases import case_name
    from onbeat.report.units import significant

    console = result_console()
    for table in rich_tables(report):
        console.print(table)
    for each in report.capacities:
        if each.outcome is Outcome.UNBOUNDED:
            console.print(
                f"note: {case_name(each.labels)}: no rate missed the objective, so the load is too short to "
                "saturate it; raise --num-prompts",
                markup=False,
            )
    for warning in dict.fromkeys(each.beyond for each in report.capacities if each.beyond):
        console.print(f"note: {warning}", markup=False, soft_wrap=True)
    highest = max((each.rate for each in report.capacities), default=0.0)
    if highest and report.num_requests / highest < SHORT_LOAD:
        console.print(
            f"note: at {significant(highest, 4)} requests/s the load lasts "
            f"{report.num_requests / highest:.0f} s, in which queues hardly grow; raise --num-prompts for "
            "the rate that can be kept up",
            markup=False,
            soft_wrap=True,
        )
    if report.is_infeasible:
        reasons = [each.reason for each in report.capacities] or [point.error for point in report.points]
        console.print(f"INFEASIBLE: {reasons[0]}", markup=False, soft_wrap=True)
    best = report.best
    if best is not None:
        values = (best.rate, *best.interval, best.rate_per_device)
        rate, low, high, per_gpu = (significant(value, 4) for value in values)
        console.print(
            f"capacity: {rate} requests/s ({low} to {high}) on {best.num_devices} GPU(s), {per_gpu} per GPU, "
            f"{case_name(best.labels)}",
            markup=False,
            soft_wrap=True,
        )
    if report.is_interrupted:
        console.print(INTERRUPTED_NOTE, style="bold yellow")


def _what(args: argparse.Namespace, planned: Sequence[PlannedCase]) -> str:
    return f"{args.model} on {' or '.join(dict.fromkeys(each.case.settings.device for each in planned))}"


def _lead(args: argparse.Namespace, planned: Sequence[PlannedCase]) -> str:
    from onbeat.metrics.distribution import LEVEL
    from onbeat.report.objectives import classes_text

    first = planned[0]
    load = first.loads[0]
    names = {each.objective.name for each in planned if each.objective is not None}
    what = f"objective {', '.join(sorted(names))}" if names else "no objective"
    asked = (classes_text({own.name: own.slo for own in each.loads[0].classes}) for each in planned)
    if texts := " or ".join(dict.fromkeys(filter(None, asked))):
        what += f", requests ask for {texts}"
    num_repeats = len(first.loads)
    step_times = "; ".join(dict.fromkeys(each.step_times for each in planned if each.step_times))
    interval = "the final bracket" if num_repeats == 1 else f"{LEVEL * 100:g} % by Student's t over repeats"
    return (
        f"{_what(args, planned)}: {what}; {load.name} load, {len(load)} requests a run, mean "
        f"{load.num_prompt_tokens.mean():.0f} tokens in and {load.num_output_tokens.mean():.0f} out; "
        f"{len(planned)} case(s), {num_repeats} repeat(s), interval: {interval}"
        + (f"; step times: {step_times}" if step_times else "")
    )


def _promises(planned: Sequence[PlannedCase]) -> dict[Labels, str]:
    from onbeat.cli.answers import promise_text

    return {
        each.case.labels: promise_text(each.objective, {own.name: own.slo for own in each.loads[0].classes})
        for each in planned
        if each.objective is not None
    }


def _settings(args: argparse.Namespace, planned: Sequence[PlannedCase]) -> dict[str, Any]:
    """Return the flags that were given, and what became of the load."""
    load = planned[0].loads[0]
    hidden = ("run", "command", "json", "report", "config")
    flags = {name: _plain(value) for name, value in vars(args).items() if name not in hidden}
    return {
        "flags": flags,
        "load": {
            "name": load.name,
            "num_requests": len(load),
            "mean_input_tokens": float(load.num_prompt_tokens.mean()),
            "mean_output_tokens": float(load.num_output_tokens.mean()),
        },
        "num_repeats": len(planned[0].loads),
    }


def _plain(value: Any) -> Any:
    """Return what was given with a flag as it can stand in a file."""
    if isinstance(value, list):
        return list(map(str, value))
    return value if isinstance(value, (int, float, str, type(None))) else str(value)
