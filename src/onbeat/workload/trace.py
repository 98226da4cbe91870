"""Recorded workloads: lengths, and arrival times and shared prefixes where the file has them.

The header decides the kind. gzip files are read as they are.

==========  =====================================================================
kind        columns (CSV) or keys (JSON lines)
==========  =====================================================================
azure       TIMESTAMP, ContextTokens, GeneratedTokens
mooncake    timestamp (or timestamp_ms), input_length, output_length, hash_ids
burstgpt    Timestamp, Request tokens, Response tokens
vidur       arrived_at (seconds), num_prefill_tokens, num_decode_tokens
lengths     num_prefill_tokens, num_decode_tokens
==========  =====================================================================

References
----------
Patel et al., "Splitwise", ISCA 2024 (Azure LLM inference trace 2023); Qin et al., "Mooncake", FAST 2025;
Agrawal et al., "Vidur", MLSys 2024.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.files import csv_rows, json_lines, read_text
from onbeat.workload.arrivals import MOST_TOKENS

TraceKind = Literal["azure", "mooncake", "burstgpt", "vidur", "lengths"]

TIMED_KINDS = frozenset({"azure", "mooncake", "burstgpt", "vidur"})
"""Those whose files have arrival times."""
MOONCAKE_BLOCK_SIZE = 512
"""Prompt tokens of one hashed block in Mooncake's traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Columns of a recorded workload, one entry a request, in file order."""

    kind: TraceKind
    num_prompt_tokens: NDArray[np.int64]
    num_output_tokens: NDArray[np.int64]
    times: NDArray[np.float64] | None = None
    """Seconds, from any origin; None where the file has no times."""
    block_ids: tuple[tuple[int, ...], ...] | None = None
    """Ids of each prompt's blocks; equal ids mean an equal prefix up to the block's end."""
    block_size: int = MOONCAKE_BLOCK_SIZE
    lines: NDArray[np.int64] | None = None
    """Where in its file each request stands, counted from 1."""

    def __len__(self) -> int:
        return len(self.num_prompt_tokens)

    def take(self, rows: NDArray[np.int64]) -> Trace:
        """Return the given rows in the given order."""
        columns = ("num_prompt_tokens", "num_output_tokens", "times", "block_ids", "lines")
        return replace(self, **{name: rows_of(getattr(self, name), rows) for name in columns})


def rows_of(column: Any, rows: NDArray[np.int64]) -> Any:
    """Return the given rows of a column, in the given order: an array, a sequence, or None."""
    if column is None or isinstance(column, np.ndarray):
        return None if column is None else column[rows]
    return tuple(column[row] for row in rows.tolist())


Row = tuple[float | None, int, int, tuple[int, ...] | None]


@dataclass(frozen=True, slots=True)
class _Format:
    """What a kind calls its columns, and how it writes times."""

    kind: TraceKind
    prompts: str
    outputs: str
    time: str = ""
    seconds: Callable[[Any], float] = float
    blocks: str = ""

    @property
    def columns(self) -> set[str]:
        return {self.prompts, self.outputs, self.time, self.blocks} - {""}

    def parse(self, record: Mapping[str, Any]) -> Row:
        ids: Any = record[self.blocks] if self.blocks else None
        return (
            self.seconds(record[self.time]) if self.time else None,
            int(record[self.prompts]),
            int(record[self.outputs]),
            tuple(map(int, ids.split() if isinstance(ids, str) else ids)) if self.blocks else None,
        )


def read_trace(path: Path, *, kind: TraceKind | None = None, columns: tuple[str, str] | None = None) -> Trace:
    """Read a trace file of any known kind.

    Parameters
    ----------
    path : CSV or JSON lines, plain or gzip.
    kind : what it must be; None takes what the header says.
    columns : names of the columns of prompt and output tokens of a `lengths` file; None takes the usual ones.

    Raises
    ------
    ConfigError : the file cannot be read, has an unknown header, a bad value, or times that are negative or
        not ascending; the message names the line.
    """
    trace = _parsed(path, read_text(path), columns)
    if kind is not None and trace.kind != kind:
        raise ConfigError(f"{path}: the header is that of a {trace.kind} file, but {kind} was asked for")
    return trace


