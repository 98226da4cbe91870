"""The file of a result: the keys that are written, which are those of `vllm bench serve`, and read again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from onbeat.bench.bench_config import BenchConfig
from onbeat.bench.bench_load import BenchLoad
from onbeat.bench.outcomes import RefusalAdvice, ResponseTimes, VerdictSummary
from onbeat.bench.result import BenchResult
from onbeat.core.errors import ConfigError
from onbeat.core.options import values_of
from onbeat.files import read_bytes
from onbeat.metrics.summary import METRICS, GroupSummary, LatencyStatistic, gaps, ttft
from onbeat.metrics.summary_keys import distribution_keys, milliseconds, run_keys
from onbeat.report.result import CLIENT_QUEUE, ErrorGroup

SCHEMA_VERSION = 1

SETTINGS = (
    *("backend", "model_id", "dataset_name", "dataset_path", "num_prompts", "request_rate", "burstiness"),
    *("arrivals", "max_concurrency", "seed", "num_gpus", "timing_origin", "goodput_objectives_ms"),
    "slo_sent",
)
"""Under which two results measure the same thing."""
SETTING_GROUPS = ("load",)
"""Objects of more of them, which other tools' results do not have."""
THROUGHPUTS = (
    *("output_throughput", "request_throughput"),
    *("request_goodput", "attainment", "attainment_admitted"),
)


def to_document(results: Sequence[BenchResult], *, detailed: bool) -> dict[str, Any]:
    """Return what is saved: one run flat, several under `runs`."""
    runs = [result_keys(result) | (details(result) if detailed else {}) for result in results]
    if len(runs) == 1:
        return runs[0]
    return {
        "schema_version": SCHEMA_VERSION,
        "interrupted": any(result.is_interrupted for result in results),
        "runs": runs,
    }


def default_file_name(bench: BenchConfig, results: Sequence[BenchResult]) -> str:
    """Return the name of a result file: {label}-{rate}qps[-concurrencyN]-{model}-{datetime}.json."""
    first = results[0].header
    label = bench.label or bench.backend
    model = first.model_id.rstrip("/").rsplit("/", maxsplit=1)[-1]
    if len(results) > 1:
        return f"{label}-sweep-{model}-{first.date}.json"
    concurrency = first.level.max_concurrency
    suffix = "" if concurrency is None else f"-concurrency{concurrency}"
    return f"{label}-{first.level.saved_rate}qps{suffix}-{model}-{first.date}.json"


def result_keys(result: BenchResult) -> dict[str, Any]:
    """Return one run as it is saved, without its requests."""
    keys = _header_keys(result) | run_keys(result.summary) | _time_keys(result)
    for name, own in keys["classes"].items():
        own |= _outcome_keys(result.summary.classes[name], result.class_response_times[name])
    return keys | {
        "slo_sent": result.slo_sent,
        "server_verdicts": None if result.verdicts is None else _verdict_keys(result.verdicts),
        "groups": {name: run_keys(own) | {"classes": {}} for name, own in result.groups.items()},
        "interrupted": result.is_interrupted,
        "num_interrupted_requests": result.num_interrupted_requests,
        "timing_origin": result.timing_origin,
        "prompt_length_source": result.prompt_length_source,
        "token_count_source": result.token_count_source,
        "tokens_per_chunk": result.tokens_per_chunk,
        "num_gpus": result.num_gpus,
        "output_throughput_per_gpu": result.point.output_throughput_per_gpu,
        "errors_by_cause": error_keys(result.errors),
        **({} if result.drafts is None else result.drafts.keys()),
        **({"jobs": {kind: own.keys() for kind, own in result.jobs.items()}} if result.jobs else {}),
    }


def error_keys(errors: Sequence[ErrorGroup]) -> list[dict[str, Any]]:
    """Return failures and rejections by cause as they are saved."""
    return [asdict(error) for error in errors]


