"""What a command found, described once: a terminal, a page and a file show it each in their way."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from onbeat.core.options import option
from onbeat.files import write
from onbeat.report.plot import Figure
from onbeat.report.units import NOTHING, number
from onbeat.version import __version__

SCHEMA = 2
"""Of the files of results; version 1 had `schema_version`, and no `kind`."""
INTERRUPTED = "interrupted: this is a partial result"
Show = Callable[[Any], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultOptions:
    """Where a result goes, and what is shown on the way."""

    json: Path | None = option(None, metavar="FILE", group="output", help="save the result")
    report: Path | None = option(
        None, metavar="FILE.html", group="output", help="write one self-contained page with plots"
    )
    disable_tqdm: bool = option(default=False, is_switch=True, group="output", help="show no progress")


class Fact(NamedTuple):
    """One number or word."""

    key: str
    """In a file, with the unit at its end: `median_ttft_ms`."""
    value: Any
    title: str = ""
    """Of its row; empty where files alone have it."""
    show: Show = number


class Column(NamedTuple):
    """One column of a table; one that is shown by `str` holds text."""

    key: str
    title: str
    show: Show = number


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts below each other; those without a value are not shown."""

    title: str
    facts: Sequence[Fact]
    key: str = ""
    """Under which a file has them; empty for its top."""

    @property
    def values(self) -> dict[str, Any]:
        """As a file has them."""
        return {fact.key: fact.value for fact in self.facts}

    @property
    def rows(self) -> list[tuple[str, str]]:
        """As they are shown: (title, value)."""
        return [
            (each.title, each.show(each.value))
            for each in self.facts
            if each.title and each.value is not None
        ]


