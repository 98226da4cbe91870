"""Servers that a benchmark starts end with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.cpu.e2e.program import is_running
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
PROGRAM = """
import time
from benchmarks.serve.slo_live.servers import Fleet, ServerSpec
with Fleet() as fleet:
    command = ("sh", "-c", "echo ready in 1 s: http://127.0.0.1:1; exec sleep 100")
    print(fleet.start(ServerSpec("fake", command))._process.pid, flush=True)
    time.sleep(100)
"""


def test_a_benchmark_that_is_told_to_end_leaves_no_server_behind() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        server = int(next(line for line in program.stdout if line.strip().isdigit()))
        assert is_running(server)
        program.send_signal(signal.SIGTERM)
        assert program.wait(30) == 128 + signal.SIGTERM
        wait_for(lambda: not is_running(server))
