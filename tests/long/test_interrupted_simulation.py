"""Ctrl-C at `onbeat simulate`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.pure.cli.simulating import LOAD, MODEL


def test_ctrl_c_leaves_a_partial_result(tmp_path: Path) -> None:
    path, report = tmp_path / "summary.json", tmp_path / "report.html"
    flags = ["--num-prompts", "200k", "--replicas", "40", "--request-rate", "400"]
    command = [sys.executable, "-m", "onbeat.cli.main", "simulate", *MODEL, *LOAD, *flags]
    process = subprocess.Popen(
        [*command, "--json", str(path), "--report", str(report), "--router", "round-robin"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    process.stderr.readline()  # the configuration, printed as the run begins
    time.sleep(1.5)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "partial result" in out
    found = json.loads(path.read_text())
    assert found["interrupted"] is True
    assert 0 < found["completed"] < 200_000
    assert found["completed"] + found["num_interrupted_requests"] == 200_000
    assert report.exists()
