"""The result of one run against a server: the numbers, and what they were measured with.

Numbers of a run with objectives that its latencies do not show: refusals and verdicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from math import inf
from typing import Any

import numpy as np

from onbeat.bench.bench_config import BenchConfig, pair
from onbeat.bench.bench_load import BenchLoad, RunConfig
from onbeat.bench.compare import SETTINGS
from onbeat.bench.record import SentRequest, Status
from onbeat.bench.runner import LoadOutcome
from onbeat.bench.speculation import measured_drafts
from onbeat.core.options import values_of
from onbeat.metrics.attainment import good_requests, has_objectives
from onbeat.metrics.distribution import Distribution, describe, percentile
from onbeat.metrics.jobs import JobSummary, lines_of_jobs
from onbeat.metrics.summary import RunSummary, SummaryOptions, gaps, summarise, ttft
from onbeat.report.result import Fact, Facts, Show
from onbeat.report.run import SCHEDULED, Level, Run, RunHeader, latency_values, milliseconds
from onbeat.report.units import exact_percent, number
from onbeat.workload.load import JOB_LOADS

Seconds = Sequence[float]


def response_times(records: Sequence[SentRequest], options: SummaryOptions) -> dict[str, Distribution]:
    """Return how long callers waited for a refusal, or for their end in the queue."""

    def times(status: Status) -> Distribution:
        seconds = [record.response_time for record in records if record.status is status]
        return describe(np.array(seconds, dtype=np.float64), options.percentiles)

    return {"rejection": times(Status.REJECTED), "expiry": times(Status.EXPIRED)}


def objective_facts(
    summary: RunSummary, times: Mapping[str, Distribution], records: Sequence[SentRequest]
) -> list[Fact]:
    """Return what became of requests with objectives or without an answer.

    Parameters
    ----------
    times : those of `response_times`.
    """
    counts = summary.counts
    is_told = summary.score.num_good is not None or counts.num_rejected + counts.num_expired
    refused = [record for record in records if record.status in {Status.REJECTED, Status.EXPIRED}]
    predicted = _median([r.predicted_ttft for r in refused if r.predicted_ttft is not None])
    retry = _median([r.retry_after for r in refused if r.retry_after is not None])
    admitted = summary.attainment_admitted
    facts = [
        Fact("admitted", counts.num_admitted, "admitted", lambda num: f"{num:,} of {counts.num_offered:,}"),
        Fact("expired", counts.num_expired, "expired in the queue"),
        # Without refusals, the share of all, which stands with the counts of the run.
        Fact(
            "attainment_admitted",
            admitted,
            "objectives met, of admitted" if counts.num_rejected else "",
            exact_percent,
        ),
    ]
    for key, title in (("rejection", "refused after"), ("expiry", "expired after")):
        spread = _spread(times[key])
        facts.append(Fact(f"median_{key}_ms", times[key].median_ms, f"{title} P50 / P99 / max (ms)", spread))
    title = "TTFT predicted for the refused, median (ms)"
    facts.append(Fact("median_rejected_predicted_ttft_ms", milliseconds(predicted), title))
    facts.append(Fact("median_retry_after_ms", milliseconds(retry)))
    return facts if is_told else [fact._replace(title="") for fact in facts]


def verdict_facts(records: Sequence[SentRequest], options: SummaryOptions) -> list[Fact]:
    """Compare the server's own score of each request with the client's; nothing where it gave none.

    Only completed requests with objectives are compared: of others both say the same.
    """
    scored = [
        (record, record.verdict)
        for record in records
        if record.verdict is not None and record.is_completed and has_objectives(record)
    ]
    if not scored:
        return []
    own = good_requests([record for record, _ in scored], mode=options.slo_mode).tolist()
    pairs = [
        (good, verdict.is_met)
        for good, (_, verdict) in zip(own, scored, strict=True)
        if verdict.is_met is not None
    ]
    both = [(ttft(record), verdict.ttft) for record, verdict in scored if verdict.ttft is not None]
    errors = [
        abs(verdict.predicted_ttft - verdict.ttft) / verdict.ttft
        for _, verdict in scored
        if verdict.predicted_ttft is not None and verdict.ttft
    ]
    agreement, differences = _share(good == met for good, met in pairs), [a - b for a, b in both]
    client, server = (milliseconds(_median([pair[place] for pair in both])) for place in (0, 1))
    of_all = f" of {len(scored):,}"
    ttfts = ("TTFT here / in the server, median (ms)", lambda here: f"{number(here)} / {number(server)}")
    met = ("met by the server's verdict" if agreement != 1 else "", exact_percent)
    return [
        Fact("requests", len(scored)),
        Fact("agreement", agreement, "same verdict by the server", lambda own: exact_percent(own) + of_all),
        Fact("met", _share(met for _, met in pairs), *met),
        Fact("only_client_good", sum(good and not met for good, met in pairs)),
        Fact("only_server_met", sum(met and not good for good, met in pairs)),
        Fact("relegated", sum(verdict.is_relegated for _, verdict in scored), "relegated to best effort"),
        Fact("median_client_ttft_ms", client, *ttfts),
        Fact("median_server_ttft_ms", server),
        Fact("median_ttft_difference_ms", milliseconds(_median(differences))),
        Fact(
            "median_predicted_ttft_error",
            _median(errors),
            "error of the predicted TTFT, median",
            exact_percent,
        ),
    ]


def group_errors(records: Sequence[SentRequest]) -> list[dict[str, Any]]:
    """Return failures and rejections grouped by cause, the most frequent first, each with an example."""
    groups: dict[tuple[str, str], list[SentRequest]] = {}
    for record in records:
        if record.cause is not None:
            groups.setdefault((record.status.value, record.cause), []).append(record)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return [
        {"status": status, "cause": cause, "count": len(members), "example": members[0].detail}
        for (status, cause), members in ordered
    ]


def _spread(times: Distribution) -> Show:
    tail = times.statistics_ms.get("p99")
    return lambda median: " / ".join(map(number, (median, tail, times.max_ms)))


def _median(values: Seconds) -> float | None:
    return percentile(values, 50) if values else None


def _share(flags: Iterable[bool]) -> float | None:
    values = list(flags)
    return sum(values) / len(values) if values else None


LATE_CLIENT_SECONDS = 5e-3
"""What an idle machine's timers and event loop may take; nobody can mend it."""
LATE_CLIENT_SHARE = 0.05
"""Lateness matters beyond this share of what it falsifies.

That is the time between two requests: the load is then not the one that was asked for. And it is the
objective: requests miss it that the server served in time. Without an objective it is the TTFT itself.
So 7 ms are nothing at one request per second within a second, and much within 50 ms.
"""
_OWN_KEYS = frozenset({*SETTINGS, "tokenizer", "salt", "trace", "sweep_rate", "sweep_concurrency"})

