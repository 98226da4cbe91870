"""The commands that the documents print can be given as they stand, from a checkout."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from onbeat.cli.main import main

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "docs/simulation.md", "docs/capacity.md", "docs/slo.md")
SHORTER = {
    "simulate": ["--num-prompts", "40"],
    "capacity": ["--num-prompts", "20", "--tolerance", "0.9"],
}


def printed_commands() -> list[str]:
    text = "".join((ROOT / name).read_text() for name in DOCUMENTS)
    blocks = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    lines = (line for line in blocks.splitlines() if line.startswith(("onbeat simulate", "onbeat capacity")))
    return [line for line in lines if "--trace" in line]


def test_the_documents_print_some() -> None:
    assert len(printed_commands()) >= 6


@pytest.mark.parametrize("command", printed_commands())
def test_what_is_printed_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    _, *arguments = shlex.split(command, comments=True)
    assert main([*arguments, *SHORTER[arguments[0]]]) == 0
