"""`onbeat capacity`: the highest rate that a configuration serves within an objective.

From the flags of `onbeat capacity` to the cases and loads that it compares.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

from onbeat.cli import outputs
from onbeat.cli.answers import promise_text
from onbeat.cli.args import INFEASIBLE, INTERRUPTED
from onbeat.cli.capacity_output import CapacityReport, answer_of, capacity_result
from onbeat.cli.options import add_options, read_options, read_value
from onbeat.cli.simulate import add_simulation_arguments
from onbeat.core.errors import ConfigError, DoesNotFit, counted
from onbeat.core.extras import require
from onbeat.core.hints import likely_meant
from onbeat.core.options import Setting, change, changed, option, part, settings_of
from onbeat.core.slo import SLO
from onbeat.metrics.distribution import LEVEL
from onbeat.planner.capacity import Capacity, CapacityTask, Repeat, combine_repeats, find_capacity
from onbeat.planner.cases import TBT, ReplicaCase, case_name, settings_grid
from onbeat.planner.objectives import Objective, ShareObjective, parse_objective
from onbeat.planner.parallel import Pool
from onbeat.planner.search import SearchOptions, Trial
from onbeat.report.objectives import classes_text
from onbeat.report.result import ResultOptions
from onbeat.report.units import rate_text
from onbeat.simulator.deployment import AUTO, Deployment
from onbeat.simulator.resolve import decode_context, resolve, resolve_for, step_times_text, what_binds
from onbeat.workload.job_kinds import unit_of
from onbeat.workload.load import Load, tightest_tbt
from onbeat.workload.offered import LongerThanContext, OfferedLoad
from onbeat.workload.slo_classes import SLOClass

_VARIED = frozenset(
    {
        *("tensor_parallel", "pipeline_parallel", "replicas", "router", "device", "dtype", "policy"),
        *("max_num_seqs", "max_num_batched_tokens", "shed", "shed_order", "tbt"),
    }
)
VARIABLES: Mapping[str, Setting] = {
    flag.lstrip("-"): setting
    for setting in (*settings_of(Deployment), *settings_of(Load))
    if setting.name in _VARIED
    for flag in (setting.flag, *setting.option.aliases)
}
"""What may take several values: its flags -> its setting."""
VARIABLE_NAMES = ", ".join(dict.fromkeys(setting.flag.lstrip("-") for setting in VARIABLES.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCase:
    """A configuration, what it is judged by, and the load of each repeat."""

    case: ReplicaCase
    objective: Objective
    loads: tuple[OfferedLoad, ...]
    step_times: str
    """What predicts them; empty where the configuration cannot run."""
    error: str = ""
    """Why the configuration cannot run at all: its memory, as a rule."""

    @property
    def objectives(self) -> dict[str, SLO]:
        """Of its requests, by the name of their class."""
        return {each.name: each.slo for each in self.loads[0].classes}


def parse_vary(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of each setting that varies, in the order given.

    Raises
    ------
    ConfigError : an unknown name, one that is given twice, or a value that cannot be read.
    """
    axes: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.lstrip("-").replace("_", "-")
        if name not in VARIABLES:
            near = likely_meant(name, VARIABLES)
            hint = f"did you mean {near}?" if near else f"choose of {VARIABLE_NAMES}"
            raise ConfigError(f"--vary {text}: {name!r} cannot vary; {hint}")
        words = [word.strip() for word in values.split(",")]
        if not equals or not all(words):
            raise ConfigError(f"--vary {text}: expected NAME=VALUE,VALUE, such as tp=1,2")
        if len(set(words)) < len(words):
            raise ConfigError(f"--vary {text}: a value is given twice")
        setting = VARIABLES[name]
        if setting.name in axes:
            raise ConfigError(f"--vary {name} is given twice; put all its values into one")
        try:
            axes[setting.name] = [read_value(setting, word) for word in words]
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"--vary {text}: {error}") from error
    return axes


