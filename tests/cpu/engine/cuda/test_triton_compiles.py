"""Every kernel in Triton compiles for an A100, A10, L4 and H100, and has room there; there are none here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: make test-triton")

SOURCES = sorted((Path(__file__).parents[4] / "src/onbeat/engine/cuda").glob("triton_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "86", "89", "90"])
def test_every_kernel_compiles(capability: str) -> None:
    command = [sys.executable, "-m", "tests.cpu.engine.cuda.compile_kernels", capability]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    launched = {
        name for source in SOURCES for name in re.findall(r"^    (_\w+)\[\(?\w", source.read_text(), re.M)
    }
    if int(capability) < 89:  # which has no numbers of 8 bits
        launched.remove("_in_fp8")
    assert launched
    assert {line.partition(":")[0] for line in done.stdout.splitlines()} == launched
