"""The file of a result, read again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from onbeat.core.errors import ConfigError, quoted
from onbeat.files import json_lines, read_text
from onbeat.metrics.summary import METRICS, LatencyStatistic
from onbeat.report.result import SCHEMA
from onbeat.typed import NotJSON, Number, convert, decode, take

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRequests:
    """Of each request of a saved run, in one order; times in seconds, None where it did not complete."""

    ttfts: Sequence[float | None]
    gaps: Sequence[Sequence[float]]
    latencies: Sequence[float | None]
    """E2E."""
    num_output_tokens: Sequence[float]


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
    runs: list[dict[str, Any]] = []
    for document in _documents(path):
        schema = document.get("schema", SCHEMA)  # version 1, and other tools, do not say it
        if schema not in range(1, SCHEMA + 1):
            raise ConfigError(
                f"{path} has schema {quoted(schema)}, and this onbeat reads up to {SCHEMA}: read it with the "
                f"onbeat that wrote it ({document.get('onbeat_version', 'a newer one')}), or run it again"
            )
        own = document.get("runs", [document])
        if not isinstance(own, list) or not own or not all(map(_is_run, own)):
            raise ConfigError(
                f"{path}: not a result of `bench serve`; save one of it or of `simulate` with --json FILE"
            )
        runs += own
    return [_saved_run(run, str(path)) for run in runs]


def _documents(path: Path) -> list[dict[str, Any]]:
    """Return what a file holds: one document, or one a line (`--append-result`)."""
    text = read_text(path)
    try:
        return [decode(dict[str, Any], text, str(path))]
    except NotJSON as error:
        try:
            documents = [document for _, document in json_lines(dict[str, Any], path, text)]
        except ConfigError:
            documents = []
        if not documents:
            raise error from None  # the error of the whole says more than that of a line
        return documents


def _is_run(run: Any) -> bool:
    return isinstance(run, dict) and "output_throughput" in run


class _Columns(msgspec.Struct):
    """Of `SavedRequests`."""

    ttfts: tuple[Number | None, ...]
    itls: tuple[tuple[Number, ...], ...]
    latencies: tuple[Number | None, ...]
    output_lens: tuple[Number, ...]


def _saved_run(run: dict[str, Any], where: str) -> SavedRun:
    groups = {group: run.get(group) for group in SETTING_GROUPS}
    throughputs = {key: take(Number, run, key, where) for key in THROUGHPUTS}
    latencies = {
        found: take(Number, run, key, where) for key in run if (found := _latency_of(key)) is not None
    }
    return SavedRun(
        title=str(run.get("title") or ""),
        settings={name: run[name] for name in SETTINGS if name in run}
        | {
            f"{group}.{name}": value
            for group, own in groups.items()
            if isinstance(own, dict)
            for name, value in own.items()
        },
        throughputs={name: value for name, value in throughputs.items() if value is not None},
        latencies_ms={found: value for found, value in latencies.items() if value is not None},
        requests=_saved_requests(run, where),
    )


def _saved_requests(run: dict[str, Any], where: str) -> SavedRequests | None:
    if any(field not in run for field in _Columns.__struct_fields__):
        return None
    columns = convert(_Columns, run, where)
    sizes = {name: len(getattr(columns, name)) for name in _Columns.__struct_fields__}
    if len(set(sizes.values())) > 1:
        counted = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(f"{where}: the columns must have one entry a request; they have {counted}")
    return SavedRequests(
        ttfts=columns.ttfts,
        gaps=columns.itls,
        latencies=columns.latencies,
        num_output_tokens=columns.output_lens,
    )


def _latency_of(key: str) -> LatencyStatistic | None:
    """Read `p99_ttft_ms`; None for other keys."""
    statistic, _, rest = key.partition("_")
    metric = rest.removesuffix("_ms")
    return LatencyStatistic(metric, statistic) if metric in METRICS and rest.endswith("_ms") else None
