"""One run, measured or simulated: its numbers, and the requests behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from onbeat.metrics.breakdown import Breakdown, GroupOutcome
from onbeat.metrics.distribution import Distribution
from onbeat.metrics.summary import ClassSummary, GroupSummary, MeasuredRequest, RunSummary
from onbeat.report.result import Fact, Facts
from onbeat.report.units import exact_percent

SCHEDULED = "scheduled arrival"
"""`timing_origin` of a run whose latencies start at the planned arrival."""
CLIENT_QUEUE = "client_queue_time"
"""Name, among latencies, of the wait in a client."""


class ReportedRequest(MeasuredRequest, Protocol):
    """One request as the charts see it."""

    @property
    def client_queue_time(self) -> float:
        """Time from the arrival to the send, seconds; 0 where nothing holds requests back."""


R = TypeVar("R", bound=ReportedRequest, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """How hard a load presses."""

    request_rate: float = math.inf
    """Requests per second; infinite where no clock sends them."""
    max_concurrency: int | None = None
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
    def load(self) -> float:
        """Where it lies on an axis: requests per second, or of a closed loop requests open at once."""
        return (self.max_concurrency or math.inf) if self.is_closed else self.request_rate

    @property
    def values(self) -> dict[str, Any]:
        """As a file has it."""
        rate = "inf" if self.is_closed else self.request_rate
        return {"request_rate": rate, "max_concurrency": self.max_concurrency}


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
    unit: str = "req"
    """What comes at its rate: requests, or jobs."""

    @property
    def values(self) -> dict[str, Any]:
        """As a file has them."""
        about = {name: value for name, value in asdict(self).items() if name not in {"level", "unit"}}
        return about | self.level.values

    @property
    def load(self) -> str:
        """In words, how the requests were sent."""
        level = self.level
        limit = "" if level.max_concurrency is None else f", at most {level.max_concurrency} open"
        if self.arrivals == "closed loop":
            return f"closed loop of {level.max_concurrency}"
        if level.is_closed:
            return f"{self.arrivals}{limit}"
        kind = "Poisson" if self.arrivals == "gamma" and self.burstiness == 1 else self.arrivals
        kind += "" if kind == "offered" else " arrivals"
        return f"{kind} at {level.request_rate:.4g} {self.unit}/s{limit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Generic[R]):
    """One run: its numbers, and the requests behind them."""

    title: str = ""
    """What sets it apart in a table of several runs."""
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
    num_interrupted_requests: int = 0
    warnings: tuple[str, ...] = ()
    """What makes its numbers less than they look."""
    errors: Sequence[Mapping[str, Any]] = ()
    """Failures and rejections by cause, as `ERROR_COLUMNS` shows them; the most frequent first."""
    facts: Sequence[Fact] = ()
    """More of the whole run."""
    parts: Sequence[Facts] = ()
    """Tables of its own."""
    lines: Sequence[str] = ()
    """Sentences under the tables."""
    client_queue: Distribution | None = None
    """From the arrival to the send, of a measured run."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """With which it was made, as a file has them."""
    of_classes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """More of each class, as a file has it."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What files alone have."""

    @property
    def output_throughput_per_gpu(self) -> float:
        """Output tokens per second and GPU."""
        return self.summary.counts.output_throughput / self.num_gpus

    @property
    def latencies(self) -> Mapping[str, Distribution]:
        """By metric; of a measured run with `CLIENT_QUEUE`."""
        own = {} if self.client_queue is None else {CLIENT_QUEUE: self.client_queue}
        return {**self.summary.latencies, **own}

    @property
    def values(self) -> dict[str, Any]:
        """As a file has it."""
        found = self.header.values | {"title": self.title, **self.settings}
        found |= summary_values(self.summary, self.of_classes) | latency_values(self.latencies)
        found |= {fact.key: fact.value for fact in self.facts}
        for part in self.parts:
            if part.facts:
                found |= {part.key: part.values} if part.key else part.values
        return found | {
            "num_interrupted_requests": self.num_interrupted_requests,
            "timing_origin": self.timing_origin,
            "num_gpus": self.num_gpus,
            "output_throughput_per_gpu": self.output_throughput_per_gpu,
            **self.details,
        }


AnyRun = Run[ReportedRequest]


# ---- numbers ----


