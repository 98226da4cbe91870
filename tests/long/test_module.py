"""`python -m onbeat` is the `onbeat` command."""

from __future__ import annotations

import subprocess
import sys

from onbeat import __version__


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "onbeat", "--version"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == f"onbeat {__version__}\n"
