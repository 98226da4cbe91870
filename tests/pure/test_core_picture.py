"""The picture of the core shows the files that `scripts/budgets.toml` lists, and no others."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_picture_shows_the_files_of_the_core() -> None:
    parts = tomllib.loads((ROOT / "scripts/budgets.toml").read_text())["core"]
    lines = re.findall(r"<text[^>]*>([a-z_ ·]+)</text>", (ROOT / "docs/images/core.svg").read_text())
    shown = sorted(name for line in lines if "·" in line for name in line.split(" · "))
    assert shown == sorted(Path(path).name for paths in parts.values() for path in paths)
