"""Read a table of measured steps, of whatever engine: a CSV file, gzip or plain, one row a step.

A step is `batch` requests with `new_tokens` new tokens each, after `context` tokens that are cached already;
one new token is a decode, more are a chunk of a prompt. Beside them `decodes` rows may decode, after
`decode_context` cached tokens each. `seconds` is what the step took.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.files import read_csv
from onbeat.perfmodel.logged_step import LoggedStep, StepOrigin, StepStream

COLUMNS = ("batch", "new_tokens", "context", "seconds")
MIXED_COLUMNS = ("decodes", "decode_context")
"""May be left out, both together."""
_HINT = f"A table of steps has {', '.join(COLUMNS)}, and may have {' and '.join(MIXED_COLUMNS)}"
MOST_ROWS, MOST_TOKENS = 2**16, 2**24
"""Of a step, and of a row: more than any engine takes."""
SUFFIXES = (".csv", ".csv.gz")


def read_step_table(path: Path) -> StepStream:
    """Read a table of measured steps.

    Parameters
    ----------
    path : CSV with a header; the order of the columns does not matter and further ones are passed over.

    Raises
    ------
    ConfigError : no such file, not a CSV, a missing column, a line of another width, no lines, or a value
        that is no count or no time; names the file, line, column and value.
    """
    steps = []
    for line, cells in read_csv(
        path, "the table of steps", columns=COLUMNS, together=MIXED_COLUMNS, rows="steps", hint=_HINT
    ):
        row = _Row(f"{path}, line {line}", cells)
        steps.append(LoggedStep(row.shape(), row.seconds()))
    return StepStream(StepOrigin(), steps)


@dataclass(frozen=True, slots=True)
class _Row:
    where: str
    cells: Mapping[str, str]

    def shape(self) -> BatchShape:
        batch, decodes = self._count("batch"), self._count("decodes")
        new_tokens = self._count("new_tokens", at_least=1 if batch else 0)
        if not batch + decodes:
            raise ConfigError(f"{self.where}: the step has no rows: batch is 0. Leave empty steps out")
        shape = BatchShape()
        for _ in range(batch):
            shape.add(self._count("context"), new_tokens, samples=True)
        for _ in range(decodes):
            shape.add(self._count("decode_context"), 1, samples=True)
        return shape

    def seconds(self) -> float:
        try:
            value = float(self.cells["seconds"])
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise self._error("seconds", "a finite time above 0")
        return value

    def _count(self, column: str, *, at_least: int = 0) -> int:
        if column not in self.cells:
            return 0
        try:
            value = float(self.cells[column])
        except ValueError:
            value = math.nan
        most = MOST_ROWS if column in ("batch", "decodes") else MOST_TOKENS
        if not (at_least <= value <= most and value == int(value)):
            raise self._error(column, f"a whole number of at least {at_least} and at most {most}")
        return int(value)

    def _error(self, column: str, wanted: str) -> ConfigError:
        return ConfigError(
            f"{self.where}: {column} is {self.cells[column]!r}; it must be {wanted}. Correct the line or "
            "leave it out"
        )