def run_facts(summary: RunSummary) -> list[Fact]:
    """Return the counts and rates of a whole run."""
    return [
        *_count_facts(summary),
        Fact("max_output_tokens_per_s", summary.max_output_tokens_per_s, "peak output in 1 s (tok)"),
        Fact("max_concurrent_requests", summary.max_concurrent_requests, "peak concurrency"),
        Fact("duration", summary.counts.duration, "duration (s)"),
        *_score_facts(summary),
    ]


def _count_facts(own: GroupSummary) -> list[Fact]:
    counts = own.counts
    return [
        Fact("offered", counts.num_offered),
        Fact("admitted", counts.num_admitted),
        Fact("completed", counts.num_completed, "requests completed"),
        Fact("failed", counts.num_failed, "requests failed"),
        Fact("rejected", counts.num_rejected, "requests rejected"),
        Fact("expired", counts.num_expired, "requests expired" if counts.num_expired else ""),
        Fact("total_input_tokens", counts.num_prompt_tokens, "prompt tokens"),
        Fact("total_output_tokens", counts.num_output_tokens, "output tokens"),
        Fact("request_throughput", counts.request_throughput, "request throughput (req/s)"),
        Fact("output_throughput", counts.output_throughput, "output throughput (tok/s)"),
        Fact("total_token_throughput", counts.total_token_throughput, "total throughput (tok/s)"),
    ]


def _score_facts(own: GroupSummary) -> list[Fact]:
    score = own.score
    return [
        Fact("request_goodput", score.request_goodput, "goodput (in time, req/s)"),
        Fact("goodput", score.goodput),
        Fact("attainment", score.attainment, "objectives met", exact_percent),
        Fact("attainment_admitted", own.attainment_admitted),
        Fact("good", score.num_good),
        Fact("offered_with_slo", score.own.num_offered),
        Fact("slo_mode", score.slo_mode),
    ]


def latency_values(latencies: Mapping[str, Distribution]) -> dict[str, float | None]:
    """Return statistics as a file has them: `mean_ttft_ms`, `p99_ttft_ms`."""
    return {
        f"{statistic}_{name}_ms": value
        for name, distribution in latencies.items()
        for statistic, value in distribution.statistics_ms.items()
    }


def summary_values(
    summary: RunSummary, of_classes: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """Return a whole run as a file has it, under the keys of `vllm bench serve` where that has them.

    Parameters
    ----------
    of_classes : more of each class.
    """
    more = of_classes or {}
    classes = {name: class_values(own) | dict(more.get(name, {})) for name, own in summary.classes.items()}
    facts = {fact.key: fact.value for fact in run_facts(summary)}
    return facts | {
        "classes": classes,
        **breakdown_values(summary.breakdown),
        **latency_values(summary.latencies),
    }


def class_values(own: ClassSummary) -> dict[str, Any]:
    """Return one class of objectives as a file has it."""
    facts = {fact.key: fact.value for fact in [*_count_facts(own), *_score_facts(own)]} | latency_values(
        own.latencies
    )
    limits = {name: getattr(own.objectives, name, None) for name in ("ttft", "tbt", "e2e")}
    return facts | {f"slo_{name}_ms": milliseconds(limit) for name, limit in limits.items()}


def milliseconds(seconds: float | None) -> float | None:
    """Return a time as it is saved; None stays None."""
    return None if seconds is None else seconds * 1e3


def breakdown_values(breakdown: Breakdown) -> dict[str, Any]:
    """Return it as a file has it."""
    worst = breakdown.worst_decile
    return {
        "attainment_by_prompt_decile": [outcome_values(decile) for decile in breakdown.deciles],
        "attainment_by_tenant": [
            {"tenant": own.tenant, "num_tenants": own.num_tenants, **outcome_values(own.outcome)}
            for own in breakdown.tenants
        ],
        "worst_decile": None if worst is None else outcome_values(worst),
    }


def outcome_values(own: GroupOutcome) -> dict[str, Any]:
    """Return one group as a file has it."""
    return {
        "min_prompt_tokens": own.min_prompt_tokens,
        "max_prompt_tokens": own.max_prompt_tokens,
        "offered": own.num_offered,
        "good": own.num_good,
        "attainment": own.attainment,
        "longest_wait_ms": own.longest_wait * 1e3,
        "median_ttft_ms": None if own.median_ttft is None else own.median_ttft * 1e3,
    }
