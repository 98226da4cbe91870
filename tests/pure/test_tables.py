"""A cell of a table in the documents is a value or a phrase; what needs more room stands under the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LONGEST = 100
"""Characters that a reader sees: where a link leads does not count."""
NAMES = re.compile(r"(`[^`]*`|[,+*.\s]|and)*")
"""Names of fields, which nobody can shorten."""


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_cells_are_short(path: Path) -> None:
    rows = [line for line in path.read_text().splitlines() if line.startswith("|")]
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    shown = [re.sub(r"\]\([^)]*\)", "]", cell) for cell in cells if not NAMES.fullmatch(cell)]
    assert not [cell for cell in shown if len(cell) > LONGEST]
