"""`onbeat plan`: the cheapest fleet that keeps a promise, proved by simulation; and the file of the plan.

The flags of `onbeat plan`, and the task that they make.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from onbeat.cli.args import INFEASIBLE, INTERRUPTED, add_config_flag, checked
from onbeat.cli.options import add_options, find_group, number, read_options
from onbeat.cli.outputs import StudyOptions, check_writable, deliver, files_of, progress_bar
from onbeat.cli.plan_output import PlanReport, answer_of, plan_result
from onbeat.core.errors import ConfigError
from onbeat.core.extras import require
from onbeat.core.kinds import ReplicaGroup
from onbeat.core.options import changed, check, option, part, settings_of
from onbeat.core.slo import SLO_CLASSES
from onbeat.perfmodel.device_spec import find_device
from onbeat.planner.fleet_plan import PlanSearch
from onbeat.planner.fleets import search_fleet
from onbeat.planner.objectives import ShareObjective, parse_objective
from onbeat.planner.parallel import Pool
from onbeat.planner.plan_file import digest_of, digest_of_classes, write_plan
from onbeat.planner.plan_task import PlanInterrupted, PlannedFleet, PlanProgress, PlanTask
from onbeat.planner.prices import Prices
from onbeat.planner.units import buckets_of, choices_of, longest_request, make_units, rate_unit
from onbeat.report.result import ResultOptions
from onbeat.scheduler.scheduler_config import SchedulerLimits
from onbeat.simulator.deployment import AUTO, Deployment
from onbeat.simulator.resolve import step_times_text, what_binds
from onbeat.simulator.speculation import Drafts
from onbeat.version import __version__
from onbeat.workload.job_kinds import LANES
from onbeat.workload.load import JOB_LOADS, Load
from onbeat.workload.offered import LongerThanContext, OfferedLoad

_NOT_ASKED = frozenset(
    {
        *("device", "tensor_parallel", "pipeline_parallel", "num_blocks", "replicas", "router", "policy"),
        *("fleet_changes", "kinds", "start_seconds", "drain_seconds"),
        *("disaggregate", "pool_rule", "move_rule", "kv_bandwidth", "kv_latency"),
        *("autoscale", "autoscale_policy", "scale_down_seconds"),
        *(setting.name for setting in settings_of(Drafts)),
    }
)
"""Settings of replicas that a plan chooses, or that it has no use for."""
RUN_SECONDS = 60.0
"""About so long is a simulated run, where --num-prompts does not say."""
FEWEST, MOST = 300, 4000
"""Requests of such a run."""
LEAST_MISSES = 5
"""A run must be long enough for so many requests to be allowed to miss."""


_option = partial(option, group="plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What is planned, how it is looked for, and where the plan goes."""

    gpus: str = _option(
        metavar="ID=N,...",
        help="devices to plan with, each with its number, such as h100-sxm=8,l4; without a number: as many "
        "as it takes",
    )
    tensor_parallel: tuple[int, ...] = _option(
        (1, 2, 4, 8), flag="--tp", many=",", metavar="N,N,...", help="tensor-parallel degrees to choose from"
    )
    prices: Path | None = _option(
        None,
        metavar="FILE.yaml",
        help="dollars per hour of each device, in place of the table in the package",
    )
    objective: str = _option(
        "attainment:0.9",
        metavar="attainment:SHARE",
        help="share of the requests that must keep their objectives",
    )
    headroom: float = _option(
        0.0,
        parse=checked(float, "per cent"),
        metavar="PERCENT",
        at_least=0,
        below=inf,
        help="how far above the promised rate the fleet must still keep the objectives; covers errors of "
        "predictions",
    )
    """Per cent."""
    candidates: int = _option(16, metavar="N", at_least=1, help="most mixes of units to simulate")
    study: StudyOptions = part(StudyOptions)
    output: Path | None = option(
        None,
        aliases=("-o",),
        metavar="PLAN.yaml",
        group="output",
        help="file of the plan, for `serve --config` and `bench`",
    )
    result: ResultOptions = part(ResultOptions)

    def __post_init__(self) -> None:
        check(self, PlanOptions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    add_config_flag(parser)
    for title in ("plan", "study", "model and devices", "data set"):  # so they stand in --help
        find_group(parser, title)
    add_options(parser, PlanOptions)
    find_group(parser, "plan").add_argument(
        "--rate",
        dest="request_rate",
        type=number,
        default=argparse.SUPPRESS,
        metavar="R",
        help="requests/s that the fleet must serve; the same as --request-rate",
    )
    asked = [setting.name for setting in settings_of(Deployment) if setting.name not in _NOT_ASKED]
    add_options(parser, Deployment, only=asked)
    add_options(parser, Load)


def parse_gpus(text: str) -> dict[str, float]:
    """Return how many there are of each device; infinite where nothing bounds it.

    Raises
    ------
    ConfigError : an unknown device, a count below 1, one that is given twice, or none at all.
    """
    found: dict[str, float] = {}
    for item in text.split(","):
        device, equals, number_text = (part.strip() for part in item.partition("="))
        if not device:
            raise ConfigError(f"--gpus {text!r} names no device; give some, such as h100-sxm=8,l4=16")
        device = find_device(device).id
        if device in found:
            raise ConfigError(f"--gpus names {device} twice; give it once")
        if equals and not (number_text.isdecimal() and int(number_text) > 0):
            raise ConfigError(
                f"--gpus {item.strip()}: expected a whole number of at least 1, as in {device}=8"
            )
        found[device] = int(number_text) if equals else inf
    return found


def base_settings(args: argparse.Namespace, device: str) -> Deployment:
    """Return what all units have in common.

    Raises
    ------
    ConfigError : a setting that is out of range, or a token budget that is to be chosen for one replica.
    """
    base = read_options(args, Deployment, device=device, seed=args.seed)
    if base.limits.max_num_batched_tokens == AUTO:
        raise ConfigError(
            "--max-num-batched-tokens auto chooses the budget of one replica, but a plan tries several: "
            "give a number of tokens, or leave it out"
        )
    return base


def promised(args: argparse.Namespace, planned: PlanOptions) -> ShareObjective:
    """Return what a plan promises.

    Raises
    ------
    ConfigError : another objective than a share, or flags of a load that is no plan's.
    """
    options = read_options(args, Load)
    objective = parse_objective(planned.objective, tbt=inf, mode=args.slo_mode)  # those with one are refused
    if not isinstance(objective, ShareObjective) or objective.is_joint:
        raise ConfigError(
            f"--objective {planned.objective}: a plan promises a share of good requests; give "
            "attainment:SHARE"
        )
    if options.rate_steps is not None:
        raise ConfigError("a plan is for one rate: leave out --rate-steps")
    if options.request_rate is None or not 0 < options.request_rate < inf:
        raise ConfigError("a plan needs a finite request rate, in requests per second; give --rate")
    if options.max_concurrency is not None:
        raise ConfigError("a plan needs an open loop: leave out --max-concurrency")
    if options.dataset_name in {*JOB_LOADS, LANES}:
        raise ConfigError(
            f"a plan is for requests that come by themselves, and those of the {options.dataset_name} load "
            "are calls of jobs; ask onbeat capacity what a fleet serves of them"
        )
    if all(each.slo.is_empty for each in options.classes()):
        objective.refuse()
    if options.num_prompts is not None:
        _check_length(options.num_prompts, objective)
    return objective


def plan_task(
    args: argparse.Namespace,
    planned: PlanOptions,
    objective: ShareObjective,
    *,
    available: dict[str, float],
    max_model_len: int,
) -> PlanTask:
    """Return what is to be planned.

    Parameters
    ----------
    max_model_len : of the unit that takes the longest requests, tokens.

    Raises
    ------
    ConfigError : a load without objectives, or one too short to tell.
    """
    options, rate = read_options(args, Load), args.request_rate
    needed_rate = rate * (1 + planned.headroom / 100)
    size = options.num_prompts or round(min(max(RUN_SECONDS * rate, FEWEST), MOST))
    loads = [
        _load(replace(options, seed=options.seed + repeat), size).offered(
            max_model_len=max_model_len, overlong=args.overlong
        )
        for repeat in range(planned.study.repeats)
    ]
    runs = tuple(
        _window(load, needed_rate, size, repeat / max(1, planned.study.repeats - 1))
        for repeat, load in enumerate(loads)
    )
    _check_length(len(runs[0]), objective)
    return PlanTask(
        rate=rate,
        objective=objective,
        load=loads[0],
        runs=runs,
        available=tuple(available.items()),
        most_candidates=planned.candidates,
        headroom=planned.headroom / 100,
    )


def _check_length(size: int, objective: ShareObjective) -> None:
    """Raise ConfigError if a run is too short to tell."""
    needed = round(LEAST_MISSES / max(1 - objective.share, 1e-3))
    if size < needed:
        raise ConfigError(
            f"a run of {size} requests is too short to tell whether {objective.share * 100:g} % keep "
            f"their objectives; take {needed} or more (--num-prompts, a longer trace)"
        )


def _load(options: Load, size: int) -> Load:
    """Return all requests of a file, or as many as a run takes of a data set that is made up."""
    is_file = options.trace is not None or options.dataset_path is not None
    return replace(options, num_prompts=None if is_file else size)


def _window(load: OfferedLoad, rate: float, size: int, position: float) -> OfferedLoad:
    """Return the requests of one run: neighbours, from another part of a long trace each time.

    Parameters
    ----------
    position : 0 is the start of the load, 1 its end.
    """
    first = round((len(load) - min(size, len(load))) * position)
    own = load.take(np.arange(first, first + min(size, len(load))))
    assert own.arrivals is not None
    # One gap before the first request, as if it were the mean.
    return own.with_arrivals(own.arrivals - own.arrivals[0] + 1 / rate).at_rate(rate)


_SERVE_FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8"},
}
"""Number formats of weights that a server runs, and its flags for them."""
_OWN = frozenset({"request_rate", "num_prompts", "seed", "tokenizer", "rate_scale", "max_concurrency"})
"""Settings of the load that a load test has of its own, or that the plan has been told otherwise."""


