"""What a load test is made of; one small record per concern, filled in by the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from onbeat.bench.objectives import SendSLO, check_transport
from onbeat.bench.payload import DEFAULT_PATHS, Api
from onbeat.core.errors import ConfigError
from onbeat.metrics.summary import SummaryOptions
from onbeat.workload.arrival_plan import ArrivalKind, ArrivalPlan
from onbeat.workload.arrivals import RampShape, RateStep
from onbeat.workload.lengths import check_length
from onbeat.workload.load_source import JOB_LOADS, SharedName
from onbeat.workload.offered import check_num_requests
from onbeat.workload.slo_classes import SLOClass
from onbeat.workload.trace import TIMED_KINDS

DatasetName = Literal[SharedName, "prefix_repetition", "custom"]

FILE_DATASETS = frozenset({"sharegpt", "custom", "azure", "mooncake", "burstgpt", "vidur", "lengths", "jobs"})
TEXT_DATASETS = frozenset({"sharegpt", "custom"})
"""Those that bring their own prompts, whose length only a tokenizer can tell."""
TIMED_DATASETS = TIMED_KINDS | {"jobs"}
"""Those whose files have arrival times, or may have."""
DEFAULT_NUM_PROMPTS = 1000


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
class DatasetConfig:
    """What is asked."""

    name: DatasetName = "random"
    path: Path | None = None
    input_len: int = 1024
    """Mean prompt tokens of `random` and `conversation`, the most of `zipf`."""
    output_len: int | None = None
    """The same of output tokens (128 if None); replaces a file's where given."""
    zipf_exponent: float = 1.0
    range_ratio: float = 0.0
    """Spread of the lengths of `random` around their means."""
    output_range_ratio: float | None = None
    """The same of output lengths alone; None takes `range_ratio`."""
    long_share: float = 0.0
    """Share of the requests of `random` whose prompts have `long_input_len` tokens: every n-th one."""
    long_input_len: int = 1500
    prefix_len: int = 0
    """Tokens that all prompts of `random` share, on top of `input_len`."""
    num_prefixes: int = 10
    """Different prefixes of `prefix_repetition`."""
    repeated_prefix_len: int = 256
    suffix_len: int = 256
    repetition_output_len: int = 128
    shuffle: bool = True
    """Draw conversations in random order (`sharegpt`, `lengths`) instead of file order."""
    job_deadline: float | None = None
    """Of each job, seconds; None: as its file says, or by its length."""

    def __post_init__(self) -> None:
        if self.name in FILE_DATASETS and self.path is None:
            raise ConfigError(f"--dataset-name {self.name} needs a file: give it with --dataset-path")
        if self.name not in FILE_DATASETS and self.path is not None:
            raise ConfigError(
                f"--dataset-name {self.name} reads no file, but --dataset-path {self.path} was given"
            )
        if self.job_deadline is not None and not self.has_jobs:
            raise ConfigError(f"--job-deadline-ms is for loads of jobs, not for --dataset-name {self.name}")
        for name in ("input_len", "output_len", "long_input_len", "repeated_prefix_len", "suffix_len"):
            check_length(getattr(self, name) or 1)
        if not 0 <= self.long_share < 1:
            raise ConfigError(f"--random-long-share must lie in [0, 1), got {self.long_share:g}")
        if self.long_share and self.prefix_len:
            raise ConfigError("--random-long-share and --random-prefix-len do not go together: leave one out")

    @property
    def has_jobs(self) -> bool:
        """Whether its requests are calls of jobs."""
        return self.name in JOB_LOADS


@dataclass(frozen=True, slots=True, kw_only=True)
class RampConfig:
    """A request rate that moves during the run."""

    shape: RampShape
    start_rate: float
    end_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """How it is asked."""

    request_rate: float = math.inf
    """Requests per second; infinity sends as fast as `max_concurrency` allows."""
    arrivals: ArrivalKind = "gamma"
    burstiness: float = 1.0
    rate_scale: float = 1.0
    """Speed-up of replayed arrivals."""
    burst_on: float = 5.0
    """Seconds of each busy phase of `burst`."""
    burst_off: float = 15.0
    """Seconds without arrivals between two of them."""
    steps: tuple[RateStep, ...] = ()
    """Of `steps`."""
    ramp: RampConfig | None = None
    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency must be at least 1, got {self.max_concurrency}")
        if self.ramp is not None and (math.isfinite(self.request_rate) or self.arrivals != "gamma"):
            raise ConfigError(
                "--ramp-up-strategy sets the rate itself: leave out --request-rate and --arrivals"
            )
        if self.burstiness != 1.0 and not self.is_scheduled:
            raise ConfigError("--burstiness shapes gamma arrivals, which need a --request-rate or a ramp")
        self.arrival_plan()  # refuses parameters that do not go together

    def arrival_plan(self) -> ArrivalPlan:
        """Return how arrivals spread, ramps and closed loops aside."""
        return ArrivalPlan(
            kind=self.arrivals,
            rate=self.request_rate,
            burstiness=self.burstiness,
            rate_scale=self.rate_scale,
            burst_on=self.burst_on,
            burst_off=self.burst_off,
            steps=self.steps,
        )

    @property
    def is_scheduled(self) -> bool:
        """Whether requests have arrival times of their own (an open loop)."""
        return (
            math.isfinite(self.request_rate) or self.arrivals in {"replay", "steps"} or self.ramp is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One measured run: a data set under a load."""

    dataset: DatasetConfig
    load: LoadConfig
    num_prompts: int | None = None
    """None takes 1000, or the whole file if it has fewer."""
    title: str = ""
    """What sets this run apart from others in a sweep, for tables and plots."""
    series: str = ""
    """Runs of one series and kind of load are joined by a line in plots."""

    def __post_init__(self) -> None:
        if self.num_prompts is not None:
            check_num_requests(self.num_prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What all runs of one command share."""

    target: TargetConfig
    backend: str = "openai"
    label: str | None = None
    tokenizer: Path | None = None
    num_warmups: int = 0
    seed: int = 0
    salt: str = ""
    """Changes the words of the prompts, but no length and no arrival."""
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
        if self.num_warmups < 0:
            raise ConfigError(f"--num-warmups must not be negative, got {self.num_warmups}")
        if self.has_jobs and self.target.api == "embeddings":
            raise ConfigError(
                "jobs are calls that are answered, and --backend openai-embeddings has no answers: use "
                "openai or openai-chat"
            )
        check_transport(
            self.send_slo, self.slo_classes, asks_to_shed=self.asks_to_shed, has_jobs=self.has_jobs
        )