BenchRun = Run[SentRequest]


def build_result(  # noqa: PLR0913 - what was run, and what is known of it besides
    bench: BenchConfig,
    run: RunConfig,
    outcome: LoadOutcome,
    *,
    model: str,
    length_source: str,
    slo_sent: str = "none",
    jobs: Mapping[str, JobSummary] | None = None,
) -> BenchRun:
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
    options = bench.summary()
    summary = summarise(records, duration=outcome.duration, options=options)
    queue_times = np.array([record.client_queue_time for record in records])
    lags_ms = np.array([max(0.0, each.client_queue_time - each.slot_wait) for each in records]) * 1e3
    most_lag_ms = percentile(lags_ms, 99) if lags_ms.size else None
    source = _token_count_source(records)
    times = response_times(records, options)
    verdicts = Facts("Verdicts of the server", verdict_facts(records, options), key="server_verdicts")
    lateness = "client lateness P99 (ms)" if run.load.timing else ""
    return Run(
        title=run.title,
        header=_header(bench, run, model),
        summary=summary,
        num_gpus=bench.output.num_gpus,
        timing_origin=SCHEDULED if run.load.timing else "send",
        is_interrupted=outcome.interrupted,
        records=records,
        start=outcome.start,
        num_interrupted_requests=len(outcome.records) - len(records),
        warnings=tuple(_warnings(records, most_lag_ms, summary, counted=source, planned=length_source)),
        errors=group_errors(records),
        client_queue=describe(queue_times, options.percentiles),
        settings=_settings(bench, run.load) | {"slo_sent": slo_sent},
        facts=[
            Fact("max_dispatch_lag_ms", float(lags_ms.max()) if lags_ms.size else None),
            Fact("p99_dispatch_lag_ms", most_lag_ms, lateness),
        ],
        parts=[
            Facts("Objectives", objective_facts(summary, times, records)),
            verdicts,
            Facts("Speculation", measured_drafts(outcome.drafts, records)),
        ],
        lines=list(lines_of_jobs(jobs or {})),
        of_classes={
            name: latency_values(
                response_times([each for each in records if each.request_class == name], options)
            )
            for name in summary.classes
        },
        details={
            **latency_values(times),
            "server_verdicts": verdicts.values or None,
            "prompt_length_source": length_source,
            "token_count_source": source,
            "tokens_per_chunk": _tokens_per_chunk(records),
            "errors_by_cause": group_errors(records),
            **({"jobs": {kind: asdict(own) for kind, own in jobs.items()}} if jobs else {}),
        },
    )


