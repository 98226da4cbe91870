"""The result of one run against a server: the numbers, and what they were measured with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf

import numpy as np

from onbeat.bench.bench_config import BenchConfig
from onbeat.bench.bench_load import RunConfig
from onbeat.bench.outcomes import (
    RefusalAdvice,
    ResponseTimes,
    VerdictSummary,
    compare_verdicts,
    refusal_advice,
    response_times,
    summarise_groups,
)
from onbeat.bench.record import RequestRecord, Status
from onbeat.bench.runner import LoadOutcome
from onbeat.bench.speculation import measured_drafts
from onbeat.metrics.distribution import describe, percentile
from onbeat.metrics.jobs import JobSummary
from onbeat.metrics.summary import RunSummary, summarise, ttft, with_expired
from onbeat.report.drafts import MeasuredDrafts
from onbeat.report.result import SCHEDULED, ClientTimes, ErrorGroup, Level, RunHeader, RunResult

LATE_CLIENT_SECONDS = 5e-3
"""What an idle machine's timers and event loop may take; nobody can mend it."""
LATE_CLIENT_SHARE = 0.05
"""Lateness matters beyond this share of what it falsifies.

That is the time between two requests: the load is then not the one that was asked for. And it is the
objective: requests miss it that the server served in time. Without an objective it is the TTFT itself.
So 7 ms are nothing at one request per second within a second, and much within 50 ms.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult(RunResult[RequestRecord]):
    """One measured run."""

    bench: BenchConfig
    run: RunConfig
    client: ClientTimes
    drafts: MeasuredDrafts | None
    response_times: ResponseTimes
    class_response_times: Mapping[str, ResponseTimes]
    """By the name of the class of objectives."""
    advice: RefusalAdvice
    verdicts: VerdictSummary | None
    """None where the server gave none."""
    groups: Mapping[str, RunSummary]
    """By the name of the group of prompts; empty where the data set has one kind."""
    jobs: Mapping[str, JobSummary]
    """By the kind of job; empty where requests stand for themselves."""
    slo_sent: str
    """How the server was told of objectives."""
    num_interrupted_requests: int
    prompt_length_source: str
    """Who measured the prompts."""
    token_count_source: str | None
    """Where output counts come from, joined if there are several; None of no answer."""
    tokens_per_chunk: float | None
    """Output tokens of a delivery; None without one."""


def build_result(  # noqa: PLR0913 - what was run, and what is known of it besides
    bench: BenchConfig,
    run: RunConfig,
    outcome: LoadOutcome,
    *,
    model: str,
    length_source: str,
    slo_sent: str = "none",
    jobs: Mapping[str, JobSummary] | None = None,
) -> BenchResult:
    """Return the result of a finished (or interrupted) run.

    Parameters
    ----------
    length_source : who measured the prompts.
    slo_sent : how the server was told of objectives.
    jobs : what became of each kind of job; None of requests that stand for themselves.
    """
    records = sorted(
        (record for record in outcome.records if record.status is not Status.INTERRUPTED),
        key=lambda record: record.index,
    )
    options = bench.summary
    expired = [record for record in records if record.status is Status.EXPIRED]
    summary = with_expired(summarise(records, duration=outcome.duration, options=options), expired)
    client = _client_times(records, bench)
    source = _token_count_source(records)
    return BenchResult(
        title=run.title,
        series=run.series,
        header=_header(bench, run, model),
        summary=summary,
        num_gpus=bench.num_gpus,
        timing_origin=SCHEDULED if run.load.timing else "send",
        is_interrupted=outcome.interrupted,
        records=records,
        start=outcome.start,
        warnings=tuple(_warnings(records, client, summary, counted=source, planned=length_source)),
        client=client,
        drafts=measured_drafts(outcome.drafts, records),
        errors=group_errors(records),
        bench=bench,
        run=run,
        response_times=response_times(records, options),
        class_response_times={
            name: response_times([each for each in records if each.request_class == name], options)
            for name in summary.classes
        },
        advice=refusal_advice(records),
        verdicts=compare_verdicts(records, options),
        groups=summarise_groups(records, duration=outcome.duration, options=options),
        jobs=jobs or {},
        slo_sent=slo_sent,
        num_interrupted_requests=len(outcome.records) - len(records),
        prompt_length_source=length_source,
        token_count_source=source,
        tokens_per_chunk=_tokens_per_chunk(records),
    )


def _header(bench: BenchConfig, run: RunConfig, model: str) -> RunHeader:
    load, timing = run.load, run.load.timing
    assert load.num_prompts is not None, "whoever ran it has counted its requests"
    arrivals = timing.kind if timing else "closed loop" if load.max_concurrency else "all at once"
    return RunHeader(
        model_id=model,
        backend=bench.backend,
        label=bench.label,
        date=datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        dataset_name=load.dataset_name or "random",
        num_prompts=load.num_prompts,
        arrivals=arrivals,
        burstiness=load.shape,
        level=Level(request_rate=timing.rate if timing else inf, max_concurrency=load.max_concurrency),
    )


def _client_times(records: Sequence[RequestRecord], bench: BenchConfig) -> ClientTimes:
    queue_times = np.array([record.client_queue_time for record in records])
    lags = np.array([record.dispatch_lag for record in records])
    return ClientTimes(
        queue=describe(queue_times, bench.summary.percentiles),
        max_dispatch_lag_ms=float(lags.max()) * 1e3 if lags.size else None,
        p99_dispatch_lag_ms=percentile(lags, 99) * 1e3 if lags.size else None,
    )


def _token_count_source(records: Sequence[RequestRecord]) -> str | None:
    """Return where output counts come from, the most common source first."""
    sources = Counter(record.count_source.value for record in records if record.is_completed)
    return "+".join(source for source, _ in sources.most_common()) or None


def _tokens_per_chunk(records: Sequence[RequestRecord]) -> float | None:
    num_chunks = sum(len(record.delivery_times) for record in records if record.is_completed)
    num_tokens = sum(record.num_output_tokens for record in records if record.is_completed)
    return num_tokens / num_chunks if num_chunks else None


def group_errors(records: Sequence[RequestRecord]) -> tuple[ErrorGroup, ...]:
    """Return failures and rejections grouped by cause, the most frequent first, each with an example."""
    groups: dict[tuple[str, str], list[RequestRecord]] = {}
    for record in records:
        if record.cause is not None:
            groups.setdefault((record.status.value, record.cause), []).append(record)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return tuple(
        ErrorGroup(status=status, cause=cause, count=len(members), example=members[0].detail)
        for (status, cause), members in ordered
    )


def _warnings(
    records: Sequence[RequestRecord],
    client: ClientTimes,
    summary: RunSummary,
    *,
    counted: str | None,
    planned: str,
) -> Iterator[str]:
    """Say what makes the numbers less than they look.

    Parameters
    ----------
    counted : where output counts come from.
    planned : who measured the prompts.
    """
    if late := _late_client(records, client, summary):
        yield late
    if hopeless := _hopeless_ttft(records):
        yield hopeless
    if any(r.is_completed and r.num_output_tokens < r.max_tokens for r in records):
        yield "some answers ended before their planned length; --ignore-eos makes servers that know it go on"
    if counted and "chunks" in counted:
        yield "the server sent no usage: output tokens are counted as chunks (or give --tokenizer)"
    if planned == "estimate":
        yield "prompt lengths are planned by estimate: give --tokenizer for exact ones"


def _late_client(records: Sequence[RequestRecord], client: ClientTimes, summary: RunSummary) -> str | None:
    """Say that the client was late where that matters, and beside what; None elsewhere."""
    lag_ms = client.p99_dispatch_lag_ms
    if lag_ms is None or lag_ms <= LATE_CLIENT_SECONDS * 1e3:
        return None
    arrivals = [record.arrival for record in records]
    gap = (max(arrivals) - min(arrivals)) / max(1, len(records) - 1)  # 0 of requests that are sent at once
    asked = [own for r in records if r.slo for own in (r.slo.ttft, r.slo.e2e) if own is not None]
    asked += [own for name, own in summary.score.objectives.items() if name in {"ttft", "e2el"}]
    measured_ms = summary.latencies["ttft"].median_ms
    beside = [
        ("the time between two requests", gap * 1e3),
        ("the tightest objective", min(asked) * 1e3) if asked else ("the median TTFT", measured_ms),
    ]
    for what, limit_ms in beside:
        if limit_ms and lag_ms > LATE_CLIENT_SHARE * limit_ms:
            return (
                f"this client sent requests late, at the 99th percentile by more than "
                f"{LATE_CLIENT_SHARE * 100:g} % of {what}. TTFT and E2E contain that wait; give the client a "
                "freer machine, or lower the rate"
            )
    return None


def _hopeless_ttft(records: Sequence[RequestRecord]) -> str | None:
    """Say that no first token was in time, where that is so; None elsewhere."""
    spans = [(ttft(r), r.slo.ttft) for r in records if r.delivery_times and r.slo and r.slo.ttft]
    if not spans or any(taken <= objective for taken, objective in spans):
        return None
    taken, objective = min(spans, key=lambda span: span[0] / span[1])
    return (
        f"no first token was in time: the best took {taken * 1e3:,.0f} ms, and its objective is "
        f"{objective * 1e3:,.0f} ms. If a single request is late, too, no server setting will keep this "
        "objective: allow more, or send shorter prompts"
    )
