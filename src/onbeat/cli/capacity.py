"""`onbeat capacity`: the highest rate that a configuration serves within an objective."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console

from onbeat.cli.answers import promise_text
from onbeat.cli.args import INFEASIBLE, INTERRUPTED
from onbeat.cli.capacity_cases import VARIABLE_NAMES, PlannedCase, plan_cases
from onbeat.cli.capacity_output import CapacityReport, capacity_result
from onbeat.cli.options import add_options, read_options
from onbeat.cli.outputs import (
    ResultOptions,
    StudyOptions,
    check_writable,
    deliver,
    files_of,
    progress_bar,
    shown_settings,
)
from onbeat.cli.simulate_options import add_simulation_arguments
from onbeat.core.extras import require
from onbeat.core.options import option, part
from onbeat.metrics.distribution import LEVEL
from onbeat.planner.capacity import Capacity, CapacityTask, Repeat, combine_repeats, find_capacity
from onbeat.planner.cases import case_name
from onbeat.planner.parallel import run_tasks
from onbeat.planner.search import SearchOptions, Trial
from onbeat.report.objectives import classes_text
from onbeat.report.units import significant

_capacity = partial(option, group="capacity")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOptions:
    """What is searched for, over which configurations, and where the result goes."""

    objective: str = _capacity(
        "sarathi",
        metavar="NAME",
        help="what a rate must keep; sarathi: P99 of all gaps within --slo-tbt-ms, and a median scheduling "
        "delay of at most 2 s; vidur: a P99 scheduling delay below 5 s; attainment:0.9: this share of "
        "good requests; distserve:0.9: this share within TTFT and TPOT",
    )
    tolerance: float = _capacity(0.025, metavar="SHARE", help="stop the search at a bracket of this width")
    study: StudyOptions = part(StudyOptions)
    vary: tuple[str, ...] = option(
        (),
        group="comparison",
        many="append",
        metavar="NAME=VALUE,VALUE",
        help="compare values of a flag; several --vary give every combination; of " + VARIABLE_NAMES,
    )
    output: ResultOptions = part(ResultOptions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    add_simulation_arguments(parser)
    add_options(parser, CapacityOptions)


def run(args: argparse.Namespace) -> int:
    """Search; returns the exit code."""
    require("scipy", extra="plan", purpose="onbeat capacity")
    console = Console(stderr=True, highlight=False)
    options = read_options(args, CapacityOptions)
    output, how = options.output, SearchOptions(tolerance=options.tolerance)
    check_writable(files_of(output))
    planned = plan_cases(args, options.vary, objective=options.objective, repeats=options.study.repeats)
    lead = _lead(args, planned)
    console.print(lead, markup=False, soft_wrap=True)
    capacities = _search(options, how, planned, console)
    report = CapacityReport(
        title=f"Capacity of {_what(args, planned)}",
        lead=lead,
        settings=_settings(args, planned),
        capacities=capacities,
        promises={each.case.labels: promise_text(each.objective, each.objectives) for each in planned},
    )
    deliver(capacity_result(report), console, json=output.json, report=output.report)
    if report.is_interrupted:
        return INTERRUPTED
    return INFEASIBLE if report.is_infeasible else 0


def _search(
    options: CapacityOptions, how: SearchOptions, planned: Sequence[PlannedCase], console: Console
) -> list[Capacity]:
    """Search the capacity of every case, with progress."""
    tasks = [
        CapacityTask(
            case=each.case,
            load=load,
            objective=each.objective,
            options=how,
            has_more_load=options.output.report is not None and repeat == 0,
        )
        for each in planned
        for repeat, load in enumerate(each.loads)
        if not each.error
    ]
    bar = progress_bar(console, is_quiet=options.output.disable_tqdm or not console.is_terminal)
    row = bar.add_task("searching", total=len(tasks), note="")

    def on_trial(index: int, trial: Trial) -> None:
        met = "kept" if trial.verdict.is_met else "missed"
        note = f"{significant(trial.rate)} requests/s {met}: {trial.verdict.reason}"
        bar.update(row, note=f"{case_name(tasks[index].case.labels)}: {note}")

    with bar:
        repeats = iter(
            run_tasks(
                find_capacity,
                tasks,
                jobs=options.study.jobs,
                on_event=on_trial,
                on_result=lambda _index, _result: bar.advance(row),
            )
        )
    capacities = []
    for each in planned:
        found: list[Repeat | None] = [Repeat(bracket=None, reason=each.error)]
        if not each.error:
            found = [next(repeats) for _ in each.loads]
        capacities.append(combine_repeats(each.case.labels, found))
    return capacities


def _what(args: argparse.Namespace, planned: Sequence[PlannedCase]) -> str:
    return f"{args.model} on {' or '.join(dict.fromkeys(each.case.settings.device for each in planned))}"


def _lead(args: argparse.Namespace, planned: Sequence[PlannedCase]) -> str:
    first = planned[0]
    load = first.loads[0]
    what = f"objective {first.objective.name}"
    asked = (classes_text(each.objectives) for each in planned)
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


def _settings(args: argparse.Namespace, planned: Sequence[PlannedCase]) -> dict[str, Any]:
    """Return the flags that were given, and what became of the load."""
    load = planned[0].loads[0]
    return {
        "flags": shown_settings(args, hidden=("json", "report", "config")),
        "load": {
            "name": load.name,
            "num_requests": len(load),
            "mean_input_tokens": float(load.num_prompt_tokens.mean()),
            "mean_output_tokens": float(load.num_output_tokens.mean()),
        },
        "num_repeats": len(planned[0].loads),
    }
