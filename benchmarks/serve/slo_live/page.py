"""What has been measured: one JSON file of numbers, one Markdown page with a section a study."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness.pages import git_commit, machine
from benchmarks.serve.slo_live.sections import replace_section

TITLE = "# The policy `slo` on this CPU, live"


class StudyPage:
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
        f"times; the client scores and shares the machine. Made by "
        f"`python -m benchmarks.serve.slo_live STUDY`.\n"
    )