def _header(bench: BenchConfig, run: RunConfig, model: str) -> RunHeader:
    load, timing = run.load, run.load.timing
    assert load.num_prompts is not None, "whoever ran it has counted its requests"
    arrivals = timing.kind if timing else "closed loop" if load.max_concurrency else "all at once"
    return RunHeader(
        model_id=model,
        backend=bench.target.backend,
        label=bench.output.label,
        date=datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        dataset_name=load.dataset_name or "random",
        num_prompts=load.num_prompts,
        arrivals=arrivals,
        burstiness=load.burstiness,
        level=Level(request_rate=timing.rate if timing else inf, max_concurrency=load.max_concurrency),
        unit="jobs" if load.dataset_name in JOB_LOADS else "req",
    )


def _settings(bench: BenchConfig, load: BenchLoad) -> dict[str, Any]:
    """Return what a run was made with, as a file has it."""
    return {
        "tokenizer_id": None if load.tokenizer is None else str(load.tokenizer),
        **dict(map(pair, bench.output.metadata)),
        "dataset_path": None if load.dataset_path is None else str(load.dataset_path),
        "load": {
            # By their flags and in their units, those that have no key of their own.
            each.key: each.shown(value)
            for each, value in values_of(load).items()
            if each.key not in _OWN_KEYS
        },
        "seed": load.seed,
        "salt": load.salt,
        "goodput_objectives_ms": {name: seconds * 1e3 for name, seconds in bench.output.objectives().items()},
    }


def request_columns(run: BenchRun) -> dict[str, Any]:
    """Return the per-request columns of --save-detailed; times in seconds, starts relative to the run's.

    A request that did not complete has None for its latencies.
    """
    records = run.records
    return {
        "input_lens": [record.num_prompt_tokens for record in records],
        "output_lens": [record.num_output_tokens for record in records],
        "ttfts": [ttft(record) if record.is_completed else None for record in records],
        "itls": [gaps(record).tolist() for record in records],
        "latencies": [
            record.delivery_times[-1] - record.arrival if record.is_completed else None for record in records
        ],
        "start_times": [record.arrival - run.start for record in records],
        "queue_times": [record.client_queue_time for record in records],
        "end_times": [record.end - run.start for record in records],
        "statuses": [record.status.value for record in records],
        "request_classes": [record.request_class for record in records],
        "tenants": [record.tenant for record in records],
        "job_ids": [None if record.job is None else record.job.job_id for record in records],
        "verdicts": [None if record.verdict is None else asdict(record.verdict) for record in records],
        "predicted_ttfts": [record.predicted_ttft for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [f"{record.cause}: {record.detail}" if record.cause else "" for record in records],
    }


def default_file_name(bench: BenchConfig, runs: Sequence[BenchRun]) -> str:
    """Return the name of a result file: {label}-{rate}qps[-concurrencyN]-{model}-{datetime}.json."""
    first = runs[0].header
    label = bench.output.label or bench.target.backend
    model = first.model_id.rstrip("/").rsplit("/", maxsplit=1)[-1]
    if len(runs) > 1:
        return f"{label}-sweep-{model}-{first.date}.json"
    concurrency = first.level.max_concurrency
    suffix = "" if concurrency is None else f"-concurrency{concurrency}"
    return f"{label}-{first.level.values['request_rate']}qps{suffix}-{model}-{first.date}.json"


def _token_count_source(records: Sequence[SentRequest]) -> str | None:
    """Return where output counts come from, the most common source first."""
    sources = Counter(record.count_source.value for record in records if record.is_completed)
    return "+".join(source for source, _ in sources.most_common()) or None


def _tokens_per_chunk(records: Sequence[SentRequest]) -> float | None:
    num_chunks = sum(len(record.delivery_times) for record in records if record.is_completed)
    num_tokens = sum(record.num_output_tokens for record in records if record.is_completed)
    return num_tokens / num_chunks if num_chunks else None


def _warnings(
    records: Sequence[SentRequest],
    lag_ms: float | None,
    summary: RunSummary,
    *,
    counted: str | None,
    planned: str,
) -> Iterator[str]:
    """Say what makes the numbers less than they look.

    Parameters
    ----------
    lag_ms : 99th percentile of the client's own delays.
    counted : where output counts come from.
    planned : who measured the prompts.
    """
    if late := _late_client(records, lag_ms, summary):
        yield late
    if hopeless := _hopeless_ttft(records):
        yield hopeless
    if any(r.is_completed and r.num_output_tokens < r.max_tokens for r in records):
        yield "some answers ended before their planned length; --ignore-eos makes servers that know it go on"
    if counted and "chunks" in counted:
        yield "the server sent no usage: output tokens are counted as chunks (or give --tokenizer)"
    if planned == "estimate":
        yield "prompt lengths are planned by estimate: give --tokenizer for exact ones"


def _late_client(records: Sequence[SentRequest], lag_ms: float | None, summary: RunSummary) -> str | None:
    """Say that the client was late where that matters, and beside what; None elsewhere."""
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


def _hopeless_ttft(records: Sequence[SentRequest]) -> str | None:
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
