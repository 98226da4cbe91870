"""The retrieval assistant of examples/planner, with the embedded model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu.e2e.program import ServerProgram, environment

EXAMPLE = Path(__file__).parents[3] / "examples" / "planner" / "run.py"


@pytest.mark.slow
def test_a_plan_takes_two_calls_and_a_chain_four(smollm2_server: ServerProgram) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--deadline", "600", "--show"],
        capture_output=True,
        text=True,
        env=environment(OPENAI_BASE_URL=f"{smollm2_server.url}/v1", MODEL="smollm2"),
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name, num_calls in (("chain", "4.0"), ("plan", "2.0")):
        line = next(each for each in done.stdout.splitlines() if each.startswith(f"{name}: "))
        found = re.fullmatch(
            rf"{name}: {num_calls} calls, median [\d.]+ s, 100% in time, (\d+)% of the passages .*", line
        )
        assert found is not None, line
    assert "no answer:" not in done.stdout
    assert done.stdout.count("\n  searched: ") == 12
