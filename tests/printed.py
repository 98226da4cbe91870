"""The commands that documents print."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").rglob("*.md"))]


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a text's blocks of shell; one may take several lines."""
    for block in re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        open_lines = ""
        for line in block.replace("\\\n", " ").splitlines(keepends=True):
            open_lines += line
            try:
                words = shlex.split(open_lines, comments=True)
            except ValueError:  # a quotation goes on
                continue
            if words:
                yield open_lines.strip()
            open_lines = ""
        assert not open_lines.strip(), f"a quotation is left open: {open_lines}"


def first_commands(text: str) -> list[str]:
    """Return the commands of a document's first section that has some."""
    sections = re.split(r"^(?=##+ )", text, flags=re.MULTILINE)
    return next(filter(None, (list(commands(section)) for section in sections)), [])


def prepare(directory: Path) -> None:
    """Put into a directory what the commands name: what a checkout has, and files that the documents show."""
    (directory / "examples").symlink_to(ROOT / "examples")
    (directory / "corpus.jsonl").write_text(_block("docs/embeddings.md", "json"))
    (directory / "fleet.yaml").write_text(_block("docs/fleet.md", "yaml"))


def _block(name: str, kind: str) -> str:
    found = re.search(rf"^```{kind}\n(.*?)^```", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE)
    assert found, f"{name} shows no {kind}"
    return found[1]
