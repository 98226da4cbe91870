"""What a server does for a request beside its steps: first tokens that clients saw, less what steps take."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any

from onbeat.core.errors import ConfigError, counted
from onbeat.core.step import BatchShape
from onbeat.files import read
from onbeat.perfmodel.predictor import Predictor

FEWEST = 5
_COLUMNS = ("start_times", "end_times", "ttfts", "input_lens")
_MADE_BY = "`onbeat bench serve --max-concurrency 1 --save-detailed --json FILE` makes one"


def request_seconds(path: Path, model: Predictor) -> float:
    """Return the median, over requests that were served alone, of TTFT less the predicted step of its prompt.

    Prompts longer than any step that the model was fitted to are left out: they came in pieces.

    Parameters
    ----------
    path : a result of `onbeat bench serve` with its requests.
    model : of the server's steps.

    Raises
    ------
    ConfigError : the file cannot be read, has no requests, or too few that were alone.
    """
    columns = [_column(read(dict[str, Any], path, "the requests"), name, path) for name in _COLUMNS]
    rows = sorted(row for row in zip(*columns, strict=True) if None not in row)
    longest = math.inf if model.shape_range is None else model.shape_range.num_new_tokens
    found: list[float] = []
    busy_until = -math.inf
    for index, (start, end, ttft, num_tokens) in enumerate(rows):
        is_alone = start >= busy_until and (index + 1 == len(rows) or rows[index + 1][0] >= end)
        busy_until = max(busy_until, end)
        if is_alone and 1 < num_tokens <= longest:
            shape = BatchShape()
            shape.add(0, int(num_tokens), samples=True)
            found.append(ttft - model.step_time(shape))
    if len(found) < FEWEST:
        raise ConfigError(
            f"{path} has {counted(len(found), 'request')} served alone, with prompts of up to {longest:,} "
            f"tokens; at least {FEWEST} are needed: {_MADE_BY}"
        )
    return max(0.0, median(found))


def _column(values: dict[str, Any], name: str, path: Path) -> list[float | None]:
    column = values.get(name)
    is_numbers = isinstance(column, list) and all(
        each is None or (isinstance(each, int | float) and math.isfinite(each)) for each in column
    )
    if not is_numbers or len(column) != len(values.get(_COLUMNS[0]) or ()):  # type: ignore[arg-type]
        raise ConfigError(f"{path} has no list of numbers {name!r} for its requests; {_MADE_BY}")
    return column  # type: ignore[return-value]