def plan_cases(
    args: argparse.Namespace, vary: Sequence[str], *, objective: str, repeats: int
) -> list[PlannedCase]:
    """Return every configuration that the flags name.

    Parameters
    ----------
    vary, objective, repeats : values of these flags.

    Raises
    ------
    ConfigError : bad input. A model that does not fit its devices is not: that is a case which cannot run.
    """
    if args.request_rate is not None:
        raise ConfigError(
            "capacity searches for the rate: leave out --request-rate. onbeat simulate runs one rate; "
            "--arrivals gamma draws Poisson arrivals for a trace"
        )
    axes = parse_vary(vary)
    asked = read_options(args, Load)
    tbts = axes.pop("tbt", [])
    base = read_options(args, Deployment, seed=args.seed, max_concurrency=args.max_concurrency)
    for each, value in changed(base).items():
        if value not in axes.get(each.name, [value]) and each.name != "device":  # which must be given
            raise ConfigError(f"--vary does not try {each.flag} {value}: add it to --vary, or leave it out")
    of_tbts = [change(asked, tbt=tbt) for tbt in tbts] or [asked]
    goals = [
        parse_objective(objective, tbt=tightest_tbt(own.classes()), mode=args.slo_mode) for own in of_tbts
    ]
    cases = [ReplicaCase(settings=settings, labels=labels) for labels, settings in settings_grid(base, axes)]
    contexts = _contexts(cases)
    planned: list[PlannedCase] = []
    for own, goal in zip(of_tbts, goals, strict=True):
        loads = _loads(own, repeats, cases, contexts)
        if isinstance(goal, ShareObjective):
            goal = goal.of(loads[0])
        goal.allowances(loads[0])  # refuses a load that it cannot judge
        label = ((TBT, f"{own.slo.tbt * 1e3:g}"),) if tbts and own.slo.tbt is not None else ()
        planned += [
            _planned(replace(case, labels=case.labels + label), own.classes(), goal, loads) for case in cases
        ]
    return planned


def _planned(
    case: ReplicaCase, classes: Sequence[SLOClass], objective: Objective, loads: tuple[OfferedLoad, ...]
) -> PlannedCase:
    """Return a case with what chooses its token budget, or why it cannot run."""
    try:
        found, _ = resolve_for(replace(case.settings, overlong="error"), loads[0], classes)
    except ConfigError as error:
        return PlannedCase(case=case, objective=objective, loads=loads, step_times="", error=str(error))
    context = decode_context(loads[0], found.config.scheduler)
    return PlannedCase(
        case=replace(case, tbt=tightest_tbt(classes), context_tokens=context),
        objective=objective,
        loads=loads,
        step_times=step_times_text(case.settings, found.errors),
    )


def _contexts(cases: Sequence[ReplicaCase]) -> dict[int, Deployment]:
    """Return the longest requests that some configuration takes, tokens, with the configuration.

    Raises
    ------
    ConfigError : bad input: no configuration can be built, whatever memory there is.
    """
    contexts: dict[int, Deployment] = {}
    refusals = []
    for case in cases:
        # What an automatic budget needs to know of the load is not known yet.
        is_auto = case.settings.limits.max_num_batched_tokens == AUTO
        settings = change(case.settings, max_num_batched_tokens=None) if is_auto else case.settings
        try:
            contexts[resolve(settings).config.max_model_len] = settings
        except DoesNotFit:
            continue
        except ConfigError as error:
            refusals.append(error)
    if len(refusals) == len(cases):
        raise refusals[0]
    return contexts


def _loads(
    asked: Load, num_repeats: int, cases: Sequence[ReplicaCase], contexts: Mapping[int, Deployment]
) -> tuple[OfferedLoad, ...]:
    """Return the load of each repeat; one for all where the seed changes nothing.

    Raises
    ------
    ConfigError : it has no rate to search, or requests that no configuration takes.
    """
    longest = max(contexts, default=1 << 30)
    try:
        loads = tuple(
            replace(asked, seed=asked.seed + repeat).offered(
                max_model_len=longest, overlong=cases[0].settings.overlong
            )
            for repeat in range(num_repeats)
        )
    except LongerThanContext as error:
        raise what_binds(contexts[longest], error) from None
    first = loads[0]
    if first.rate is None or not np.isfinite(first.rate):
        raise ConfigError(
            f"the {first.name} load has no rate to search: it is a closed loop, or all its requests arrive "
            "at once; give --arrivals gamma, or leave out --max-concurrency"
        )
    return loads[:1] if all(_are_equal(first, load) for load in loads[1:]) else loads


