"""Sentences of pages: at most 35 words, 20 in the mean, none that begins with "Of "; short table cells."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.many_cases import each_case

ROOT = Path(__file__).parents[2]
MOST_WORDS, MOST_MEAN, MOST_IN_CELL = 35, 20, 100
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page's prose; code is one word, links are their text."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\$[^$\n]+\$", "X", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        if block.startswith("    ") or block.lstrip().startswith(("|", "#", "!")):  # code, tables, headings
            continue
        words = re.sub(r"^\s*(?:[-*]|\d+\.)\s+", "", block)
        words = re.sub(r"`[^`]*`", "X", re.sub(r"\]\([^)]*\)", "]", words)).replace("\n", " ")
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z\[*(])", words):
            if len(sentence.split()) > 1:
                yield sentence


@each_case("path", PAGES)
def test_sentences_are_short(path: Path) -> None:
    found = list(sentences(path.read_text()))
    lengths = [len(each.split()) for each in found]
    assert not [each for each, length in zip(found, lengths, strict=True) if length > MOST_WORDS]
    assert not [each for each in found if each.startswith("Of ")]
    assert not found or sum(lengths) / len(lengths) <= MOST_MEAN


@each_case("path", PAGES)
def test_cells_are_short(path: Path) -> None:
    """Lists of names may be longer: they are code."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [
        re.sub(r"\]\([^)]*\)", "]", cell).strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)
    ]
    prose = [cell for cell in cells if re.search(r"[a-z]", re.sub(r"`[^`]*`", "", cell))]
    assert not [cell for cell in prose if len(cell) > MOST_IN_CELL]


def test_the_rule_finds_what_it_forbids() -> None:
    text = (
        "Of keys only a hash goes on. "
        + "Word "
        + "word " * 35
        + "ends.\n\n```\nOf code nothing counts.\n```\n"
    )
    first, second = sentences(text)
    assert first.startswith("Of ")
    assert len(second.split()) == 37
