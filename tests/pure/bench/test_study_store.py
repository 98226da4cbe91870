"""The store of a study's results: what is there is not run again, whoever wrote it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.store import ANY_VERSION, STUDY_VERSION, Results


@dataclass(frozen=True)
class Cell:
    set_up: str


@dataclass(frozen=True)
class Sweep:
    """A run of a study; where it starts changes nothing of what it finds."""

    cell: Cell
    seed: int
    start: float = 1.0

    def run(self) -> dict[str, Any]:
        return {"capacity": 2.0 * self.seed}


FIRST, SECOND = Sweep(Cell("a"), 1), Sweep(Cell("a"), 2)
LINE = {
    "kind": "Sweep",
    "names": {"cell": {"set_up": "a"}, "seed": 1},
    "found": {"capacity": 2.0},
    "tag": "t",
    "seconds": 3.46,
    "version": STUDY_VERSION,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines.jsonl"


def test_a_line_is_as_earlier_slices_wrote_it(path: Path) -> None:
    """Other clones append to the same file."""
    Results(path, "t").append(FIRST, {"capacity": 2.0}, 3.456)
    assert path.read_text() == json.dumps(LINE, separators=(",", ":")) + "\n"


def test_a_later_slice_does_what_is_missing(path: Path) -> None:
    Results(path, "t").append(FIRST, {"capacity": 2.0}, 1.0)
    later = Results(path, "t")
    assert later.missing([FIRST, SECOND]) == [SECOND]
    assert later.missing([Sweep(Cell("a"), 1, start=9.0)]) == []
    assert later.seconds == 1.0


def test_lines_of_other_versions_are_passed_over(path: Path) -> None:
    results = Results(path, "new")
    results.append(FIRST, {"capacity": 2.0}, 1.0, tag="old")
    results.append(SECOND, {"capacity": 4.0}, 1.0, tag=ANY_VERSION)
    with path.open("a") as file:
        file.write(json.dumps(LINE | {"tag": "new", "version": STUDY_VERSION + 1}) + "\n")
    assert Results(path, "new").missing([FIRST, SECOND]) == [FIRST]
    assert len(Results(path, "old").lines()) == 2


def test_a_line_that_is_half_written_is_read_when_it_is_whole(path: Path) -> None:
    whole = json.dumps(LINE) + "\n"
    path.write_text(whole[:40])
    results = Results(path, "t")
    assert results.get(FIRST) is None
    path.write_text(whole)
    results.refresh()
    assert results.get(FIRST) == {"capacity": 2.0}


def test_the_last_of_equal_lines_counts(path: Path) -> None:
    results = Results(path, "t")
    results.append(FIRST, {"capacity": 1.0}, 1.0)
    results.append(FIRST, {"capacity": 2.0}, 1.0)
    results.append(FIRST, {"capacity": 3.0}, 1.0, tag="other")
    assert Results(path, "t").get(FIRST) == {"capacity": 2.0}