@dataclass(frozen=True, slots=True)
class Table:
    """Columns over what a file has of each row."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    key: str = ""
    """Under which a file has the rows; empty where it has them elsewhere."""
    caption: str = ""
    colours: Mapping[str, str] = field(default_factory=dict)
    """Of cells on a terminal, by what they say."""

    @property
    def cells(self) -> list[list[str]]:
        """As they are shown."""
        return [[_cell(row.get(key), show) for key, _, show in self.columns] for row in self.rows]


def _cell(value: Any, show: Show) -> str:
    if value is None:
        return "" if show is str else NOTHING
    return show(value)


@dataclass(frozen=True, slots=True)
class Plots:
    """Figures side by side, on a page alone."""

    figures: Sequence[Figure | None]
    per_row: Literal[1, 2, 3] = 3


@dataclass(frozen=True, slots=True)
class Lines:
    """Sentences."""

    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Beside:
    """Parts in two columns of a page."""

    parts: Sequence[Part]


Part = Facts | Table | Plots | Lines | Beside


@dataclass(frozen=True, slots=True)
class Section:
    """Parts under a title."""

    title: str
    parts: Sequence[Part]
    where: Literal["everywhere", "page", "terminal"] = "everywhere"
    is_folded: bool = False
    """Whether a click opens it on a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Everything that a command found, in the order in which it is read."""

    kind: str
    """Which command: `simulation`, `bench`, `capacity`, `plan`, `replay` or `profile`."""
    title: str
    lead: str = ""
    """What was done, in a line."""
    answer: Sequence[str] = ()
    """The result in a sentence or two: a page begins with them, a terminal ends with them."""
    follows: Sequence[tuple[str, str]] = ()
    """What follows from it, as (question, text)."""
    tiles: Sequence[tuple[str, str]] = ()
    """Numbers that stand out on a page, as (name, value)."""
    sections: Sequence[Section] = ()
    warnings: Sequence[str] = ()
    """What makes it less than it looks."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What it was made with, for the end of a page."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What a file has beside the facts and tables."""
    is_interrupted: bool = False

    def document(self) -> dict[str, Any]:
        """Return what a file has."""
        about = {"schema": SCHEMA, "kind": self.kind, "onbeat_version": __version__}
        found = about | {"interrupted": self.is_interrupted, **self.values}
        for part in self._parts():
            if isinstance(part, Facts) and part.facts:
                found |= {part.key: part.values} if part.key else part.values
            elif isinstance(part, Table) and part.key:
                found[part.key] = list(part.rows)
        return found

    def _parts(self) -> Iterator[Part]:
        for section in self.sections:
            for part in section.parts:
                yield from part.parts if isinstance(part, Beside) else [part]


def save(result: Result, path: Path, *, append: bool = False) -> None:
    """Write the file of a result; see `write_document`."""
    write_document(path, result.document(), append=append)


def write_document(path: Path, document: Mapping[str, Any], *, append: bool = False) -> None:
    """Write a file of JSON.

    Parameters
    ----------
    append : add a line to the file instead of replacing it (one JSON document a line).

    Raises
    ------
    ConfigError : the file cannot be written.
    """
    option = orjson.OPT_SERIALIZE_NUMPY | (0 if append else orjson.OPT_INDENT_2)
    write(path, orjson.dumps(document, option=option) + b"\n", append=append)


def show(result: Result, console: Console) -> None:
    """Print tables and sentences, and the answer at the end."""
    for section in result.sections:
        if section.where != "page":
            show_parts(section.parts, console, title=section.title)
    say(console, [f"note: {warning}" for warning in result.warnings])
    if result.is_interrupted:
        console.print(INTERRUPTED, style="bold yellow")
    say(console, result.answer)


def show_parts(parts: Iterable[Part], console: Console, *, title: str = "") -> None:
    """Print parts.

    Parameters
    ----------
    title : of tables that have none.
    """
    for part in parts:
        match part:
            case Beside(parts=own):
                show_parts(own, console, title=title)
            case Lines(lines=lines):
                say(console, lines)
            case Facts(rows=rows) if rows:
                _head(part.title or title, console)
                columns = (Column("", "", str), Column("", ""))
                console.print(filled_table(columns, rows, show_header=False))
            case Table(rows=rows) if rows:
                _head(part.title or title, console)
                console.print(filled_table(part.columns, part.cells, part.colours))
                say(console, [part.caption] if part.caption else [])


def _head(title: str, console: Console) -> None:
    """Print the title of a table: over it, as it may be longer."""
    if title:
        console.print(title, style="table.title", markup=False, highlight=False, soft_wrap=True)


def say(console: Console, lines: Iterable[str]) -> None:
    """Print sentences as they are."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def filled_table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[str]],
    colours: Mapping[str, str] | None = None,
    **look: Any,
) -> RichTable:
    """Return a table for a terminal: text starts at the left, and numbers end at the right."""
    table, styles = RichTable(box=SIMPLE_HEAD, **look), colours or {}
    for column in columns:
        table.add_column(column.title, justify="left" if column.show is str else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, styles.get(cell, "")) for cell in row))  # names are not markup
    return table


PLOTLY = "plotly-basic-4.1.1.min.js.gz"
"""The library of the charts, its makers' bundle with bars and lines alone (MIT; the licence is beside it)."""
_LONG_TEXT = 30
"""Characters; shorter texts stay on one line."""
_WIDTHS = {1: "stack", 2: "grid wide", 3: "grid"}


def write_page(result: Result, path: Path) -> None:
    """Write the page of a result.

    Raises
    ------
    ConfigError : the file cannot be written.
    """
    from jinja2 import Environment, StrictUndefined  # which a command without --report need not load

    assets, placed = files("onbeat.report") / "assets", list[Figure]()

    def place(figure: Figure) -> int:
        placed.append(figure)
        return len(placed) - 1

    def figures() -> str:
        return _packed(gzip.compress(orjson.dumps(placed, option=orjson.OPT_SERIALIZE_NUMPY), mtime=0))

    environment = Environment(autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    page = environment.from_string((assets / "report.html").read_text()).render(
        result=result,
        settings=[(name, _shown(value)) for name, value in result.settings.items()],
        interrupted=INTERRUPTED,
        kind_of=lambda part: type(part).__name__,
        place=place,
        figures=figures,
        plotly=_packed((assets / PLOTLY).read_bytes()),
        style=(assets / "report.css").read_text(),
        script=(assets / "report.js").read_text(),
        text_kind=str,
        long_text=_LONG_TEXT,
        widths=_WIDTHS,
    )
    write(path, f"{page}\n")


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _packed(packed: bytes) -> str:
    return base64.b64encode(packed).decode()
