"""Which runs a command makes: sweeps over a load, and published studies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onbeat.bench.config import RunConfig


def concurrency_sweep(base: RunConfig, levels: Sequence[int]) -> list[RunConfig]:
    """Return one closed-loop run per concurrency."""
    return [
        replace(
            base,
            load=base.load.at_concurrency(level),
            title=f"{base.title} c={level}".strip(),
            series=f"{base.title} closed loop".strip(),
        )
        for level in levels
    ]


def rate_sweep(base: RunConfig, rates: Sequence[float]) -> list[RunConfig]:
    """Return one open-loop run per request rate."""
    return [
        replace(
            base,
            load=base.load.at_rate(rate),
            title=f"{base.title} {rate:g} req/s".strip(),
            series=f"{base.title} open loop".strip(),
        )
        for rate in rates
    ]
