"""Two saved results side by side: what changed, by how much, and whether it is more than noise.

The file of a result, read again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from onbeat.core.errors import ConfigError, quoted
from onbeat.files import json_lines, read_text
from onbeat.metrics.distribution import Array, bootstrap_draws, quantiles
from onbeat.metrics.summary import METRICS, LatencyStatistic
from onbeat.report.result import SCHEMA, Column, Table
from onbeat.typed import NotJSON, Number, convert, decode, take

SETTINGS = (
    *("backend", "model_id", "dataset_name", "dataset_path", "num_prompts", "request_rate", "burstiness"),
    *("arrivals", "max_concurrency", "seed", "num_gpus", "timing_origin", "goodput_objectives_ms"),
    "slo_sent",
)
"""Under which two results measure the same thing."""
THROUGHPUTS = (
    *("output_throughput", "request_throughput"),
    *("request_goodput", "attainment", "attainment_admitted"),
)


class SavedRequests(msgspec.Struct, frozen=True):
    """Of each request of a saved run, in one order; times in seconds, None where it did not complete."""

    ttfts: tuple[Number | None, ...]
    gaps: tuple[tuple[Number, ...], ...] = msgspec.field(name="itls")
    latencies: tuple[Number | None, ...]
    """E2E."""
    num_output_tokens: tuple[Number, ...] = msgspec.field(name="output_lens")

    def __post_init__(self) -> None:
        sizes = dict(zip(self.__struct_encode_fields__, map(len, msgspec.structs.astuple(self)), strict=True))
        if len(set(sizes.values())) > 1:
            counted = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise ValueError(f"the columns must have one entry a request; they have {counted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """One run of a result file, as far as two are compared."""

    title: str
    settings: Mapping[str, Any]
    """Those of `SETTINGS` that the file has, and those of its load (`load.input_len`), as it has them."""
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
        own = own if isinstance(own, list) else []
        if not own or not all(isinstance(each, dict) and "output_throughput" in each for each in own):
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


def _saved_run(run: dict[str, Any], where: str) -> SavedRun:
    throughputs = {key: take(Number, run, key, where) for key in THROUGHPUTS}
    latencies = {
        found: take(Number, run, key, where) for key in run if (found := _latency_of(key)) is not None
    }
    load = run.get("load")  # which other tools' results do not have
    own = load.items() if isinstance(load, dict) else ()
    has_requests = all(field in run for field in SavedRequests.__struct_encode_fields__)
    return SavedRun(
        title=str(run.get("title") or ""),
        settings={name: run[name] for name in SETTINGS if name in run}
        | {f"load.{name}": value for name, value in own},
        throughputs={name: value for name, value in throughputs.items() if value is not None},
        latencies_ms={found: value for found, value in latencies.items() if value is not None},
        requests=convert(SavedRequests, run, where) if has_requests else None,
    )


def _latency_of(key: str) -> LatencyStatistic | None:
    """Read `p99_ttft_ms`; None for other keys."""
    statistic, _, rest = key.partition("_")
    metric = rest.removesuffix("_ms")
    return LatencyStatistic(metric, statistic) if metric in METRICS and rest.endswith("_ms") else None


Difference = Literal["better", "worse", "no clear difference", ""]

INTERVAL_NOTE = (
    "note: the interval covers the spread inside the two runs only, so repeat and alternate the runs before "
    "believing a small difference"
)
"""One run is one draw of the machine's state: the same server, run twice, can come out better or worse."""


