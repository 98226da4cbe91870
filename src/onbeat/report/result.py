"""One run, measured or simulated, as tables, charts and files show it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import orjson

from onbeat.core.errors import ConfigError
from onbeat.metrics.distribution import Distribution
from onbeat.metrics.summary import MeasuredRequest, RunSummary
from onbeat.report.drafts import Drafts

SCHEDULED = "scheduled arrival"
"""`timing_origin` of a run whose latencies start at the planned arrival."""
CLIENT_QUEUE = "client_queue_time"
"""Name, among latencies, of the wait in a client."""


class ReportedRequest(MeasuredRequest, Protocol):
    """One request as the charts see it."""

    @property
    def client_queue_time(self) -> float:
        """Time from the arrival to the send, seconds; 0 where nothing holds requests back."""
        ...


R = TypeVar("R", bound=ReportedRequest, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """How hard a load presses."""

    request_rate: float
    """Requests per second; infinite where no clock sends them."""
    max_concurrency: int | None
    """Most requests open at once; None sets no limit."""

    @property
    def is_closed(self) -> bool:
        """Whether requests are sent as others end, not by the clock."""
        return math.isinf(self.request_rate)

    @property
    def name(self) -> str:
        """What sets a run of a sweep apart: the rate of an open loop, else the concurrency."""
        return f"c={self.max_concurrency}" if self.is_closed else f"{self.request_rate:g}/s"

    @property
    def saved_rate(self) -> float | str:
        """The rate as files have it."""
        return "inf" if self.is_closed else self.request_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """What was run: the model, the load, and when."""

    model_id: str
    backend: str
    label: str | None
    date: str
    """Local time: YYYYMMDD-HHMMSS."""
    dataset_name: str
    num_prompts: int
    arrivals: str
    """Kind of arrivals; `closed loop` and `all at once` have none."""
    burstiness: float | None
    """Of gamma arrivals; None where nobody set it."""
    level: Level


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTimes:
    """How long the load client itself held requests back."""

    queue: Distribution
    """From the arrival to the send."""
    max_dispatch_lag_ms: float | None
    """Of the queue time without the wait for a slot; None without a request."""
    p99_dispatch_lag_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSummary:
    """What the replicas of a simulated run did."""

    num_steps: int
    mean_step: float | None
    """Seconds; None without a step."""
    num_preemptions: int
    prefix_cache_hit_rate: float | None
    """Share of the prompt tokens that the prefix cache held; None where none was looked up."""
    kv_cache_peak_usage: float | None
    """Share of the blocks of the replica that was fullest."""
    replica_busy_share: float | None
    pipeline_bubble_seconds: float
    mbu: float | None
    """Memory bandwidth utilisation of the busy time, a share; None where nothing ran."""
    mfu: float | None
    """The same of the arithmetic."""
    wall_seconds: float
    """How long the simulation took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorGroup:
    """Failures and rejections of one cause."""

    status: str
    cause: str
    count: int
    example: str | None
    """What exactly happened to one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeoffPoint:
    """A run as one point of throughput against latency."""

    series: str
    """Points of one series are joined by a line."""
    level: str
    """What sets it apart in its series."""
    load: float
    """Requests per second, or of a closed loop requests that are open at once."""
    is_closed: bool
    summary: RunSummary
    num_gpus: int

    @property
    def output_throughput_per_gpu(self) -> float:
        """Output tokens per second and GPU."""
        return self.summary.counts.output_throughput / self.num_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(Generic[R]):
    """One run: its numbers, and the requests behind them."""

    title: str = ""
    """What sets it apart in a table of several runs."""
    series: str = ""
    """Runs of one series are joined by a line."""
    header: RunHeader
    summary: RunSummary
    num_gpus: int
    timing_origin: str
    """Where latencies start: `SCHEDULED`, or `send`."""
    is_interrupted: bool
    records: Sequence[R] = ()
    """Requests that ended by themselves, by index."""
    start: float = 0.0
    """On the clock of the records, seconds."""
    warnings: tuple[str, ...] = ()
    """What makes its numbers less than they look."""
    remarks: tuple[str, ...] = ()
    """Plain facts beside them."""
    client: ClientTimes | None = None
    """Of a measured run."""
    machine: MachineSummary | None = None
    """Of a simulated run."""
    drafts: Drafts | None = None
    """None where nothing was speculated."""
    errors: tuple[ErrorGroup, ...] = ()
    """The most frequent cause first."""

    @property
    def point(self) -> TradeoffPoint:
        """The run as a point of throughput against latency."""
        level = self.header.level
        return TradeoffPoint(
            series=self.series,
            level=level.name,
            is_closed=level.is_closed,
            load=(level.max_concurrency or math.inf) if level.is_closed else level.request_rate,
            summary=self.summary,
            num_gpus=self.num_gpus,
        )

    @property
    def latencies(self) -> Mapping[str, Distribution]:
        """By metric; of a measured run with `CLIENT_QUEUE`."""
        if self.client is None:
            return self.summary.latencies
        return {**self.summary.latencies, CLIENT_QUEUE: self.client.queue}


AnyResult = RunResult[ReportedRequest]


def merge_texts(results: Sequence[AnyResult], kind: str = "warnings") -> list[str]:
    """Return each `warnings` or `remarks` once, with the runs that it is about unless it is about all."""
    about: dict[str, list[str]] = {}
    for result in results:
        for text in getattr(result, kind):
            about.setdefault(text, []).append(result.title)
    return [
        text if len(titles) == len(results) else f"{text} ({', '.join(titles)})"
        for text, titles in about.items()
    ]


def write_document(path: Path, document: dict[str, Any], *, append: bool = False) -> None:
    """Write a result file.

    Parameters
    ----------
    append : add a line to the file instead of replacing it (one JSON document a line).

    Raises
    ------
    ConfigError : the file cannot be written.
    """
    content = orjson.dumps(
        document, option=orjson.OPT_SERIALIZE_NUMPY | (0 if append else orjson.OPT_INDENT_2)
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab" if append else "wb") as file:
            file.write(content + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
