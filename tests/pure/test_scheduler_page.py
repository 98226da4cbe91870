"""The page that explains the scheduler shows the code that runs, and what it prints."""

from __future__ import annotations

import inspect
import re
import runpy
import sys
import textwrap
from pathlib import Path

import pytest

from onbeat.scheduler.replica.policies import DecodesFirst

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/maintainers/scheduler.md").read_text()
EXAMPLE = ROOT / "examples/scheduler.py"
BLOCKS = [
    block.strip() for block in re.findall(r"^```(?:python)?\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
]


def test_the_page_shows_the_loop_and_the_composer() -> None:
    loop, composer = BLOCKS[:2]
    assert textwrap.indent(loop, "    ").strip() in EXAMPLE.read_text()
    assert composer == textwrap.dedent(inspect.getsource(DecodesFirst.compose)).strip()
    assert len(EXAMPLE.read_text().splitlines()) <= 100


@pytest.mark.parametrize(("policy", "block"), [("sarathi", 3), ("slo", 5)])
def test_the_page_shows_what_the_example_prints(
    policy: str, block: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), policy])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert BLOCKS[block - 1] == f"python examples/scheduler.py {policy}"
    assert capsys.readouterr().out.strip() == BLOCKS[block]
