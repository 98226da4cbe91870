"""What a load test is made of; one small record per concern, with the flags of the command line.

Names and defaults of flags are those of `vllm bench serve` wherever it has the flag.

`SLOTransport` says how the server is told of the objectives of each request.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from onbeat.bench.bench_load import BenchLoad, RunConfig
from onbeat.bench.record import DEFAULT_PATHS, Api, SentRequest
from onbeat.core.errors import ConfigError
from onbeat.core.options import changed, check, option, part
from onbeat.core.slo import SLOMode
from onbeat.core.slo_options import slo_mode_option
from onbeat.files import parse_object
from onbeat.metrics.summary import METRICS, SummaryOptions
from onbeat.report.result import ResultOptions
from onbeat.workload.load import JOB_LOADS, ONLY_CLASS
from onbeat.workload.slo_classes import SLOClass

SendSLO = Literal["auto", "body", "headers", "none"]
SEND_SLO: tuple[SendSLO, ...] = get_args(SendSLO)

TTFT_HEADER = "x-llm-d-slo-ttft-ms"
TPOT_HEADER = "x-llm-d-slo-tpot-ms"
TENANT_HEADER = "x-llm-d-inference-fairness-id"


@dataclass(frozen=True, slots=True, kw_only=True)
class SLOTransport:
    """How the server hears of a request's objectives.

    Parameters
    ----------
    how : `body` is an object `slo`, `headers` are llm-d's, `none` keeps the
        objectives to the client, which scores by them all the same.
    asks_to_shed : ask the server to refuse the request where it predicts that its TTFT cannot be kept.
    names_classes : whether the server is told the class beside its objectives: it must know it then.
    """

    how: Literal["body", "headers", "none"] = "none"
    asks_to_shed: bool = False
    names_classes: bool = True

    def body(self, record: SentRequest) -> dict[str, Any]:
        """Return the fields that a request's body gets."""
        has_objectives = record.slo is not None and not record.slo.is_empty
        if self.how != "body" or not (has_objectives or record.job):
            return {}
        fields: dict[str, Any] = {} if record.job is None else {"job": record.job.fields()}
        fields |= {
            f"{name}_ms": limit * 1e3
            for name in ("ttft", "tbt", "e2e")
            if (limit := getattr(record.slo, name, None)) is not None
        }
        if self.names_classes and record.request_class not in {None, ONLY_CLASS}:
            fields["class"] = record.request_class
        if record.weight != 1:
            fields["weight"] = record.weight
        if self.asks_to_shed:
            fields["shed"] = True
        return {"slo": fields}

    def headers(self, record: SentRequest) -> dict[str, str]:
        """Return the headers that a request gets; the tenant has a header where the rest is in the body."""
        if self.how == "none":
            return {}
        headers = {} if record.tenant is None else {TENANT_HEADER: record.tenant}
        if self.how == "headers" and record.slo is not None:
            limits = {TTFT_HEADER: record.slo.ttft, TPOT_HEADER: record.slo.tbt}
            headers |= {name: f"{limit * 1e3:g}" for name, limit in limits.items() if limit is not None}
        if self.how == "headers" and record.job is not None:
            fields = record.job.fields()
            headers |= {f"x-slo-job-{name.replace('_', '-')}": f"{value}" for name, value in fields.items()}
        return headers


def check_transport(
    send: SendSLO, classes: Sequence[SLOClass], *, asks_to_shed: bool, has_jobs: bool = False
) -> None:
    """Refuse ways of telling that would leave something out.

    Parameters
    ----------
    has_jobs : whether requests are calls of jobs, whose deadlines are told.

    Raises
    ------
    ConfigError : there is nothing to tell, or no word for it.
    """
    if not classes and not has_jobs:
        if asks_to_shed:
            raise ConfigError("--shed needs objectives: give --slo-ttft-ms or --slo-config")
        if send in {"body", "headers"}:
            raise ConfigError(
                f"--send-slo {send} has nothing to send: give --slo-ttft-ms, --slo-tbt-ms or --slo-config"
            )
        return
    if asks_to_shed and send not in {"auto", "body"}:
        raise ConfigError(
            f"--shed goes in the body, which --send-slo {send} does not send: use --send-slo body"
        )
    if send == "headers" and any(each.slo.e2e is not None or each.weight != 1 for each in classes):
        raise ConfigError("--send-slo headers cannot carry e2e objectives or weights: use --send-slo body")


def choose_transport(send: SendSLO, *, is_onbeat: bool, asks_to_shed: bool) -> SLOTransport:
    """Return how this server is told: `auto` speaks only to servers known to listen.

    Raises
    ------
    ConfigError : `--shed` was given for a server that would not be asked.
    """
    how = send if send != "auto" else "body" if is_onbeat else "none"
    if asks_to_shed and how != "body":
        raise ConfigError(
            "--shed asks the server to refuse requests, but this server does not say that it is "
            "onbeat: leave --shed out, or force it with --send-slo body"
        )
    return SLOTransport(how=how, asks_to_shed=asks_to_shed)


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


def key_headers() -> dict[str, str]:
    """Return the header with the API's key, which is in $OPENAI_API_KEY; nothing without one."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


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
