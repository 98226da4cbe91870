"""Read per-operator profiles in the CSV format of Vidur (Agrawal et al., MLSys 2024), gzip or plain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onbeat.core.errors import ConfigError
from onbeat.files import read_csv

_SECONDS_PER_MS = 1e-3


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a profile."""

    path: Path
    line: int
    cells: Mapping[str, str]

    def number(self, column: str) -> float:
        """Return a finite number of at least 0.

        Raises
        ------
        ConfigError : names the file, line, column and value.
        """
        text = self.cells[column]
        try:
            value = float(text)
        except (TypeError, ValueError):
            value = math.nan
        if not 0 <= value < math.inf:
            raise self._error(column, "a finite number of at least 0")
        return value

    def seconds(self, operator: str) -> float:
        """Return the median time of an operator, above 0.

        Raises
        ------
        ConfigError : names the file, line, column and value.
        """
        column = time_column(operator)
        value = self.number(column)
        if value == 0:
            raise self._error(column, "a time above 0 ms")
        return value * _SECONDS_PER_MS

    def is_true(self, column: str) -> bool:
        """Return a truth value.

        Raises
        ------
        ConfigError : neither True nor False.
        """
        text = self.cells[column]
        if text not in ("True", "False"):
            raise self._error(column, "True or False")
        return text == "True"

    def _error(self, column: str, wanted: str) -> ConfigError:
        return ConfigError(
            f"{self.path}, line {self.line}: {column} is {self.cells[column]!r}; it must be {wanted}. "
            "Correct the line or leave it out"
        )


def time_column(operator: str) -> str:
    """Return the column with an operator's median time, ms."""
    return f"time_stats.{operator}.median"


def read_rows(path: Path, columns: Sequence[str]) -> list[Row]:
    """Read a profile.

    Parameters
    ----------
    path : CSV with a header; the order of the columns does not matter and further ones are passed over.
    columns : those that must be there.

    Raises
    ------
    ConfigError : no such file, not a CSV, a missing column, a line of another width, or no lines.
    """
    found = read_csv(
        path,
        "the operator profile",
        columns=columns,
        rows="measurements",
        hint="Give a profile in Vidur's format",
    )
    return [Row(path, line, cells) for line, cells in found]


def select(rows: Sequence[Row], **wanted: int) -> list[Row]:
    """Return the rows with these values in these columns.

    Raises
    ------
    ConfigError : there are none; names what the file has.
    """
    for column, value in wanted.items():
        found = [row for row in rows if row.number(column) == value]
        if not found:
            known = sorted({row.number(column) for row in rows})
            raise ConfigError(
                f"{rows[0].path} has no measurements with {column} {value}; it has "
                f"{', '.join(f'{number:g}' for number in known)}. "
                "Give the profile of this model and parallelism"
            )
        rows = found
    return list(rows)
