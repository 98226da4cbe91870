"""The result of one run: the record that is saved, with the keys that `vllm bench serve` writes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

import numpy as np

from onbeat.bench.config import BenchConfig, RunConfig
from onbeat.bench.outcomes import group_keys, outcome_keys, refusal_keys, verdict_keys
from onbeat.bench.record import RequestRecord, Status
from onbeat.bench.runner import LoadOutcome
from onbeat.bench.speculation import draft_keys
from onbeat.metrics.summary import describe, gaps, percentile, summarise, ttft
from onbeat.report.result import SCHEDULED, RunResult

SCHEMA_VERSION = 1
LATE_CLIENT_SECONDS = 5e-3
"""A client later than this at the 99th percentile adds visibly to what it measures."""


def build_result(
    bench: BenchConfig,
    run: RunConfig,
    outcome: LoadOutcome,
    *,
    model: str,
    length_source: str,
    slo_sent: str = "none",
) -> RunResult[RequestRecord]:
    """Return the result of a finished (or interrupted) run.

    Parameters
    ----------
    length_source : who measured the prompts.
    slo_sent : how the server was told of objectives.
    """
    records = sorted(
        (record for record in outcome.records if record.status is not Status.INTERRUPTED),
        key=lambda record: record.index,
    )
    summary = _header(bench, run, model)
    summary |= summarise(records, duration=outcome.duration, options=bench.summary)
    outcome_keys(records, summary, bench.summary)
    summary |= _client_times(records, bench) | refusal_keys(records)
    summary |= {
        "slo_sent": slo_sent,
        "server_verdicts": verdict_keys(records, bench.summary),
        "groups": group_keys(records, duration=outcome.duration, options=bench.summary),
        "interrupted": outcome.interrupted,
        "num_interrupted_requests": len(outcome.records) - len(records),
        "timing_origin": SCHEDULED if run.load.is_scheduled else "send",
        "prompt_length_source": length_source,
        "token_count_source": _token_count_source(records),
        "tokens_per_chunk": _tokens_per_chunk(records),
        "num_gpus": bench.num_gpus,
        "output_throughput_per_gpu": summary["output_throughput"] / bench.num_gpus,
        "errors_by_cause": group_errors(records),
        **draft_keys(outcome.drafts, records),
    }
    return RunResult(
        title=run.title,
        series=run.series,
        summary=summary,
        records=records,
        start=outcome.start,
        warnings=tuple(_warnings(summary, records)),
    )


def _header(bench: BenchConfig, run: RunConfig, model: str) -> dict[str, Any]:
    load = run.load
    return {
        "schema_version": SCHEMA_VERSION,
        "date": datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        "backend": bench.backend,
        "label": bench.label,
        "model_id": model,
        "tokenizer_id": None if bench.tokenizer is None else str(bench.tokenizer),
        "num_prompts": run.num_prompts,
        "request_rate": load.request_rate if math.isfinite(load.request_rate) else "inf",
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        **bench.metadata,
        "arrivals": load.arrivals
        if load.is_scheduled
        else "closed loop"
        if load.max_concurrency
        else "all at once",
        "dataset_name": run.dataset.name,
        "dataset_path": None if run.dataset.path is None else str(run.dataset.path),
        "title": run.title,
        "series": run.series,
        "seed": bench.seed,
        "salt": bench.salt,
        "goodput_objectives_ms": {
            name: seconds * 1e3 for name, seconds in (bench.summary.objectives or {}).items()
        },
    }


def _client_times(records: Sequence[RequestRecord], bench: BenchConfig) -> dict[str, Any]:
    queue_times = np.array([record.client_queue_time for record in records])
    lags = np.array([record.dispatch_lag for record in records])
    return describe(queue_times, "client_queue_time", bench.summary.percentiles) | {
        "max_dispatch_lag_ms": float(lags.max()) * 1e3 if lags.size else None,
        "p99_dispatch_lag_ms": percentile(lags, 99) * 1e3 if lags.size else None,
    }


def _token_count_source(records: Sequence[RequestRecord]) -> str | None:
    """Return where output counts come from; the most common source first, joined if there are several."""
    sources = Counter(record.count_source.value for record in records if record.is_completed)
    return "+".join(source for source, _ in sources.most_common()) or None


def _tokens_per_chunk(records: Sequence[RequestRecord]) -> float | None:
    num_chunks = sum(len(record.delivery_times) for record in records if record.is_completed)
    num_tokens = sum(record.num_output_tokens for record in records if record.is_completed)
    return num_tokens / num_chunks if num_chunks else None


def group_errors(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """Return failures and rejections grouped by cause, the most frequent first, each with an example."""
    groups: dict[tuple[str, str], list[RequestRecord]] = {}
    for record in records:
        if record.cause is not None:
            groups.setdefault((record.status.value, record.cause), []).append(record)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return [
        {"status": status, "cause": cause, "count": len(members), "example": members[0].detail}
        for (status, cause), members in ordered
    ]


def _warnings(summary: dict[str, Any], records: Sequence[RequestRecord]) -> list[str]:
    warnings = []
    lag_ms = summary["p99_dispatch_lag_ms"]
    if lag_ms is not None and lag_ms > LATE_CLIENT_SECONDS * 1e3:
        warnings.append(
            f"this client sent requests more than {LATE_CLIENT_SECONDS * 1e3:g} ms late (99th percentile), "
            f"and TTFT and E2E contain that wait; give the client a freer machine, or lower the rate"
        )
    if any(r.is_completed and r.num_output_tokens < r.max_tokens for r in records):
        warnings.append(
            "some answers ended before their planned length; --ignore-eos makes servers that know it go on"
        )
    if summary["token_count_source"] and "chunks" in summary["token_count_source"]:
        warnings.append("the server sent no usage: output tokens are counted as chunks (or give --tokenizer)")
    if summary["prompt_length_source"] == "estimate":
        warnings.append("prompt lengths are planned by estimate: give --tokenizer for exact ones")
    return warnings


def details(result: RunResult[RequestRecord]) -> dict[str, Any]:
    """Return the per-request columns of --save-detailed; times in seconds, starts relative to the run's.

    A request that did not complete has None for its latencies.
    """
    records = result.records
    return {
        "input_lens": [record.num_prompt_tokens for record in records],
        "output_lens": [record.num_output_tokens for record in records],
        "ttfts": [ttft(record) if record.is_completed else None for record in records],
        "itls": [gaps(record).tolist() for record in records],
        "latencies": [
            record.delivery_times[-1] - record.arrival if record.is_completed else None for record in records
        ],
        "start_times": [record.arrival - result.start for record in records],
        "queue_times": [record.client_queue_time for record in records],
        "end_times": [record.end - result.start for record in records],
        "statuses": [record.status.value for record in records],
        "request_classes": [record.request_class for record in records],
        "tenants": [record.tenant for record in records],
        "request_groups": [record.group for record in records],
        "verdicts": [None if record.verdict is None else asdict(record.verdict) for record in records],
        "predicted_ttfts": [record.predicted_ttft for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [f"{record.cause}: {record.detail}" if record.cause else "" for record in records],
    }


def to_document(results: Sequence[RunResult[RequestRecord]], *, detailed: bool) -> dict[str, Any]:
    """Return what is saved: one run flat, several under `runs`."""
    runs = [result.summary | (details(result) if detailed else {}) for result in results]
    if len(runs) == 1:
        return runs[0]
    return {
        "schema_version": SCHEMA_VERSION,
        "interrupted": any(run["interrupted"] for run in runs),
        "runs": runs,
    }


def default_file_name(bench: BenchConfig, results: Sequence[RunResult[RequestRecord]]) -> str:
    """Return the name of a result file: {label}-{rate}qps[-concurrencyN]-{model}-{datetime}.json."""
    first = results[0].summary
    label = bench.label or bench.backend
    model = str(first["model_id"]).rstrip("/").rsplit("/", maxsplit=1)[-1]
    if len(results) > 1:
        return f"{label}-sweep-{model}-{first['date']}.json"
    concurrency = first["max_concurrency"]
    suffix = "" if concurrency is None else f"-concurrency{concurrency}"
    return f"{label}-{first['request_rate']}qps{suffix}-{model}-{first['date']}.json"
