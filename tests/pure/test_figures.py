"""Figures in README and docs are those of the results that stand beside them.

A paragraph, list item or table row that links to files under benchmarks/results quotes them, and so does a
table without links below a paragraph with some: each of its numbers must stand in one of them, rounded as the
text rounds it. A share may be quoted in per cent, a time in milliseconds or seconds. Names (A100,
Llama-3.1-8B), code and link targets are no figures. In the README every ratio and percentage has such a page
beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.many_cases import each_case

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]*benchmarks/results/[^)#\s]+\.md)[^)]*\)")
NOT_TEXT = re.compile(r"`[^`]*`|\]\([^)]*\)|<[^>]*>")
NUMBER = re.compile(r"(?<![\w.\-/])\d+(?:,\d{3})*(?:\.\d+)?(?![\w/]|-\w|\.\d)")


def passages(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield paragraphs, list items, rows and tables without links, each with the pages that it quotes."""
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    above: list[str] = []
    for block in re.split(r"\n\s*\n", without_code):
        own = LINK.findall(block)
        if block.startswith("|"):
            rows = block.splitlines() if own else [block]
            yield from ((row, LINK.findall(row) or above) for row in rows)
        else:
            yield from ((item, LINK.findall(item)) for item in re.split(r"\n(?=\s*(?:[-*]|\d+\.) )", block))
        above = own


def figures(text: str) -> list[str]:
    """Return the numbers of a text as they are written."""
    return NUMBER.findall(NOT_TEXT.sub(" ", text))


def numbers_of(path: Path) -> list[float]:
    """Return all numbers of a page of results."""
    return [
        float(each.replace(",", "")) for each in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", path.read_text())
    ]


def is_quoted(figure: str, found: list[float]) -> bool:
    """Return whether a figure is one of some numbers, as it is rounded."""
    value = float(figure.replace(",", ""))
    digits = len(figure.partition(".")[2])
    half = 0.5 * 10**-digits + 1e-9
    return any(abs(each * scale - value) <= half for each in found for scale in (1, 100, 1000, 0.001))


QUOTES = [
    (page, passage, targets) for page in PAGES for passage, targets in passages(page.read_text()) if targets
]


@each_case(("page", "passage", "targets"), QUOTES)
def test_figures_stand_in_the_results_beside_them(page: Path, passage: str, targets: list[str]) -> None:
    sources = [(page.parent / target).resolve() for target in targets]
    found = [number for source in sources for number in numbers_of(source)]
    missing = [each for each in figures(passage) if not is_quoted(each, found)]
    assert not missing, f"{', '.join(missing)}: not in {', '.join(each.name for each in sources)}"


def test_the_readme_claims_nothing_without_results() -> None:
    for passage, targets in passages((ROOT / "README.md").read_text()):
        if not targets:
            claims = re.findall(r"\d[\d.]*(?: times|x| %)", NOT_TEXT.sub(" ", passage))
            assert not claims, f"{claims} without a page of results: {passage}"


def test_figures_are_told_from_names() -> None:
    text = (
        "On an A100 Llama-3.1-8B makes 1.73 times, 1,024 tokens, 97 % [page](2026-11-22.md), `--x 5`, v0.32."
    )
    assert figures(text) == ["1.73", "1,024", "97"]
    assert is_quoted("97", [0.9712])
    assert is_quoted("1.7", [1.73])
    assert not is_quoted("1.8", [1.73])
