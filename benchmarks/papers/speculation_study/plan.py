"""All runs of the study, and the order in which they are done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.harness.store import Results
from benchmarks.papers.speculation_study import mlc, turbospec
from onbeat.core.errors import ConfigError

Stage = Callable[[Results], list[Any]]
"""From the results so far to runs."""

PARTS = ("turbospec", "mlc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How large the study is."""

    parts: Sequence[str] = PARTS
    scale: float = 1.0
    """Of the numbers of requests."""


def turbospec_run(server: str, rate: int, acceptance: float, mode: str, plan: Plan) -> turbospec.LatencyRun:
    if mode == turbospec.NONE:
        acceptance = 0.0  # the same run for all
    return turbospec.LatencyRun(
        server=server,
        rate=rate,
        acceptance=acceptance,
        mode=mode,
        num_requests=turbospec.num_requests(rate, scale=plan.scale),
        coefficients=shared_folder() / turbospec.COEFFICIENTS,
    )


def mlc_run(variant: str, concurrency: int, mode: str, plan: Plan) -> mlc.LoopRun:
    return mlc.LoopRun(
        variant=variant,
        concurrency=concurrency,
        mode=mode,
        num_requests=mlc.num_requests(concurrency, scale=plan.scale),
    )


def stages(plan: Plan) -> Iterator[Stage]:
    """Yield what is run, in order: a stage needs the results of those before it."""
    for part, runs in (("turbospec", _turbospec_runs), ("mlc", _mlc_runs)):
        if part in plan.parts:
            yield lambda _results, runs=runs: list(runs(plan))


def shared_folder() -> Path:
    """Return the folder of public data.

    Raises
    ------
    ConfigError : nobody has named it.
    """
    shared = os.environ.get("ONBEAT_SHARED")
    if not shared:
        raise ConfigError("the folder of public data is needed: set ONBEAT_SHARED (coefficients and traces)")
    return Path(shared)


def _turbospec_runs(plan: Plan) -> Iterator[turbospec.LatencyRun]:
    every = product(turbospec.SERVERS, turbospec.RATES, turbospec.ACCEPTANCES, turbospec.MODES)
    return iter(dict.fromkeys(turbospec_run(*each, plan) for each in every))


def _mlc_runs(plan: Plan) -> Iterator[mlc.LoopRun]:
    for variant, concurrency, mode in product(mlc.VARIANTS, mlc.CONCURRENCIES, mlc.MODES):
        yield mlc_run(variant, concurrency, mode, plan)