def run(args: argparse.Namespace) -> int:
    """Plan; returns the exit code."""
    require("scipy", extra="plan", purpose="onbeat plan")
    console = Console(stderr=True, highlight=False)
    options = read_options(args, PlanOptions)
    own = options.result
    check_writable(args, {"--output": options.output, **files_of(own)})
    report = None
    try:
        for each in _plans(args, options, console):
            report = each
    except PlanInterrupted as error:
        if report is None:
            console.print(str(error), markup=False)
            return INTERRUPTED
        report = replace(report, is_interrupted=True)
    assert report is not None, "a plan says at least why there is none"
    others: dict[Path | None, Callable[[Path], None]] = {}
    if report.plan.best is not None:
        others[options.output] = lambda path: save_plan(path, report)
        if note := not_served(report.base):
            console.print(f"warning: {note}", markup=False, soft_wrap=True)
    deliver(plan_result(report), console, json=own.json, report=own.report, others=others)
    if report.is_interrupted:
        return INTERRUPTED
    return INFEASIBLE if report.plan.best is None else 0


def _plans(args: argparse.Namespace, options: PlanOptions, console: Console) -> Iterator[PlanReport]:
    """Yield the answer, which is shown at once, and the whole plan."""
    available = parse_gpus(options.gpus)
    prices = Prices(options.prices)
    base = base_settings(args, next(iter(available)))
    objective = promised(args, options)
    with Pool(options.study.num_processes, search_fleet) as pool:
        units, left_out = make_units(
            base, degrees=sorted(set(options.tensor_parallel)), available=available, prices=prices
        )
        longest = max(map(longest_request, units), default=1 << 30)
        try:
            task = plan_task(args, options, objective, available=available, max_model_len=longest)
        except LongerThanContext as error:
            unit = max(units, key=longest_request)
            raise what_binds(unit.settings, error, choices_of(available[unit.device])) from None
        with show_progress(console, is_quiet=options.result.disable_tqdm) as progress:
            buckets = buckets_of(task.load)
            rated = [rate_unit(unit, buckets) for unit in units]
            planner = PlanSearch(task=task, pool=pool, progress=progress)
            for number, plan in enumerate(planner.plans(rated, left_out)):
                report = PlanReport(args=args, base=base, task=task, plan=plan, prices=prices)
                if number == 0:
                    progress.on_note(answer_of(report)[0])
                yield report


