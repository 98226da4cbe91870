"""`onbeat capacity`: the highest rate that a configuration serves within an objective."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rich.console import Console

from onbeat.cli.args import INFEASIBLE, INTERRUPTED
from onbeat.core.extras import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onbeat.cli.capacity_plan import PlannedCase
    from onbeat.planner.cases import Labels
    from onbeat.planner.frontier import FrontierPoint


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
    from onbeat.cli.capacity_output import CapacityReport, capacity_result
    from onbeat.cli.capacity_plan import plan_cases
    from onbeat.cli.capacity_run import search, search_options, sweep
    from onbeat.cli.options import read_options
    from onbeat.cli.outputs import check_writable, deliver

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
    deliver(capacity_result(report), console, json=output.json, report=output.report)
    if is_stopped:
        return INTERRUPTED
    return INFEASIBLE if report.is_infeasible else 0


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
