"""What a load test is made of; one small record per concern, with the flags of the command line.

Names and defaults of flags are those of `vllm bench serve` wherever it has the flag.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from onbeat.bench.bench_load import BenchLoad, RunConfig
from onbeat.bench.client import key_headers
from onbeat.bench.objectives import SendSLO, check_transport
from onbeat.bench.payload import DEFAULT_PATHS, Api
from onbeat.core.errors import ConfigError
from onbeat.core.options import changed, check, option, part
from onbeat.core.slo import SLOMode, slo_mode_option
from onbeat.files import parse_object
from onbeat.metrics.summary import METRICS, SummaryOptions
from onbeat.report.result import ResultOptions
from onbeat.workload.load import JOB_LOADS

_server = partial(option, group="server")
_sampling = partial(option, group="sampling")
_output = partial(option, group="output")
_told = partial(option, group="what the server is told of objectives")

# Other names of metrics: E2E is timed from the scheduled arrival, so it contains the client's queue.
METRIC_ALIASES = {"tbt": "itl", "e2el_including_client_queue": "e2el"}
QUEUE_METRIC = "client_queue_time"

BACKENDS: dict[str, Api] = {
    "openai": "completions",
    "openai-completions": "completions",
    "vllm": "completions",
    "openai-chat": "chat",
    "vllm-chat": "chat",
    "openai-embeddings": "embeddings",
}


def pair(text: str) -> tuple[str, str]:
    """Return a key and its value, from `KEY=VALUE`.

    Raises
    ------
    ConfigError : it is none.
    """
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"expected KEY=VALUE, got {text!r}")
    return key, value


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
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
    header: tuple[tuple[str, str], ...] = _server(
        (), many="append", parse=pair, metavar="KEY=VALUE", help="extra header; repeatable"
    )
    request_timeout: float = _server(
        6 * 3600.0, flag="--request-timeout-sec", parse=float, above=0, help="longest time of one request"
    )
    """Seconds."""
    ready_timeout: float = _server(
        0.0,
        flag="--ready-check-timeout-sec",
        parse=float,
        at_least=0,
        help="how long to wait for the server to answer",
    )
    """Seconds; 0 tries once."""

    def __post_init__(self) -> None:
        check(self, TargetConfig)
        if not self.address.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url must start with http:// or https://, got {self.base_url!r}")

    @property
    def address(self) -> str:
        return self.base_url or f"http://{self.host}:{self.port}"

    @property
    def api(self) -> Api:
        """Which API is asked."""
        embeds = self.path is not None and self.path.rstrip("/").endswith("/embeddings")
        return "embeddings" if embeds else BACKENDS[self.backend]

    @property
    def path(self) -> str | None:
        """Path of the API; None is its usual one."""
        end = self.endpoint
        return end if end is None or end.startswith("/") else f"/v1/{end}"

    @property
    def name(self) -> str | None:
        """The model's name in requests; None asks the server's /v1/models."""
        return self.served_model_name or self.model

    @property
    def headers(self) -> dict[str, str]:
        """Those of each request."""
        own = dict(self.header)
        return own if "authorization" in map(str.lower, own) else own | key_headers()

    @property
    def url(self) -> str:
        """Where generation requests are posted."""
        return self.root + (self.path or DEFAULT_PATHS[self.api])

    @property
    def root(self) -> str:
        """The server without a path; a base URL with a trailing /v1 means the same as one without."""
        return self.address.rstrip("/").removesuffix("/v1")


def _sent(name: str, kind: type = float, usual: str = "the server's") -> Any:
    return _sampling(None, parse=kind, help=f"sent as {name} (default: {usual})")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """What is sent with each request."""

    temperature: float | None = _sent("temperature", usual="0, greedy")
    top_p: float | None = _sent("top_p")
    top_k: int | None = _sent("top_k", int)
    min_p: float | None = _sent("min_p")
    frequency_penalty: float | None = _sent("frequency_penalty")
    presence_penalty: float | None = _sent("presence_penalty")
    repetition_penalty: float | None = _sent("repetition_penalty")
    ignore_eos: bool = _sampling(
        default=False, is_switch=True, help="generate the planned length, even if the model would stop"
    )
    extra_body: str = _sampling("{}", metavar="JSON", help="fields added to every request")

    def body(self, api: Api) -> dict[str, Any]:
        """Return the fields that are added to each request.

        Raises
        ------
        ConfigError : --extra-body is no JSON object, or something is to be sampled for embeddings.
        """
        given = {each.name: value for each, value in changed(self).items() if each.name != "extra_body"}
        if api != "embeddings":
            given = {"temperature": 0.0} | given  # greedy: a load test should do the same work each time
        elif given:
            flag = "--" + next(iter(given)).replace("_", "-")
            raise ConfigError(f"{flag} is given, but embeddings sample nothing: leave it out")
        return given | parse_object(self.extra_body, "--extra-body")


def _metric(name: str) -> str:
    name = METRIC_ALIASES.get(name, name)
    if name not in (known := (*METRICS, QUEUE_METRIC)):
        raise ConfigError(
            f"--percentile-metrics: unknown metric {name!r}; known are {', '.join((*known, *METRIC_ALIASES))}"
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions(ResultOptions):
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

    def __post_init__(self) -> None:
        for item in self.metadata:
            pair(item)
        if self.saves_under_name:
            return
        if self.result_dir is not None:
            raise ConfigError("--result-dir needs --save-result")
        for each in changed(self) if self.json is None else ():
            if each.name in {"save_detailed", "metadata"}:
                raise ConfigError(f"{each.flag} is for a saved result: give --json FILE or --save-result too")

    def objectives(self) -> dict[str, float]:
        """Return those of --goodput, seconds.

        Raises
        ------
        ConfigError : one is no name with a number.
        """
        objectives: dict[str, float] = {}
        for item in self.goodput:
            name, _, value = item.partition(":")
            try:
                objectives[name] = float(value) / 1e3
            except ValueError:
                raise ConfigError(f"--goodput takes NAME:MILLISECONDS like ttft:500, got {item!r}") from None
        return objectives

    @property
    def saves_under_name(self) -> bool:
        """Whether the result gets a file that is named after the settings, or as --result-filename says."""
        appends = self.append_result and self.json is None  # else to the file of --json
        return bool(self.save_result or self.result_filename or appends)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What a command measures: the settings that all its runs share, and the load that they are made of."""

    target: TargetConfig = part(TargetConfig)
    load: BenchLoad = part(BenchLoad)
    slo_mode: SLOMode = slo_mode_option()
    send_slo: SendSLO = _told(
        "auto",
        help="in the body, as x-llm-d-slo-ttft-ms and x-llm-d-slo-tpot-ms headers, or not at all; auto: in "
        "the body if the server says that it is onbeat",
    )
    shed: bool = _told(
        default=False,
        is_switch=True,
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

    def __post_init__(self) -> None:
        self.summary()  # says what is wrong before a server is asked, as the next does
        self.sampling.body(self.target.api)

    def summary(self) -> SummaryOptions:
        """Return what is computed of each run."""
        return SummaryOptions(
            metrics=tuple(name for name in self.output.percentile_metrics if name in METRICS),
            percentiles=self.output.metric_percentiles,
            objectives=self.output.objectives() or None,
            slo_mode=self.slo_mode,
        )

    def runs(self) -> list[RunConfig]:
        """Return the runs that are asked for: one, or those of sweeps.

        Raises
        ------
        ConfigError : settings that do not go together.
        """
        load, has_jobs = self.load.named(), self.load.dataset_name in JOB_LOADS  # before a server is asked
        if has_jobs and self.target.api == "embeddings":
            raise ConfigError(
                "jobs are calls that are answered, and --backend openai-embeddings has no answers: use "
                "openai or openai-chat"
            )
        if load.salt is None:
            load = replace(load, salt=secrets.token_hex(4))
        runs = load.runs(self.output.label or "")
        check_transport(self.send_slo, runs[0].classes, asks_to_shed=self.shed, has_jobs=has_jobs)
        return runs