@contextmanager
def show_progress(console: Console, *, is_quiet: bool) -> Iterator[PlanProgress]:
    """Show the stage that is under way, and a line for each thing that is found out."""
    if is_quiet:
        yield PlanProgress()
        return
    bar = progress_bar(console, is_quiet=not console.is_terminal)
    row = bar.add_task("planning", total=None, note="")

    def on_stage(text: str) -> None:
        bar.update(row, description=text)
        if not console.is_terminal:
            on_note(text)

    def on_note(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with bar:
        yield PlanProgress(on_stage=on_stage, on_note=on_note, on_run=lambda: bar.advance(row))


# ---- the file of a plan ----


def save_plan(path: Path, report: PlanReport) -> None:
    """Write the file that `onbeat serve --config` takes.

    Raises
    ------
    ConfigError : it cannot be written.
    """
    best = report.plan.best
    assert best is not None
    load = load_flags(report.args, report.task, path.parent)
    write_plan(path, serve_settings(report, best), promise_section(report, best) | {"load": load})


def serve_settings(report: PlanReport, fleet: PlannedFleet) -> dict[str, Any]:
    """Return the flags of a server with this fleet."""
    base, args = report.base, report.args
    settings: dict[str, Any] = {"model": args.model, "policy": "slo"}
    settings |= _SERVE_FORMATS.get(base.dtype, {})
    settings |= {"kv-cache-dtype": "fp8"} if base.kv_cache_dtype == "fp8" else {}
    for setting in settings_of(SchedulerLimits):
        value = getattr(base.limits, setting.name)
        if setting.name != "policy" and value not in (setting.default, AUTO):
            settings[setting.key.replace("_", "-")] = value
    settings |= {
        key.replace("_", "-"): _plain(value)
        for key in ("slo_ttft_ms", "slo_tbt_ms", "slo_e2e_ms")
        if (value := getattr(args, key)) is not None
    }
    settings["shed"] = str(base.shed)
    served = {"router": "slo", "replicas": fleet.num_replicas}
    if len(fleet.parts) == 1:
        ((unit, _),) = fleet.parts
        settings["device"] = unit.device
        if unit.num_devices > 1:
            settings["tensor-parallel-size"] = unit.num_devices
        if fleet.pools is not None:
            served = {"router": "slo", "disaggregate": str(fleet.pools)}
        return settings | {"fleet": served}
    kinds = [
        ReplicaGroup(device=unit.device, tensor_parallel_size=unit.num_devices, replicas=count)
        for unit, count in fleet.case.ordered()
    ]
    return settings | {"fleet": served | {"kinds": list(map(str, kinds))}}


def not_served(base: Deployment) -> str:
    """Return what a server does not do as it was simulated: its number formats; empty where it does all."""
    kv = "fp32" if base.dtype == "fp32" else "bf16"
    formats = [] if base.dtype in _SERVE_FORMATS else [f"weights in {base.dtype}"]
    if base.kv_cache_dtype not in (AUTO, kv, "fp8"):
        formats.append(f"KV cache in {base.kv_cache_dtype}")
    if not formats:
        return ""
    return (
        f"onbeat serve has no {' and no '.join(formats)}: what it serves by this plan is not what was "
        "simulated, and the promise does not hold of it"
    )


def promise_section(report: PlanReport, fleet: PlannedFleet) -> dict[str, Any]:
    """Return the promise, and where it comes from."""
    task, attainment, capacity = report.task, fleet.attainment, fleet.capacity
    file = report.args.trace or report.args.dataset_path
    classes = report.args.slo_config
    by_class = {name: round(share, 5) for name, share in fleet.by_class.items()}
    devices = {unit.device for unit, _ in fleet.parts}
    return {
        "promise": {
            "attainment": task.objective.share,
            "slo-mode": str(task.objective.mode),
            "request-rate": _plain(task.rate),
            **({"headroom": _plain(round(task.headroom * 100, 6))} if task.headroom else {}),
        },
        "fleet": fleet.name,
        "cost-per-hour": round(fleet.usd_per_hour, 4),
        "watts": round(fleet.watts, 1),
        "verified": {
            "runs": len(fleet.runs),
            "requests-a-run": len(task.runs[0]),
            "attainment": None if attainment is None else [round(share, 5) for share in attainment],
            **({"by-class": by_class} if len(by_class) > 1 else {}),
            "capacity": None
            if capacity is None
            else [round(each, 4) if isfinite(each) else None for each in capacity],
            "more-load-misses": fleet.binds,
            "mean-tpot-ms": None if fleet.mean_tpot is None else round(fleet.mean_tpot * 1e3, 4),
        },
        "prices": {device: report.prices.of(device).text for device in sorted(devices)},
        "dtype": report.base.dtype,
        "kv-cache-dtype": report.base.kv_cache_dtype,
        "gpu-memory-utilization": report.base.gpu_memory_utilization,
        **({"note": note} if (note := not_served(report.base)) else {}),
        "step-times": step_times_text(report.base),
        "host-overhead-ms": _plain(report.base.host_overhead * 1e3),
        "trace-sha256": None if file is None else digest_of(file),
        **({} if classes is None else {"classes-sha256": digest_of_classes(classes)}),
        "made-by": f"onbeat {__version__}",
    }


def load_flags(args: argparse.Namespace, task: PlanTask, folder: Path) -> dict[str, Any]:
    """Return the flags of the planned load, as a load test of a server takes them.

    Parameters
    ----------
    folder : of the plan, from where the paths of files are told.
    """
    given = changed(read_options(args, Load))
    flags = {each.key: getattr(args, each.key) for each in given if each.name not in _OWN}
    for name, value in flags.items():
        if isinstance(value, Path) or (name == "slo_config" and value not in SLO_CLASSES):
            flags[name] = os.path.relpath(value, folder)
    return {
        **{key.replace("_", "-"): _plain(value) for key, value in flags.items()},
        "request-rate": _plain(task.rate),
        "num-prompts": len(task.runs[0]),
    }


def _plain(value: Any) -> Any:
    """Return a value as a file holds it."""
    if isinstance(value, Path):
        return str(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value
