"""Numbers for people: short, with a unit, the same width whatever their size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NOTHING = "-"
SHORT_RUN = 30.0
"""Seconds: the delays that objectives limit take some of them to build up."""


def number(value: Any, digits: int = 1) -> str:
    """Return a number with fewer digits the larger it is; `-` for None."""
    if value is None:
        return NOTHING
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}f}" if abs(value) >= 10 else f"{value:.{digits + 1}f}"


def exact_percent(share: float | None, digits: int = 1) -> str:
    """Return a share in percent with so many digits after the point; `-` for None."""
    return NOTHING if share is None else f"{share:.{digits}%}"


def whole_percent(share: float | None) -> str:
    """Return a share in whole percents; `-` for None."""
    return exact_percent(share, 0)


def short(value: float | None) -> str:
    """Return three significant digits, no fewer than those before the point; `-` for None."""
    if value is None:
        return NOTHING
    size = abs(value)
    if size >= 99.95 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def significant(value: float, digits: int = 3) -> str:
    """Return a number with so many significant digits, and with those before the point: 0.961, 98,400."""
    return f"{value:,.0f}" if 10**digits - 0.5 <= value < 1e15 else f"{value:.{digits}g}"


def rate_text(rate: float, digits: int = 3, *, of: str = "request") -> str:
    """Return requests, or others, a second with their unit: `1 request/s`, `2.5 requests/s`."""
    shown = significant(rate, digits)
    return f"{shown} {of}{'s' * (shown != '1')}/s"


def too_short(num: float, rate: float, *, of: str = "request") -> Iterator[str]:
    """Yield why a run of so many requests, or jobs, at a rate says too little, if it does."""
    if rate and (seconds := num / rate) < SHORT_RUN:
        yield (
            f"at {rate_text(rate, 4, of=of)} a run lasts {seconds:.0f} s, in which queues hardly grow; raise "
            "--num-prompts for the rate that can be kept up"
        )


def duration(seconds: float | None) -> str:
    """Return a time in the unit that suits it, from microseconds to hours."""
    if seconds is None:
        return NOTHING
    if 0 < seconds < 0.9995e-3:
        return f"{short(seconds * 1e6)} µs"
    if 0 < seconds < 0.9995:
        return f"{short(seconds * 1e3)} ms"
    if seconds < 120:
        return f"{short(seconds)} s"
    return f"{short(seconds / 60)} min" if seconds < 7200 else f"{short(seconds / 3600)} h"


def percent(share: float | None) -> str:
    """Return a share in percent."""
    return NOTHING if share is None else f"{short(share * 100)} %"


def against(value: float | None, objective: float | None) -> str:
    """Return a time beside its objective, in the objective's unit, as far as they are known.

    `410 ≤ 500 ms`, `612 > 500 ms`, `≤ 500 ms`, `410 ms`.
    """
    if objective is None:
        return duration(value)
    is_short = objective < 0.9995
    unit, scale = ("ms", 1e3) if is_short else ("s", 1.0)
    limit = f"{short(objective * scale)} {unit}"
    if value is None:
        return f"≤ {limit}"
    return f"{short(value * scale)} {'≤' if value <= objective else '>'} {limit}"
