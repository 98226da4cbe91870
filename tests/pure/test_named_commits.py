"""Commits that documents name are in the repository, with the files that are to be had from them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
SHOWN = re.compile(r"git show ([^\s:`]+):([^\s`]+)")
NAMED = re.compile(r"\bcommit `?([0-9a-f]{7,40})\b|`([0-9a-f]{7,40})`")


def named(text: str) -> Iterator[str]:
    """Yield what a text names: commits, and files of commits.

    A path with FOLDER and NAME stands for the `folder.name` that follow it.
    """
    for first, second in NAMED.findall(text):
        if re.search("[a-f]", first + second):  # else it is a number
            yield (first or second) + "^{commit}"
    parts = SHOWN.split(text)
    for revision, path, behind in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        yield revision + "^{commit}"
        if "FOLDER" in path:
            for folder, name in re.findall(r"`(\w+)\.(\w+)`", behind):
                yield f"{revision}:{path.replace('FOLDER', folder).replace('NAME', name)}"
        elif "NAME" not in path:
            yield f"{revision}:{path}"


def test_named_commits_are_there() -> None:
    asked = ["git", "rev-parse", "--is-shallow-repository"]
    found = subprocess.run(asked, cwd=ROOT, check=False, capture_output=True, text=True)
    if found.stdout.strip() != "false":
        pytest.skip("no git repository with its history here")
    names = {name: path.name for path in DOCUMENTS for name in named(path.read_text())}
    assert len(names) > 20
    checked = subprocess.run(
        ["git", "cat-file", "--batch-check"],
        input="\n".join(names),
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    missing = [name for name, line in zip(names, checked, strict=True) if line.endswith(" missing")]
    assert not missing, [f"{names[each]}: {each}" for each in missing]


def test_names_are_found() -> None:
    shown = "`git show 062d26c:benchmarks/FOLDER/NAME.py` has `papers.one` and\n`slo.two`"
    text = f"{shown}; commit e26ecb5; `10485760`"
    assert list(named(text)) == [
        "e26ecb5^{commit}",
        "062d26c^{commit}",
        "062d26c:benchmarks/papers/one.py",
        "062d26c:benchmarks/slo/two.py",
    ]