def _are_equal(a: OfferedLoad, b: OfferedLoad) -> bool:
    columns = ("arrivals", "num_prompt_tokens", "num_output_tokens", "class_ids")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in columns)


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
    search: SearchOptions = part(SearchOptions)
    study: outputs.StudyOptions = part(outputs.StudyOptions)
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
    output = options.output
    outputs.check_writable(args, outputs.files_of(output))
    planned = plan_cases(args, options.vary, objective=options.objective, repeats=options.study.repeats)
    lead = _lead(args, planned)
    console.print(lead, markup=False, soft_wrap=True)
    for number, capacities in enumerate(_searches(options, planned, console)):
        report = CapacityReport(
            title=f"Capacity of {_what(args, planned)}",
            lead=lead,
            settings=_settings(args, planned),
            capacities=capacities,
            unit=unit_of(planned[0].loads[0]),
            promises={each.case.labels: promise_text(each.objective, each.objectives) for each in planned},
        )
        if number == 0:
            console.print(f"so far: {answer_of(report)}", markup=False, soft_wrap=True)
    outputs.deliver(capacity_result(report), console, json=output.json, report=output.report)
    if report.is_interrupted:
        return INTERRUPTED
    return INFEASIBLE if report.is_infeasible else 0


def _searches(
    options: CapacityOptions, planned: Sequence[PlannedCase], console: Console
) -> Iterator[list[Capacity]]:
    """Yield a coarse capacity of every case, by its first repeat, and then the capacities."""
    cases = [each for each in planned if not each.error]
    bar = outputs.progress_bar(console, is_quiet=options.output.disable_tqdm or not console.is_terminal)
    row = bar.add_task("searching", total=len(cases) + sum(len(each.loads) for each in cases), note="")

    def search(tasks: Sequence[CapacityTask]) -> Iterator[Repeat | None]:
        def on_trial(index: int, trial: Trial) -> None:
            met = "kept" if trial.verdict.is_met else "missed"
            note = f"{rate_text(trial.rate, of=unit_of(tasks[index].load))} {met}: {trial.verdict.reason}"
            bar.update(row, note=f"{case_name(tasks[index].case.labels)}: {note}")

        advance = partial(bar.advance, row)
        return iter(
            pool.run(find_capacity, tasks, on_event=on_trial, on_result=lambda _index, _result: advance())
        )

    def capacities(found: Callable[[PlannedCase], Sequence[Repeat | None]]) -> list[Capacity]:
        refused = {
            each.case.labels: [Repeat(bracket=None, reason=each.error)] for each in planned if each.error
        }
        return [
            combine_repeats(each.case.labels, refused.get(each.case.labels) or found(each))
            for each in planned
        ]

    with bar, Pool(options.study.num_processes, find_capacity) as pool:
        tasks = [
            CapacityTask(
                case=each.case,
                load=each.loads[0],
                objective=each.objective,
                options=options.search,
                is_coarse=True,
            )
            for each in cases
        ]
        coarse = {each.case.labels: found for each, found in zip(cases, search(tasks), strict=True)}
        yield capacities(lambda each: [coarse[each.case.labels]])
        near = {labels: found.bracket for labels, found in coarse.items() if found is not None}
        fine = search(
            [
                CapacityTask(
                    case=each.case,
                    load=load,
                    objective=each.objective,
                    options=options.search,
                    has_more_load=options.output.report is not None and repeat == 0,
                    near=near.get(each.case.labels),
                    is_other=repeat > 0,
                )
                for each in cases
                for repeat, load in enumerate(each.loads)
            ]
        )

        def all_of(each: PlannedCase) -> list[Repeat | None]:
            first, *others = (next(fine) for _ in each.loads)
            return [first or _unfinished(coarse[each.case.labels]), *others]

        yield capacities(all_of)


def _unfinished(repeat: Repeat | None) -> Repeat | None:
    """Return what a coarse search found where Ctrl-C came before the fine one."""
    if repeat is None or repeat.bracket is None:
        return repeat
    return replace(repeat, bracket=replace(repeat.bracket, is_finished=False))


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
        f"{counted(len(planned), 'case')}, {counted(num_repeats, 'repeat')}, interval: {interval}"
        + (f"; step times: {step_times}" if step_times else "")
    )


def _settings(args: argparse.Namespace, planned: Sequence[PlannedCase]) -> dict[str, Any]:
    """Return the flags that were given, and what became of the load."""
    load = planned[0].loads[0]
    return {
        "flags": outputs.shown_settings(args, hidden=("json", "report", "config")),
        "load": {
            "name": load.name,
            "num_requests": len(load),
            "requests_per_job": len(load) / load.num_at_rate,
            "mean_input_tokens": float(load.num_prompt_tokens.mean()),
            "mean_output_tokens": float(load.num_output_tokens.mean()),
        },
    }
