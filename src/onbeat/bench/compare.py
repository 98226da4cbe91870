"""Two saved results side by side: what changed, by how much, and whether it is more than noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from onbeat.core.errors import ConfigError
from onbeat.metrics.summary import Array, bootstrap_draws, percentile

Verdict = Literal["better", "worse", "no clear difference", ""]

THROUGHPUTS = (
    *("output_throughput", "request_throughput"),
    *("request_goodput", "attainment", "attainment_admitted"),
)
LATENCY_METRICS = ("ttft", "tpot", "itl", "e2el")

# Settings under which two results measure the same thing.
SETTINGS = (
    "backend",
    "model_id",
    "dataset_name",
    "dataset_path",
    "num_prompts",
    "request_rate",
    "burstiness",
    "arrivals",
    "max_concurrency",
    "seed",
    "num_gpus",
    "timing_origin",
    "goodput_objectives_ms",
    "slo_sent",
)


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
    def ratio(self) -> float:
        """Candidate / baseline; NaN where the baseline is 0."""
        return self.candidate / self.baseline if self.baseline else math.nan

    @property
    def verdict(self) -> Verdict:
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


def read_runs(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a saved result, a single one or a sweep.

    Raises
    ------
    ConfigError : the file is missing or not a result.
    """
    try:
        document = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from error
    runs = document.get("runs", [document]) if isinstance(document, dict) else []
    if not runs or not all(isinstance(run, dict) and "output_throughput" in run for run in runs):
        raise ConfigError(f"{path}: not a result of `bench serve`; save one with --json FILE")
    return runs


def compare(
    baselines: Sequence[dict[str, Any]],
    candidates: Sequence[dict[str, Any]],
    rng: np.random.Generator,
    *,
    num_resamples: int = 1000,
) -> list[Comparison]:
    """Compare runs of the same title and level; single runs are compared whatever their level.

    Parameters
    ----------
    num_resamples : of the bootstrap; a fifth of them for gaps, which are many.

    Raises
    ------
    ConfigError : two sweeps have no run in common.
    """
    if len(baselines) == len(candidates) == 1:
        return [compare_runs(baselines[0], candidates[0], rng, num_resamples=num_resamples)]
    by_level = {_level(run): run for run in candidates}
    pairs = [(run, by_level[_level(run)]) for run in baselines if _level(run) in by_level]
    if not pairs:
        raise ConfigError("the two results have no run of the same data set and level in common")
    return [
        compare_runs(baseline, candidate, rng, num_resamples=num_resamples) for baseline, candidate in pairs
    ]


def _level(run: dict[str, Any]) -> tuple[Any, ...]:
    return (
        run.get("dataset_name"),
        run.get("request_rate"),
        run.get("max_concurrency"),
        run.get("num_prompts"),
    )


def compare_runs(
    baseline: dict[str, Any], candidate: dict[str, Any], rng: np.random.Generator, *, num_resamples: int
) -> Comparison:
    """Compare two runs number by number; see `compare`."""
    rows = [
        Row(key.replace("_", " "), baseline[key], candidate[key], None, higher_is_better=True)
        for key in THROUGHPUTS
        if baseline.get(key) is not None and candidate.get(key) is not None
    ]
    keys = [key for key in baseline if _latency_of(key) and _is_number(baseline[key])]
    for key in keys:
        if _is_number(candidate.get(key)):
            interval = _ratio_interval(baseline, candidate, key, rng, num_resamples=num_resamples)
            rows.append(Row(key, baseline[key], candidate[key], interval, higher_is_better=False))
    differences = tuple(
        f"{name}: {baseline.get(name)} against {candidate.get(name)}"
        for name in SETTINGS
        if baseline.get(name) != candidate.get(name)
    )
    return Comparison(baseline.get("title") or "", tuple(rows), differences)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _latency_of(key: str) -> tuple[str, str] | None:
    """Split `p99_ttft_ms` into statistic and metric; None for other keys, spreads, and what P50 says too."""
    statistic, _, rest = key.partition("_")
    metric = rest.removesuffix("_ms")
    if metric not in LATENCY_METRICS or not rest.endswith("_ms") or statistic in {"std", "max", "median"}:
        return None
    return statistic, metric


def _ratio_interval(
    baseline: dict[str, Any],
    candidate: dict[str, Any],
    key: str,
    rng: np.random.Generator,
    *,
    num_resamples: int,
) -> tuple[float, float] | None:
    found = _latency_of(key)
    assert found is not None
    statistic, metric = found
    groups = [_groups(run, metric) for run in (baseline, candidate)]
    if not all(sum(map(len, group)) for group in groups):
        return None
    compute = _statistic(statistic)
    if metric == "itl":  # pooled gaps are many: fewer resamples keep a comparison within seconds
        num_resamples = max(num_resamples // 5, 1)
    old, new = (bootstrap_draws(group, compute, rng, num_resamples=num_resamples) for group in groups)
    valid = old > 0
    if not valid.any():
        return None
    ratios = new[valid] / old[valid]
    return percentile(ratios, 2.5), percentile(ratios, 97.5)


def _statistic(name: str) -> Callable[[Array], float]:
    if name == "mean":
        return lambda values: float(values.mean())
    return partial(percentile, p=50 if name == "median" else float(name.removeprefix("p")))


def _groups(run: dict[str, Any], metric: str) -> list[Array]:
    """Return each request's values of a metric from the per-request columns; [] if they were not saved."""
    if "ttfts" not in run:
        return []
    rows = zip(run["ttfts"], run["itls"], run["latencies"], run["output_lens"], strict=True)
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
