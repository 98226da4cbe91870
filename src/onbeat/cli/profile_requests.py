"""What a server does for a request beside its steps: first tokens that clients saw, less what steps take."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median

import msgspec

from onbeat.core.errors import ConfigError, counted
from onbeat.core.step import BatchShape
from onbeat.files import read
from onbeat.perfmodel.predictor import Predictor
from onbeat.typed import Number

FEWEST = 5
_MADE_BY = "`onbeat bench serve --max-concurrency 1 --save-detailed --json FILE` makes one"


class _Requests(msgspec.Struct):
    start_times: tuple[Number | None, ...]
    end_times: tuple[Number | None, ...]
    ttfts: tuple[Number | None, ...]
    input_lens: tuple[Number | None, ...]


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
    saved = read(_Requests, path, "the requests", hint=f"; {_MADE_BY}")
    columns = (saved.start_times, saved.end_times, saved.ttfts, saved.input_lens)
    if len(set(map(len, columns))) > 1:
        raise ConfigError(f"{path} has columns of different lengths for its requests; {_MADE_BY}")
    rows = sorted(
        (start, end, ttft, num_tokens)
        for start, end, ttft, num_tokens in zip(*columns, strict=True)
        if start is not None and end is not None and ttft is not None and num_tokens is not None
    )
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