@dataclass(frozen=True, slots=True)
class Row:
    """One number in both results."""

    name: str
    baseline: float
    candidate: float
    interval: tuple[float, float] | None
    """95 % bootstrap interval of candidate / baseline; None without per-request data."""
    higher_is_better: bool

    @property
    def ratio(self) -> float | None:
        """Candidate / baseline; None where the baseline is 0."""
        return self.candidate / self.baseline if self.baseline else None

    @property
    def verdict(self) -> Difference:
        """Whether the interval lies on one side of 1; empty without an interval."""
        if self.interval is None:
            return ""
        low, high = self.interval
        if low <= 1 <= high:
            return "no clear difference"
        return "better" if (low > 1) == self.higher_is_better else "worse"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs of the same level."""

    title: str
    rows: tuple[Row, ...]
    differences: tuple[str, ...]
    """Settings that differ: the runs then do not measure the same thing."""


def compare(
    baselines: Sequence[SavedRun],
    candidates: Sequence[SavedRun],
    rng: np.random.Generator,
) -> list[Comparison]:
    """Compare runs of the same level; single runs are compared whatever their level.

    Where a result has a level several times, as a study of several lengths, the first is compared with the
    first, the second with the second.

    Raises
    ------
    ConfigError : two sweeps have no run in common.
    """
    if len(baselines) == len(candidates) == 1:
        return [compare_runs(baselines[0], candidates[0], rng)]
    by_level: dict[tuple[Any, ...], deque[SavedRun]] = defaultdict(deque)
    for run in candidates:
        by_level[_level(run)].append(run)
    pairs = [(run, others.popleft()) for run in baselines if (others := by_level[_level(run)])]
    if not pairs:
        raise ConfigError("the two results have no run of the same data set and level in common")
    return [compare_runs(baseline, candidate, rng) for baseline, candidate in pairs]


def _level(run: SavedRun) -> tuple[Any, ...]:
    return tuple(
        run.settings.get(name) for name in ("dataset_name", "request_rate", "max_concurrency", "num_prompts")
    )


def compare_runs(baseline: SavedRun, candidate: SavedRun, rng: np.random.Generator) -> Comparison:
    """Compare two runs number by number; see `compare`."""
    rows = [
        Row(key.replace("_", " "), value, candidate.throughputs[key], None, higher_is_better=True)
        for key, value in baseline.throughputs.items()
        if key in candidate.throughputs
    ]
    # Spreads are no gain or loss, single values no statistic, and P50 says what the median does.
    shared = [
        latency
        for latency in baseline.latencies_ms
        if latency in candidate.latencies_ms and latency.statistic not in {"std", "max", "median"}
    ]
    intervals = _ratio_intervals(baseline, candidate, shared, rng)
    for latency in shared:
        name = f"{latency.statistic}_{latency.metric}_ms"
        values = baseline.latencies_ms[latency], candidate.latencies_ms[latency]
        rows.append(Row(name, *values, intervals.get(latency), higher_is_better=False))
    before, after = baseline.settings, candidate.settings
    differences = tuple(
        f"{name}: {before.get(name)} against {after.get(name)}"
        for name in dict.fromkeys((*SETTINGS, *(name for name in before if name in after)))
        if before.get(name) != after.get(name)
    )
    return Comparison(baseline.title, tuple(rows), differences)


def _ratio_intervals(
    baseline: SavedRun, candidate: SavedRun, latencies: Sequence[LatencyStatistic], rng: np.random.Generator
) -> dict[LatencyStatistic, tuple[float, float]]:
    """Return an interval of each whose requests are saved; those of one metric are of the same resamples."""
    intervals = {}
    for metric, own in groupby(latencies, lambda latency: latency.metric):
        groups = [_groups(run.requests, metric) for run in (baseline, candidate)]
        if not all(sum(map(len, group)) for group in groups):
            continue
        names = [latency.statistic for latency in own]
        # Pooled gaps are many: fewer resamples keep a comparison within seconds.
        num_resamples = 200 if metric == "itl" else 1000
        compute = partial(_statistics, names=names)
        old, new = (bootstrap_draws(group, compute, rng, num_resamples=num_resamples).T for group in groups)
        for name, before, after in zip(names, old, new, strict=True):
            valid = before > 0
            if valid.any():
                low, high = quantiles(after[valid] / before[valid], [2.5, 97.5])
                intervals[LatencyStatistic(metric, name)] = low, high
    return intervals


def _statistics(values: Array, names: Sequence[str]) -> list[float]:
    """Return the mean, or percentiles, by their names."""
    found = quantiles(values, [float(name.removeprefix("p")) for name in names if name != "mean"])
    return [float(values.mean()) if name == "mean" else found.pop(0) for name in names]


def _groups(requests: SavedRequests | None, metric: str) -> list[Array]:
    """Return each request's values of a metric; [] if they were not saved."""
    if requests is None:
        return []
    rows = zip(requests.ttfts, requests.gaps, requests.latencies, requests.num_output_tokens, strict=True)
    groups: list[Array] = []
    for first, own_gaps, latency, num_output_tokens in rows:
        if first is None or latency is None:
            continue
        if metric == "itl":
            groups.append(np.array(own_gaps, dtype=np.float64))
        elif metric == "tpot":
            if num_output_tokens > 1:
                groups.append(np.array([(latency - first) / (num_output_tokens - 1)]))
        else:
            groups.append(np.array([first if metric == "ttft" else latency]))
    return groups


def comparison_table(comparison: Comparison, names: tuple[str, str]) -> Table:
    """Return the numbers of two runs side by side, and under them what their intervals leave out."""
    keys = ("name", "baseline", "candidate", "ratio", "interval", "verdict")
    rows = [{key: getattr(row, key) for key in keys} for row in comparison.rows]
    columns = (
        Column("name", "", str),
        *map(Column, ("baseline", "candidate"), names),
        Column("ratio", "ratio", "{:.3f}".format),
        Column("interval", "95 % interval", lambda ends: f"{ends[0]:.3f} .. {ends[1]:.3f}"),
        Column("verdict", "verdict", str),
    )
    has_intervals = any(row.interval is not None for row in comparison.rows)
    colours = {"better": "green", "worse": "red"}
    return Table(
        comparison.title, columns, rows, caption=INTERVAL_NOTE if has_intervals else "", colours=colours
    )
