"""The flags of `onbeat plan`, and the task that they make."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path

import numpy as np

from onbeat.cli.args import add_config_flag, checked
from onbeat.cli.options import add_options, find_group, number, read_options
from onbeat.cli.outputs import ResultOptions, StudyOptions
from onbeat.core.errors import ConfigError
from onbeat.core.options import check, option, part, settings_of
from onbeat.perfmodel.device_spec import find_device
from onbeat.planner.objectives import ShareObjective, parse_objective
from onbeat.planner.plan_task import PlanTask
from onbeat.simulator.deployment import AUTO, Deployment
from onbeat.workload.load import Load
from onbeat.workload.offered import OfferedLoad

_NOT_ASKED = frozenset(
    {
        *("device", "tensor_parallel", "pipeline_parallel", "num_blocks", "replicas", "router", "policy"),
        *("fleet_changes", "kinds", "start_seconds", "drain_seconds"),
        *("disaggregate", "pool_rule", "move_rule", "kv_bandwidth", "kv_latency"),
        *("autoscale", "autoscale_policy", "scale_down_seconds"),
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
    tensor_parallel: str = _option(
        "1,2,4,8", flag="--tp", metavar="N,N,...", help="tensor-parallel degrees to choose from"
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


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
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
        find_device(device)
        if device in found:
            raise ConfigError(f"--gpus names {device} twice; give it once")
        if equals and not (number_text.isdecimal() and int(number_text) > 0):
            raise ConfigError(
                f"--gpus {item.strip()}: expected a whole number of at least 1, as in {device}=8"
            )
        found[device] = int(number_text) if equals else inf
    return found


def parse_degrees(text: str) -> list[int]:
    """Return tensor-parallel degrees, ascending.

    Raises
    ------
    ConfigError : one that is no whole number above 0, or that is given twice.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words) or len(set(words)) < len(words):
        raise ConfigError(f"--tp {text!r}: expected different whole numbers of at least 1, such as 1,2,4")
    return sorted(int(word) for word in words)


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


def plan_task(
    args: argparse.Namespace,
    planned: PlanOptions,
    available: dict[str, float],
    max_model_len: int,
) -> PlanTask:
    """Return what is to be planned.

    Parameters
    ----------
    max_model_len : of the unit that takes the longest requests, tokens.

    Raises
    ------
    ConfigError : flags that do not go together, a load without rate or objectives, or one too short to tell.
    """
    options = read_options(args, Load)
    rate = options.request_rate
    objective = parse_objective(planned.objective, mode=args.slo_mode)
    if not isinstance(objective, ShareObjective) or objective.is_joint:
        raise ConfigError(
            f"--objective {planned.objective}: a plan promises a share of good requests; give "
            "attainment:SHARE"
        )
    if options.rate_steps is not None:
        raise ConfigError("a plan is for one rate: leave out --rate-steps")
    if rate is None or not 0 < rate < inf:
        raise ConfigError("a plan needs a request rate, in requests per second; give --rate")
    if options.max_concurrency is not None:
        raise ConfigError("a plan needs an open loop: leave out --max-concurrency")
    needed_rate = rate * (1 + planned.headroom / 100)
    size = options.num_prompts or round(min(max(RUN_SECONDS * rate, FEWEST), MOST))
    loads = [
        _load(replace(options, seed=options.seed + repeat), size).offered(
            max_model_len=max_model_len, overlong=args.overlong
        )
        for repeat in range(planned.study.repeats)
    ]
    if loads[0].jobs is not None:
        raise ConfigError(
            f"a plan is for requests that come by themselves, and those of the {loads[0].name} load are "
            "calls of jobs; ask onbeat capacity what a fleet serves of them"
        )
    runs = tuple(
        _window(load, needed_rate, size, repeat / max(1, planned.study.repeats - 1))
        for repeat, load in enumerate(loads)
    )
    needed = round(LEAST_MISSES / max(1 - objective.share, 1e-3))
    if len(runs[0]) < needed:
        raise ConfigError(
            f"a run of {len(runs[0])} requests is too short to tell whether {objective.share * 100:g} % keep "
            f"their objectives; take {needed} or more (--num-prompts, a longer trace)"
        )
    objective.allowances(runs[0])  # refuses a load without objectives
    return PlanTask(
        rate=rate,
        objective=objective,
        load=loads[0],
        runs=runs,
        available=tuple(available.items()),
        most_candidates=planned.candidates,
        headroom=planned.headroom / 100,
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
