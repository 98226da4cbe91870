"""The file of a result, read again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from onbeat.core.errors import ConfigError
from onbeat.files import read_bytes
from onbeat.metrics.summary import METRICS, LatencyStatistic

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
