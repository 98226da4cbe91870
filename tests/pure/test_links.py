"""Relative links of documents lead to a file, their anchors to a heading; the index has every document."""

from __future__ import annotations

import re
from pathlib import Path

from tests.many_cases import each_case

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@each_case("document", DOCUMENTS)
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for link in LINK.findall(without_code(document.read_text())):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_the_index_names_each_document_once_a_reader() -> None:
    index = (ROOT / "docs/README.md").read_text()
    listed = {
        part.splitlines()[0]: re.findall(r"^- \[[^]]*\]\(([^)]*)\)", part, re.MULTILINE)
        for part in index.split("\n## ")[1:]
    }
    assert all(len(names) == len(set(names)) for names in listed.values())
    documents = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert documents - {"README.md"} <= {name for names in listed.values() for name in names}
