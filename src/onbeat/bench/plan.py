"""Which runs a command makes: sweeps over a load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onbeat.bench.bench_config import LoadConfig, RunConfig


def concurrency_sweep(base: RunConfig, levels: Sequence[int]) -> list[RunConfig]:
    """Return one closed-loop run per concurrency."""
    return [
        replace(
            base,
            load=LoadConfig(max_concurrency=level),
            title=f"{base.title} c={level}".strip(),
            series=base.title,
        )
        for level in levels
    ]


def rate_sweep(base: RunConfig, rates: Sequence[float]) -> list[RunConfig]:
    """Return one open-loop run per request rate, other settings of the load unchanged."""
    return [
        replace(
            base,
            load=replace(base.load, request_rate=rate),
            title=f"{base.title} {rate:g} req/s".strip(),
            series=base.title,
        )
        for rate in rates
    ]
