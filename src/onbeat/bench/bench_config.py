"""What a load test is made of; one small record per concern, filled in by the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onbeat.bench.objectives import SendSLO, check_transport
from onbeat.bench.payload import DEFAULT_PATHS, Api
from onbeat.core.errors import ConfigError
from onbeat.metrics.summary import SummaryOptions
from onbeat.workload.slo_classes import SLOClass


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """The server under test."""

    base_url: str = "http://127.0.0.1:8000"
    api: Api = "completions"
    path: str | None = None
    """None takes the API's usual path."""
    model: str | None = None
    """None asks the server's /v1/models."""
    headers: Mapping[str, str] = field(default_factory=dict)
    request_timeout: float = 6 * 3600.0
    """Seconds."""
    ready_timeout: float = 0.0
    """How long to wait for the server to answer, seconds; 0 tries once."""

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url must start with http:// or https://, got {self.base_url!r}")
        if not self.request_timeout > 0:  # nan too
            raise ConfigError(f"--request-timeout-sec must be above 0, got {self.request_timeout:g}")
        if not self.ready_timeout >= 0:
            raise ConfigError(f"--ready-check-timeout-sec must not be negative, got {self.ready_timeout:g}")

    @property
    def url(self) -> str:
        """Where generation requests are posted."""
        return self.root + (self.path or DEFAULT_PATHS[self.api])

    @property
    def root(self) -> str:
        """The server without a path; a base URL with a trailing /v1 means the same as one without."""
        return self.base_url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What all runs of one command share."""

    target: TargetConfig
    backend: str = "openai"
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
        if self.num_gpus < 1:
            raise ConfigError(f"--num-gpus must be at least 1, got {self.num_gpus}")
        if self.has_jobs and self.target.api == "embeddings":
            raise ConfigError(
                "jobs are calls that are answered, and --backend openai-embeddings has no answers: use "
                "openai or openai-chat"
            )
        check_transport(
            self.send_slo, self.slo_classes, asks_to_shed=self.asks_to_shed, has_jobs=self.has_jobs
        )
