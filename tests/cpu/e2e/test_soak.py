"""A short form of the soak: mixed requests, clients that leave, little memory; nothing is lost or leaked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "names",
    [
        "slo-gap-async,sarathi-drafts-async",
        *(pytest.param(names, marks=pytest.mark.slow) for names in ("slo,static", "slo-states")),
    ],
)
def test_a_short_soak_finds_no_fault(names: str) -> None:
    command = [sys.executable, "-m", "benchmarks.check.soak", "--requests", "300", "--only", names]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "300 requests, 0 faults" in found.stdout
