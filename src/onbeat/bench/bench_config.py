"""What a load test is made of; one small record per concern, filled in by the command line.

Names and defaults of flags are those of `vllm bench serve` wherever it has the flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from onbeat.bench.client import key_headers
from onbeat.bench.objectives import SendSLO, check_transport
from onbeat.bench.payload import DEFAULT_PATHS, Api
from onbeat.core.errors import ConfigError
from onbeat.core.options import changed, check, option
from onbeat.files import parse_object
from onbeat.metrics.summary import SummaryOptions
from onbeat.workload.slo_classes import SLOClass

_server = partial(option, group="server")
_sampling = partial(option, group="sampling")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What all runs of one command share."""

    target: TargetConfig
    label: str | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Sampling fields and others, added to each request."""
    summary: SummaryOptions = field(default_factory=SummaryOptions)
    slo_classes: tuple[SLOClass, ...] = ()
    """Objectives by share of the requests."""
    send_slo: SendSLO = "auto"
    """How the server is told of them; `auto` tells servers that say they are onbeat."""
    asks_to_shed: bool = False
    """Ask the server to refuse requests whose TTFT it predicts to be missed."""
    has_jobs: bool = False
    """Whether requests are calls of jobs, whose deadlines the server is told beside their objectives."""
    names_classes: bool = True
    """Tell the server the class of a request, which it must know then, beside its objectives."""
    num_gpus: int = 1
    metadata: Mapping[str, str] = field(default_factory=dict)
    keep_text: bool = False

    def __post_init__(self) -> None:
        if self.has_jobs and self.target.api == "embeddings":
            raise ConfigError(
                "jobs are calls that are answered, and --backend openai-embeddings has no answers: use "
                "openai or openai-chat"
            )
        check_transport(
            self.send_slo, self.slo_classes, asks_to_shed=self.asks_to_shed, has_jobs=self.has_jobs
        )