def _header_keys(result: BenchResult) -> dict[str, Any]:
    bench, load, header = result.bench, result.run.load, result.header
    return {
        "schema_version": SCHEMA_VERSION,
        "date": header.date,
        "backend": header.backend,
        "label": header.label,
        "model_id": header.model_id,
        "tokenizer_id": None if load.tokenizer is None else str(load.tokenizer),
        "num_prompts": header.num_prompts,
        "request_rate": header.level.saved_rate,
        "burstiness": header.burstiness,
        "max_concurrency": header.level.max_concurrency,
        **bench.metadata,
        "arrivals": header.arrivals,
        "dataset_name": header.dataset_name,
        "dataset_path": None if load.dataset_path is None else str(load.dataset_path),
        "load": _others(load),
        "title": result.title,
        "series": result.series,
        "seed": load.seed,
        "salt": load.salt,
        "goodput_objectives_ms": {
            name: seconds * 1e3 for name, seconds in (bench.summary.objectives or {}).items()
        },
    }


def _others(load: BenchLoad) -> dict[str, Any]:
    """Return the settings of a load that have no key of their own, by their flags and in their units."""
    return {
        each.key: value * 1e3 if each.option.unit == "ms" and value is not None else value
        for each, value in values_of(load).items()
        if each.key not in _OWN_KEYS
    }


_OWN_KEYS = frozenset({*SETTINGS, "tokenizer", "salt", "trace", "sweep_rate", "sweep_concurrency"})


def _time_keys(result: BenchResult) -> dict[str, Any]:
    client = result.client
    return (
        _outcome_keys(result.summary, result.response_times)
        | distribution_keys(client.queue, CLIENT_QUEUE)
        | {
            "max_dispatch_lag_ms": client.max_dispatch_lag_ms,
            "p99_dispatch_lag_ms": client.p99_dispatch_lag_ms,
        }
        | _advice_keys(result.advice)
    )


def _outcome_keys(summary: GroupSummary, times: ResponseTimes) -> dict[str, Any]:
    return {
        "expired": summary.counts.num_expired,
        "admitted": summary.counts.num_admitted,
        "attainment_admitted": summary.attainment_admitted,
        **distribution_keys(times.rejection, "rejection"),
        **distribution_keys(times.expiry, "expiry"),
    }


def _advice_keys(advice: RefusalAdvice) -> dict[str, float | None]:
    return {
        "median_rejected_predicted_ttft_ms": milliseconds(advice.median_predicted_ttft),
        "median_retry_after_ms": milliseconds(advice.median_retry_after),
    }


def _verdict_keys(verdicts: VerdictSummary) -> dict[str, Any]:
    return {
        "requests": verdicts.num_requests,
        "agreement": verdicts.agreement,
        "met": verdicts.met,
        "only_client_good": verdicts.num_only_client_good,
        "only_server_met": verdicts.num_only_server_met,
        "relegated": verdicts.num_relegated,
        "median_client_ttft_ms": milliseconds(verdicts.median_client_ttft),
        "median_server_ttft_ms": milliseconds(verdicts.median_server_ttft),
        "median_ttft_difference_ms": milliseconds(verdicts.median_ttft_difference),
        "median_predicted_ttft_error": verdicts.median_predicted_ttft_error,
    }


