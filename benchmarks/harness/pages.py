"""Pages of results: tables and cells in Markdown, where they were made, and the files that keep them."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table; cells are as `show` makes them."""
    lines = [_line(header), "|" + "---|" * len(header), *map(_line, rows)]
    return "\n".join(lines)


def _line(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(show, cells))} |"


def show(value: Any) -> str:
    """Return a cell: None is a dash, floats get about three digits."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return str(value)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def middle(values: Sequence[float | None], digits: int = 2) -> str:
    """Return the median with minimum and maximum; None is no value."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return "-"
    half = len(ordered) // 2
    median = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    return f"{median:.{digits}f} ({ordered[0]:.{digits}f} to {ordered[-1]:.{digits}f})"


def write_document(document: Mapping[str, Any], stem: Path, text: str) -> None:
    """Write what was measured as STEM.json and what it says as STEM.md."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    json_path, page_path = stem.with_name(stem.name + ".json"), stem.with_name(stem.name + ".md")
    json_path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    page_path.write_text(text, encoding="utf-8")
    print(f"wrote {page_path.name} and {json_path.name}", flush=True)


def publish(text: str, name: str, *, write: bool) -> None:
    """Print a page of results, and write it under today's date if that is wanted."""
    print(text)
    if write:
        path = RESULTS / f"{time.strftime('%Y-%m-%d')}-{name}.md"
        path.write_text(text, encoding="utf-8")
        print(f"written: {path}")


def machine() -> str:
    model = "CPU"
    if (info := Path("/proc/cpuinfo")).exists() and (
        found := re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE)
    ):
        model = found[1]
    return f"{os.cpu_count()} cores of {model}, {platform.system()}"


def git_commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
