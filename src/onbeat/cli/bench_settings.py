"""The flags of `onbeat bench serve`, and the configuration of a load test that they make.

Names and defaults are those of `vllm bench serve` wherever it has the flag.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from onbeat.bench.bench_config import BenchConfig, SamplingConfig, TargetConfig, pair
from onbeat.bench.bench_load import BenchLoad, RunConfig
from onbeat.bench.objectives import SendSLO
from onbeat.bench.promise import refuse_too_few
from onbeat.cli.options import read_value
from onbeat.core.errors import ConfigError, quoted
from onbeat.core.options import change, changed, option, part, settings_of
from onbeat.core.slo import SLOMode, slo_mode_option
from onbeat.metrics.summary import METRICS, SummaryOptions
from onbeat.planner.plan_file import Promise
from onbeat.workload.load import JOB_LOADS

_output = partial(option, group="output")

# Other names of metrics: E2E is timed from the scheduled arrival, so it contains the client's queue.
METRIC_ALIASES = {"tbt": "itl", "e2el_including_client_queue": "e2el"}
QUEUE_METRIC = "client_queue_time"


def _metric(name: str) -> str:
    name = METRIC_ALIASES.get(name, name)
    if name not in (known := (*METRICS, QUEUE_METRIC)):
        raise ConfigError(
            f"--percentile-metrics: unknown metric {name!r}; known are {', '.join((*known, *METRIC_ALIASES))}"
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What is shown and saved."""

    label: str | None = _output(None, help="name of this run in files and reports (default: the backend)")
    goodput: tuple[str, ...] = _output((), metavar="NAME:MS", help="objectives in ms: ttft, tpot, tbt, e2el")
    percentile_metrics: tuple[str, ...] = _output(
        METRICS, many=",", parse=_metric, metavar="NAMES", help="metrics in the table"
    )
    metric_percentiles: tuple[float, ...] = _output(
        (50, 90, 99), many=",", metavar="P,P,...", help="percentiles that are shown and saved"
    )
    num_gpus: int = _output(1, parse=int, help="devices of the server, for tokens/s per GPU")
    json: Path | None = _output(None, metavar="FILE", help="save the result here")
    save_result: bool = _output(
        default=False, is_switch=True, help="save the result under a name made from the settings"
    )
    save_detailed: bool = _output(
        default=False, is_switch=True, help="also save every request's times and text"
    )
    append_result: bool = _output(
        default=False, is_switch=True, help="add a line to the file instead of replacing it"
    )
    result_dir: Path | None = _output(
        None, metavar="DIR", help="folder of the saved result (default: the current one)"
    )
    result_filename: str | None = _output(
        None, metavar="NAME", help="name of the saved result (default: made from the settings)"
    )
    metadata: tuple[str, ...] = _output(
        (), many="*", metavar="KEY=VALUE", help="keys and values added to the saved result"
    )
    report: Path | None = _output(None, metavar="FILE.html", help="write one self-contained page with plots")
    disable_tqdm: bool = _output(default=False, is_switch=True, help="show no progress bar")

    def __post_init__(self) -> None:
        if self.saves_under_name:
            return
        if self.result_dir is not None:
            raise ConfigError("--result-dir needs --save-result")
        for each in changed(self) if self.json is None else ():
            if each.name in {"save_detailed", "metadata"}:
                raise ConfigError(f"{each.flag} is for a saved result: give --json FILE or --save-result too")

    @property
    def saves_under_name(self) -> bool:
        """Whether the result gets a file that is named after the settings, or as --result-filename says."""
        appends = self.append_result and self.json is None  # else to the file of --json
        return bool(self.save_result or self.result_filename or appends)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Every flag of the command."""

    target: TargetConfig = part(TargetConfig)
    load: BenchLoad = part(BenchLoad)
    slo_mode: SLOMode = slo_mode_option()
    send_slo: SendSLO = option(
        "auto",
        group="what the server is told of objectives",
        help="in the body, as x-llm-d-slo-ttft-ms and x-llm-d-slo-tpot-ms headers, or not at all; auto: in "
        "the body if the server says that it is onbeat",
    )
    shed: bool = option(
        default=False,
        is_switch=True,
        group="what the server is told of objectives",
        help="ask the server to refuse requests that it predicts to be late",
    )
    sampling: SamplingConfig = part(SamplingConfig)
    output: OutputOptions = part(OutputOptions)
    check_plan: Path | None = option(
        None,
        metavar="PLAN.yaml",
        group="load",
        help="run the load of an `onbeat plan` file and check its promise; exit code 3 if it is broken",
    )


def bench_config(options: BenchOptions) -> BenchConfig:
    """Return what all runs of the command share.

    Raises
    ------
    ConfigError : a value is wrong.
    """
    output = options.output
    return BenchConfig(
        target=options.target,
        label=output.label,
        extra_body=options.sampling.body(options.target.api),
        summary=SummaryOptions(
            metrics=tuple(name for name in output.percentile_metrics if name in METRICS),
            percentiles=output.metric_percentiles,
            objectives=_objectives(output.goodput) or None,
            slo_mode=options.slo_mode,
        ),
        slo_classes=options.load.classes(),
        send_slo=options.send_slo,
        asks_to_shed=options.shed,
        has_jobs=options.load.dataset_name in JOB_LOADS,
        names_classes=options.check_plan is None,  # a plan's server knows the objectives, not the names
        num_gpus=output.num_gpus,
        metadata=dict(map(pair, output.metadata)),
        keep_text=output.save_detailed,
    )


def planned_runs(load: BenchLoad, title: str) -> list[RunConfig]:
    """Return the runs that the flags ask for: one, or those of sweeps.

    Raises
    ------
    ConfigError : flags that do not go together.
    """
    load = load.named()  # before anybody asks the server
    if load.salt is None:
        load = replace(load, salt=secrets.token_hex(4))
    return load.runs(title)


def _objectives(items: Sequence[str]) -> dict[str, float]:
    objectives: dict[str, float] = {}
    for item in items:
        name, _, value = item.partition(":")
        try:
            objectives[name] = float(value) / 1e3
        except ValueError:
            raise ConfigError(f"--goodput takes NAME:MILLISECONDS like ttft:500, got {item!r}") from None
    return objectives


_OWN = ("num-prompts", "num-warmups", "salt", "seed", "tokenizer")
"""Flags of the load that may differ from the plan's: how long the test is, and what is drawn."""