def details(result: BenchResult) -> dict[str, Any]:
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
        "job_ids": [None if record.job is None else record.job.job_id for record in records],
        "request_groups": [record.group for record in records],
        "verdicts": [None if record.verdict is None else asdict(record.verdict) for record in records],
        "predicted_ttfts": [record.predicted_ttft for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [f"{record.cause}: {record.detail}" if record.cause else "" for record in records],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRequests:
    """Of each request of a saved run, in one order; times in seconds, None where it did not complete."""

    ttfts: Sequence[float | None]
    gaps: Sequence[Sequence[float]]
    latencies: Sequence[float | None]
    """E2E."""
    num_output_tokens: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """One run of a result file, as far as two are compared."""

    title: str
    settings: Mapping[str, Any]
    """Those of `SETTINGS` that the file has and those of its groups (`dataset.input_len`), as it has them."""
    throughputs: Mapping[str, float]
    """Those of `THROUGHPUTS` that the file has a number for."""
    latencies_ms: Mapping[LatencyStatistic, float]
    """In the order of the file."""
    requests: SavedRequests | None
    """None where they were not saved."""


def read_runs(path: Path) -> list[SavedRun]:
    """Return the runs of a saved result, a single one or a sweep, or of several, one a line.

    Other tools' results, which lack some of the keys, are read as far as they go.

    Raises
    ------
    ConfigError : the file is missing or not a result, or a key holds what it cannot.
    """
    try:
        documents = _documents(read_bytes(path))
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from error
    runs: list[Any] = []
    for document in documents:
        own = document.get("runs", [document]) if isinstance(document, dict) else None
        if not isinstance(own, list) or not own or not all(map(_is_run, own)):
            raise ConfigError(f"{path}: not a result of `bench serve`; save one with --json FILE")
        runs += own
    return [_Reader(path, run).read() for run in runs]


def _documents(content: bytes) -> list[Any]:
    """Return what a file holds: one document, or one a line (`--append-result`)."""
    try:
        return [orjson.loads(content)]
    except orjson.JSONDecodeError:
        try:
            documents = [orjson.loads(line) for line in content.splitlines()]
        except orjson.JSONDecodeError:
            documents = []
        if not documents:
            raise  # the error of the whole says more than that of a line
        return documents


def _is_run(run: Any) -> bool:
    return isinstance(run, dict) and "output_throughput" in run


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one run of a file."""

    path: Path
    run: dict[str, Any]

    def read(self) -> SavedRun:
        throughputs = {key: self._number(key) for key in THROUGHPUTS}
        latencies = {found: self._number(key) for key in self.run if (found := _latency_of(key)) is not None}
        return SavedRun(
            title=str(self.run.get("title") or ""),
            settings={name: self.run[name] for name in SETTINGS if name in self.run} | self._groups(),
            throughputs={name: value for name, value in throughputs.items() if value is not None},
            latencies_ms={found: value for found, value in latencies.items() if value is not None},
            requests=self._requests(),
        )

    def _groups(self) -> dict[str, Any]:
        groups = {group: self.run.get(group) for group in SETTING_GROUPS}
        return {
            f"{group}.{name}": value
            for group, own in groups.items()
            if isinstance(own, dict)
            for name, value in own.items()
        }

    def _number(self, key: str) -> float | None:
        value = self.run.get(key)
        if not _is_number_or_none(value):
            raise self._error(key, "a number or null")
        return value

    def _requests(self) -> SavedRequests | None:
        if not all(key in self.run for key in _COLUMNS):
            return None
        for key, (is_right, expected) in _COLUMNS.items():
            column = self.run[key]
            if not isinstance(column, list) or not all(map(is_right, column)):
                raise self._error(key, f"a list with {expected} a request")
        ttfts, own_gaps, latencies, num_output_tokens = (self.run[key] for key in _COLUMNS)
        sizes = {key: len(self.run[key]) for key in _COLUMNS}
        if len(set(sizes.values())) > 1:
            counted = ", ".join(f"{key} {size}" for key, size in sizes.items())
            raise ConfigError(f"{self.path}: the columns must have one entry a request; they have {counted}")
        return SavedRequests(
            ttfts=ttfts, gaps=own_gaps, latencies=latencies, num_output_tokens=num_output_tokens
        )

    def _error(self, key: str, expected: str) -> ConfigError:
        shown = repr(self.run[key])
        return ConfigError(f"{self.path}: {key} must be {expected}, got {shown[:80]}")


def _latency_of(key: str) -> LatencyStatistic | None:
    """Read `p99_ttft_ms`; None for other keys."""
    statistic, _, rest = key.partition("_")
    metric = rest.removesuffix("_ms")
    return LatencyStatistic(metric, statistic) if metric in METRICS and rest.endswith("_ms") else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_number_or_none(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


_COLUMNS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "ttfts": (_is_number_or_none, "a number or null"),
    "itls": (_is_numbers, "a list of numbers"),
    "latencies": (_is_number_or_none, "a number or null"),
    "output_lens": (_is_number, "a number"),
}
"""Of `SavedRequests`, in the order of its fields: what an entry must be, and how to say so."""