@lru_cache(maxsize=4)  # runs with seeds of their own draw from one file
def _parsed(path: Path, text: str, columns: tuple[str, str] | None) -> Trace:
    if not text.strip():
        raise ConfigError(f"{path}: the file is empty")
    if text.lstrip().startswith("["):
        raise ConfigError(
            f"{path} is a JSON list, which no trace is; give one of conversations by --dataset-name sharegpt "
            "and --dataset-path"
        )
    records: Iterator[tuple[int, Mapping[str, Any]]] = (
        json_lines(dict[str, Any], path, text)
        if text.lstrip().startswith("{")
        else csv_rows(path, text, rows="requests")
    )
    line, first = next(records)
    found = _find_format(path, first) if columns is None else _own_columns(path, first, columns)
    lines, rows = [line], [_parse_row(path, line, first, found)]
    for line, record in records:
        lines.append(line)
        rows.append(_parse_row(path, line, record, found))
    times, prompts, outputs, blocks = zip(*rows, strict=True)
    return Trace(
        kind=found.kind,
        num_prompt_tokens=np.array(prompts, dtype=np.int64),
        num_output_tokens=np.array(outputs, dtype=np.int64),
        times=None if times[0] is None else _checked_times(path, lines, times),
        block_ids=None if blocks[0] is None else tuple(blocks),
        lines=np.array(lines, dtype=np.int64),
    )


def _checked_times(path: Path, lines: list[int], values: tuple[float | None, ...]) -> NDArray[np.float64]:
    times = np.array(values, dtype=np.float64)
    bad = np.flatnonzero(~(np.isfinite(times) & (times >= 0)))
    if bad.size:
        row = int(bad[0])
        raise ConfigError(
            f"{path}, line {lines[row]}: the time is {times[row]:g} s; times must be finite and not negative"
        )
    falling = np.flatnonzero(np.diff(times) < 0)
    if falling.size:
        row = int(falling[0]) + 1
        raise ConfigError(
            f"{path}, line {lines[row]}: the time is {times[row - 1] - times[row]:g} s before that of line "
            f"{lines[row - 1]}; sort the file by time"
        )
    return times


def _find_format(path: Path, first: Mapping[str, Any]) -> _Format:
    found = next((known for known in FORMATS if known.columns <= first.keys()), None)
    if found is None:
        known = "; ".join(f"{f.kind}: {', '.join(sorted(f.columns))}" for f in FORMATS)
        raise ConfigError(f"{path}, line 1: unknown columns {', '.join(map(str, first))}. Known are {known}")
    return found


def _own_columns(path: Path, first: Mapping[str, Any], columns: tuple[str, str]) -> _Format:
    for column in columns:
        if column not in first:
            raise ConfigError(
                f"{path}, line 1: there is no column {column!r}; there are {', '.join(map(str, first))}"
            )
    return _Format("lengths", *columns)


def _parse_row(path: Path, line: int, record: Mapping[str, Any], found: _Format) -> Row:
    try:
        row = found.parse(record)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{path}, line {line}: bad value ({error}) in {dict(record)}; repair the line or remove it"
        ) from error
    for length in row[1:3]:
        if not 0 <= length <= MOST_TOKENS:
            what = "a negative length" if length < 0 else f"a length above {MOST_TOKENS:,} tokens"
            raise ConfigError(f"{path}, line {line}: {what} in {dict(record)}; repair the line or remove it")
    return row


_TIMESTAMP = re.compile(r"([^.]*?)(?:\.(\d+))?([Zz]|[+-]\d\d:?(?:\d\d)?)?")


def _parse_timestamp(text: str) -> float:
    """Return seconds since 1970; a time without an offset is UTC.

    The fraction is added here: it may have more digits than Python's parser keeps.
    """
    found = _TIMESTAMP.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no time")
    whole, digits, offset = found.groups()
    moment = datetime.fromisoformat(whole + (offset or "").upper())
    seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return seconds + (int(digits) / 10 ** len(digits) if digits else 0.0)


_MOONCAKE = _Format(
    "mooncake", "input_length", "output_length", "timestamp", lambda ms: float(ms) / 1e3, "hash_ids"
)
FORMATS: tuple[_Format, ...] = (
    _Format("azure", "ContextTokens", "GeneratedTokens", "TIMESTAMP", _parse_timestamp),
    replace(_MOONCAKE, time="timestamp_ms"),
    _MOONCAKE,
    _Format("burstgpt", "Request tokens", "Response tokens", "Timestamp"),
    _Format("vidur", "num_prefill_tokens", "num_decode_tokens", "arrived_at"),
    _Format("lengths", "num_prefill_tokens", "num_decode_tokens"),
)
