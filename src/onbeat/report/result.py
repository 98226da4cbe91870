"""One run, measured or simulated, as tables, charts and files show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import orjson

from onbeat.core.errors import ConfigError
from onbeat.metrics.summary import MeasuredRequest

SCHEDULED = "scheduled arrival"
"""`timing_origin` of a run whose latencies start at the planned arrival."""


class ReportedRequest(MeasuredRequest, Protocol):
    """One request as the charts see it."""

    @property
    def client_queue_time(self) -> float:
        """Time from the arrival to the send, seconds; 0 where nothing holds requests back."""
        ...


R = TypeVar("R", bound=ReportedRequest, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(Generic[R]):
    """One run: its numbers, and the requests behind them."""

    title: str = ""
    """What sets it apart in a table of several runs."""
    series: str = ""
    """Runs of one series are joined by a line."""
    summary: dict[str, Any]
    """What is saved, details aside: the keys of `metrics.summary.summarise` and of the run's header."""
    records: Sequence[R] = ()
    """Requests that ended by themselves, by index."""
    start: float = 0.0
    """On the clock of the records, seconds."""
    warnings: tuple[str, ...] = ()


AnyResult = RunResult[ReportedRequest]


def merge_warnings(results: Sequence[AnyResult]) -> list[str]:
    """Return each different warning once, with the runs that it is about unless it is about all."""
    about: dict[str, list[str]] = {}
    for result in results:
        for warning in result.warnings:
            about.setdefault(warning, []).append(result.title)
    return [
        warning if len(titles) == len(results) else f"{warning} ({', '.join(titles)})"
        for warning, titles in about.items()
    ]


def write_document(path: Path, document: dict[str, Any], *, append: bool = False) -> None:
    """Write a result file.

    Parameters
    ----------
    append : add a line to the file instead of replacing it (one JSON document a line).

    Raises
    ------
    ConfigError : the file cannot be written.
    """
    content = orjson.dumps(
        document, option=orjson.OPT_SERIALIZE_NUMPY | (0 if append else orjson.OPT_INDENT_2)
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab" if append else "wb") as file:
            file.write(content + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