def with_planned_load(options: BenchOptions, promise: Promise) -> BenchOptions:
    """Return the options with the load of a plan.

    Raises
    ------
    ConfigError : the command line asks for another load, or for too few requests, or the plan for a flag that
        there is none of.
    """
    settings = {setting.key.replace("_", "-"): setting for setting in settings_of(BenchOptions)}
    planned = {**promise.load, "slo-mode": promise.mode}
    given = {each.name: value for each, value in changed(options).items()}
    changes: dict[str, Any] = {"ignore_eos": True}
    for name, value in planned.items():
        if name not in settings:
            raise ConfigError(f"{promise.path} has the load flag {name!r}, which a load test does not take")
        setting = settings[name]
        try:
            wanted = read_value(setting, str(value)) if not isinstance(value, bool) else value
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{promise.path}: {name} is {quoted(value)}: {error}") from error
        if name not in _OWN and given.get(setting.name, wanted) != wanted:
            raise ConfigError(
                f"{setting.flag} changes the load, but the plan has {name} {value}; leave it out, or "
                "make another plan"
            )
        if name not in _OWN or setting.name not in given:
            changes[setting.name] = wanted
    for each in changed(options.load):
        if each.key.replace("_", "-") not in {*planned, *_OWN}:
            raise ConfigError(f"--check-plan runs the load of its plan: leave out {each.flag}")
    num_prompts = changes.get("num_prompts", given.get("num_prompts"))
    if num_prompts is not None:
        refuse_too_few(num_prompts, promise.share)  # rather than once they were sent
    return change(options, **changes)
