"""One result, as a terminal, a page and a file show it."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from onbeat import __version__
from onbeat.core.errors import ConfigError
from onbeat.report.plot import figure, trace
from onbeat.report.result import (
    INTERRUPTED,
    SCHEMA,
    Beside,
    Column,
    Fact,
    Facts,
    Lines,
    Part,
    Plots,
    Result,
    Section,
    Table,
    save,
    show,
    write_page,
)
from onbeat.report.units import exact_percent

FACTS = Facts(
    "Numbers",
    [
        Fact("num_steps", 1234, "steps"),
        Fact("share", 0.5, "busy", exact_percent),
        Fact("unknown", None, "not known"),
        Fact("of_files", "here"),
    ],
)
NESTED = Facts("Drafts", [Fact("accepted", 3, "accepted")], key="speculation")
ROWS: list[dict[str, Any]] = [
    {"name": "[a] <b>", "p99_ms": 12.345, "more": 1},
    {"name": "c", "p99_ms": None, "more": 2},
]
TABLE = Table("Cases", [Column("name", "case", str), Column("p99_ms", "P99")], ROWS, key="cases")
DRAWN = figure("Over time", [trace("line", [1, 2], [3, 4])], "seconds", "ms")


def result_of(*parts: Part, **fields: object) -> Result:
    values = {"kind": "bench", "title": "A <title>", "sections": [Section("Found", parts)], **fields}
    return Result(**values)  # type: ignore[arg-type]


def shown(result: Result) -> str:
    console = Console(width=100, file=io.StringIO(), record=True)
    show(result, console)
    return console.export_text()


def page_of(result: Result, tmp_path: Path) -> str:
    write_page(result, tmp_path / "page.html")
    return (tmp_path / "page.html").read_text()


def test_a_file_has_facts_under_their_keys_and_rows_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    save(result_of(Beside([FACTS, NESTED]), TABLE, values={"seed": 1}), path)
    assert orjson.loads(path.read_bytes()) == {
        "schema": SCHEMA,
        "kind": "bench",
        "onbeat_version": __version__,
        "interrupted": False,
        "seed": 1,
        "num_steps": 1234,
        "share": 0.5,
        "unknown": None,
        "of_files": "here",
        "speculation": {"accepted": 3},
        "cases": ROWS,
    }


def test_a_terminal_shows_values_in_their_way_and_no_markup() -> None:
    text = shown(result_of(Beside([FACTS, NESTED]), TABLE, Plots([DRAWN]), Lines(["[line]"])))
    assert re.search(r"steps +1,234", text)
    assert re.search(r"busy +50\.0%", text)
    assert "not known" not in text
    assert "here" not in text
    assert re.search(r"\[a\] <b> +12\.3", text)
    assert re.search(r"c +-", text)
    assert "[line]" in text
    assert "Over time" not in text


def test_a_page_has_the_same_and_its_figures(tmp_path: Path) -> None:
    text = page_of(result_of(Beside([FACTS, NESTED]), TABLE, Plots([DRAWN, None])), tmp_path)
    for cell in ("steps", "1,234", "50.0%", "[a] &lt;b&gt;", "12.3"):
        assert f">{cell}</td>" in text
    assert "not known" not in text
    assert text.count("data-figure=") == 1
    assert "A &lt;title&gt;" in text


def test_the_answer_begins_a_page_and_ends_a_terminal(tmp_path: Path) -> None:
    result = result_of(FACTS, answer=["All is well."], warnings=["too short"], is_interrupted=True)
    lines = shown(result).rstrip().splitlines()
    assert lines[-3:] == ["note: too short", INTERRUPTED, "All is well."]
    page = page_of(result, tmp_path)
    assert page.index("All is well.") < page.index(INTERRUPTED) < page.index("1,234")
    assert result.document()["interrupted"] is True


@pytest.mark.parametrize(
    ("where", "is_shown"), [("everywhere", (1, 1)), ("page", (0, 1)), ("terminal", (1, 0))]
)
def test_a_section_may_be_for_one_of_them(where: str, is_shown: tuple[int, int], tmp_path: Path) -> None:
    section = Section("Own", [Lines(["sentence"])], where)  # type: ignore[arg-type]
    result = result_of(sections=[section])
    assert (shown(result).count("sentence"), page_of(result, tmp_path).count("sentence")) == is_shown


def test_what_is_empty_is_not_there(tmp_path: Path) -> None:
    empty = result_of(Facts("Nothing", []), Table("None", [Column("a", "a")], []), Plots([None]))
    assert shown(empty) == ""
    assert "Found" not in page_of(empty, tmp_path)


@dataclass
class Bracket:
    low: float
    high: float


def test_a_file_takes_plain_objects_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for low in (1.0, 2.0):
        save(result_of(values={"bracket": Bracket(low, float("inf"))}), path, append=True)
    brackets = [orjson.loads(line)["bracket"] for line in path.read_bytes().splitlines()]
    assert brackets == [{"low": 1.0, "high": None}, {"low": 2.0, "high": None}]
    with pytest.raises(ConfigError, match="cannot write"):
        save(result_of(), tmp_path)
