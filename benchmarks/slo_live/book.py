"""What has been measured: one JSON file of numbers, one Markdown page with a section a study."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
TITLE = "# The policy `slo` on this CPU, live"


class Book:
    """Results of a day; each study replaces its own part and leaves the others.

    Parameters
    ----------
    folder : of the two files.
    images : folder of plots.
    """

    def __init__(self, folder: Path, images: Path, *, day: str | None = None) -> None:
        self._stem = folder / f"{day or date.today().isoformat()}-slo-live"
        self.images = images
        self.busy_share = 0.0
        """Share of the machine's CPU time that others used when the study began."""

    @property
    def page(self) -> Path:
        return self._stem.with_name(self._stem.name + ".md")

    @property
    def numbers(self) -> Path:
        return self._stem.with_name(self._stem.name + ".json")

    def read(self, study: str) -> dict[str, Any]:
        """Return the numbers of a study; {} if it has not been run."""
        if not self.numbers.exists():
            return {}
        found: dict[str, Any] = json.loads(self.numbers.read_text(encoding="utf-8")).get(study, {})
        return found

    def write(self, study: str, heading: str, text: str, numbers: dict[str, Any]) -> None:
        """Replace the section and the numbers of a study."""
        everything = json.loads(self.numbers.read_text(encoding="utf-8")) if self.numbers.exists() else {}
        stamp = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "commit": git_commit()}
        everything[study] = stamp | {"busy_share_at_start": self.busy_share} | numbers
        self.numbers.parent.mkdir(parents=True, exist_ok=True)
        self.numbers.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
        page = self.page.read_text(encoding="utf-8") if self.page.exists() else head()
        busy = f"others used {self.busy_share:.0%} of the CPU time at the start"
        body = f"{stamp['at']}, commit {stamp['commit']}; {busy}.\n\n{text.strip()}"
        self.page.write_text(replace_section(page, heading, body), encoding="utf-8")
        print(f"\n## {heading}\n\n{body}\n\nwrote {self.page.name} and {self.numbers.name}", flush=True)


def head() -> str:
    return (
        f"{TITLE}\n\n{machine()}. The embedded model (SmolLM2-135M-Instruct), bfloat16. "
        f"Servers take turns on the machine, the others suspended; equal seeds give equal requests at equal "
        f"times; the client scores and shares the machine. Made by `python benchmarks/slo_live.py STUDY`; "
        f"the numbers of every run are in the JSON file beside this page.\n"
    )


def replace_section(page: str, heading: str, body: str) -> str:
    """Return the page with the section of that heading replaced, or added before the first later number."""
    top, *sections = re.split(r"^## ", page, flags=re.MULTILINE)
    made = f"{heading}\n\n{body.strip()}"
    headings = [section.split("\n", 1)[0] for section in sections]
    if heading in headings:
        sections[headings.index(heading)] = made
    else:
        later = [i for i, other in enumerate(headings) if place(other) > place(heading)]
        sections.insert(min(later, default=len(sections)), made)
    return "\n\n".join([top.strip(), *(f"## {section.strip()}" for section in sections)]) + "\n"


def place(heading: str) -> tuple[int, str]:
    """Return where a section stands: the yardstick, then those with a number, then what else there is."""
    number = re.match(r"\((\w+)\)", heading)
    numerals = ("i", "ii", "iii", "iv", "v")
    if number and number[1] in numerals:
        return 1 + numerals.index(number[1]), heading
    return (0 if heading.startswith("Yardstick") else len(numerals) + 1), heading


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


def markdown_table(columns: list[str], rows: list[list[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(show(cell) for cell in line)} |" for line in lines)


def show(value: Any) -> str:
    """Return a cell: None is a dash, floats get about three digits."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return str(value)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def middle(values: list[float | None], digits: int = 2) -> str:
    """Return the median with minimum and maximum; None is no value."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return "-"
    half = len(ordered) // 2
    median = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    return f"{median:.{digits}f} ({ordered[0]:.{digits}f} to {ordered[-1]:.{digits}f})"
