"""`onbeat bench chaos` against our own fleet, whose engines are killed meanwhile."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.cpu.e2e.program import command_line, serving
from tests.cpu.e2e.tiny_directory import write_tiny_directory

STAND_IN = ("--load-format", "stand-in", "--device", "h100-sxm", "--max-model-len", "4096", "--replicas", "2")


def test_no_token_is_lost_or_doubled_while_engines_are_killed(tmp_path: Path) -> None:
    with serving(write_tiny_directory(tmp_path / "tiny"), *STAND_IN) as server:
        kill = f"kill -9 $(pgrep -P {server.process.pid} -f multiprocessing.spawn | shuf -n 1)"
        flags = ("--seconds", "6", "--kill-command", kill, "--kill-every", "2.5", "--max-tokens", "200")
        run = subprocess.run(
            command_line("bench", "chaos", server.url, *flags), capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert "no token" in run.stdout
        # How often is a matter of how busy the machine is.
        assert re.search(r"run [1-9]\d* times?", run.stdout), run.stdout
