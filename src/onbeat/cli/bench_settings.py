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

from onbeat.bench.bench_config import BenchConfig, TargetConfig
from onbeat.bench.bench_load import BenchLoad, RunConfig
from onbeat.bench.objectives import SendSLO
from onbeat.bench.payload import Api
from onbeat.bench.promise import refuse_too_few
from onbeat.cli.args import LEVELS, key_headers, listed, numbers
from onbeat.cli.options import read_value
from onbeat.core.errors import ConfigError, quoted
from onbeat.core.options import change, changed, option, part, settings_of
from onbeat.core.slo import SLOMode, slo_mode_option
from onbeat.files import parse_object
from onbeat.metrics.summary import METRICS, SummaryOptions
from onbeat.planner.plan_file import Promise
from onbeat.workload.load import JOB_LOADS

_server = partial(option, group="server")
_sampling = partial(option, group="sampling")
_output = partial(option, group="output")

BACKENDS: dict[str, Api] = {
    "openai": "completions",
    "openai-completions": "completions",
    "vllm": "completions",
    "openai-chat": "chat",
    "vllm-chat": "chat",
    "openai-embeddings": "embeddings",
}
# Other names of metrics: E2E is timed from the scheduled arrival, so it contains the client's queue.
METRIC_ALIASES = {"tbt": "itl", "e2el_including_client_queue": "e2el"}
QUEUE_METRIC = "client_queue_time"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The server under test."""

    backend: str = _server("openai", choices=tuple(BACKENDS), help="which API to speak")
    base_url: str | None = _server(None, metavar="URL", help="server address; replaces --host and --port")
    host: str = _server("127.0.0.1", help="name or address of the server")
    port: int = _server(8000, parse=int, help="port of the server")
    endpoint: str | None = _server(
        None,
        metavar="PATH",
        help="path of the API, embeddings for /v1/embeddings (default: the backend's usual one)",
    )
    model: str | None = _server(None, help="model to ask for (default: the first one that the server lists)")
    served_model_name: str | None = _server(
        None, help="the model's name in requests, if it differs from --model"
    )
    header: tuple[str, ...] = _server((), many="append", metavar="KEY=VALUE", help="extra header; repeatable")
    request_timeout_sec: float = _server(21600.0, parse=float, help="longest time of one request")
    ready_check_timeout_sec: float = _server(
        0.0, parse=float, help="how long to wait for the server to answer"
    )

    def target(self) -> TargetConfig:
        """Return where and how requests are sent.

        Raises
        ------
        ConfigError : a value is wrong.
        """
        headers = _pairs("--header", self.header)
        if "authorization" not in map(str.lower, headers):
            headers |= key_headers()
        path = self.endpoint
        if path is not None and not path.startswith("/"):
            path = f"/v1/{path}"
        embeds = path is not None and path.rstrip("/").endswith("/embeddings")
        return TargetConfig(
            base_url=self.base_url or f"http://{self.host}:{self.port}",
            api="embeddings" if embeds else BACKENDS[self.backend],
            path=path,
            model=self.served_model_name or self.model,
            headers=headers,
            request_timeout=self.request_timeout_sec,
            ready_timeout=self.ready_check_timeout_sec,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """What is sent with each request."""

    temperature: float | None = _sampling(None, parse=float, help="sent as temperature (default: 0, greedy)")
    top_p: float | None = _sampling(None, parse=float, help="sent as top_p (default: the server's)")
    top_k: int | None = _sampling(None, parse=int, help="sent as top_k (default: the server's)")
    min_p: float | None = _sampling(None, parse=float, help="sent as min_p (default: the server's)")
    frequency_penalty: float | None = _sampling(
        None, parse=float, help="sent as frequency_penalty (default: the server's)"
    )
    presence_penalty: float | None = _sampling(
        None, parse=float, help="sent as presence_penalty (default: the server's)"
    )
    repetition_penalty: float | None = _sampling(
        None, parse=float, help="sent as repetition_penalty (default: the server's)"
    )
    ignore_eos: bool = _sampling(
        default=False, is_switch=True, help="generate the planned length, even if the model would stop"
    )
    extra_body: str = _sampling("{}", metavar="JSON", help="fields added to every request")

    def body(self) -> dict[str, Any]:
        """Return the fields that are added to each request that generates.

        Raises
        ------
        ConfigError : --extra-body is no JSON object.
        """
        # Greedy by default: a load test should do the same work each time.
        return {"temperature": 0.0} | self._given() | parse_object(self.extra_body, "--extra-body")

    def body_of_embeddings(self) -> dict[str, Any]:
        """Return the fields that are added to each request for an embedding.

        Raises
        ------
        ConfigError : --extra-body is no JSON object, or something is to be sampled.
        """
        if given := self._given():
            flag = "--" + next(iter(given)).replace("_", "-")
            raise ConfigError(f"{flag} is given, but embeddings sample nothing: leave it out")
        return parse_object(self.extra_body, "--extra-body")

    def _given(self) -> dict[str, Any]:
        names = (each.name for each in settings_of(SamplingOptions) if each.name != "extra_body")
        found = {name: getattr(self, name) for name in names}
        return {name: value for name, value in found.items() if value is not None and value is not False}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What is shown and saved."""

    label: str | None = _output(None, help="name of this run in files and reports (default: the backend)")
    goodput: tuple[str, ...] = _output((), metavar="NAME:MS", help="objectives in ms: ttft, tpot, tbt, e2el")
    percentile_metrics: str = _output(",".join(METRICS), metavar="NAMES", help="metrics in the table")
    metric_percentiles: str = _output(
        "50,90,99", metavar="P,P,...", help="percentiles that are shown and saved"
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

    def table_metrics(self) -> list[str]:
        """Return the metrics to show, each once.

        Raises
        ------
        ConfigError : one is unknown.
        """
        words = (word.strip() for word in self.percentile_metrics.split(","))
        names = [METRIC_ALIASES.get(word, word) for word in words if word]
        known = (*METRICS, QUEUE_METRIC)
        for name in names:
            if name not in known:
                all_names = ", ".join((*known, *METRIC_ALIASES))
                raise ConfigError(f"--percentile-metrics: unknown metric {name!r}; known are {all_names}")
        return list(dict.fromkeys(names))

    def percentiles(self) -> tuple[float, ...]:
        """Return the percentiles to show.

        Raises
        ------
        ConfigError : --metric-percentiles holds something else than numbers.
        """
        return tuple(numbers("--metric-percentiles", self.metric_percentiles))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Every flag of the command."""

    server: ServerOptions = part(ServerOptions)
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
    sampling: SamplingOptions = part(SamplingOptions)
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
    output, target, sampling = options.output, options.server.target(), options.sampling
    return BenchConfig(
        target=target,
        backend=options.server.backend,
        label=output.label,
        extra_body=sampling.body_of_embeddings() if target.api == "embeddings" else sampling.body(),
        summary=SummaryOptions(
            metrics=tuple(name for name in output.table_metrics() if name in METRICS),
            percentiles=output.percentiles(),
            objectives=_objectives(output.goodput) or None,
            slo_mode=options.slo_mode,
        ),
        slo_classes=options.load.classes(),
        send_slo=options.send_slo,
        asks_to_shed=options.shed,
        has_jobs=options.load.dataset_name in JOB_LOADS,
        names_classes=options.check_plan is None,  # a plan's server knows the objectives, not the names
        num_gpus=output.num_gpus,
        metadata=_pairs("--metadata", output.metadata),
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
    levels = listed("--sweep-concurrency", load.sweep_concurrency, *LEVELS) if load.sweep_concurrency else ()
    return load.runs(title, levels, numbers("--sweep-rate", load.sweep_rate) if load.sweep_rate else ())


def _objectives(items: Sequence[str]) -> dict[str, float]:
    objectives: dict[str, float] = {}
    for item in items:
        name, _, value = item.partition(":")
        try:
            objectives[name] = float(value) / 1e3
        except ValueError:
            raise ConfigError(f"--goodput takes NAME:MILLISECONDS like ttft:500, got {item!r}") from None
    return objectives


def _pairs(flag: str, items: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise ConfigError(f"{flag} takes KEY=VALUE, got {item!r}")
        pairs[key] = value
    return pairs


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
