"""scripts/gpu-check and gpu-vllm run on a CPU: minutes of a GPU are not spent on their own mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("script", ["gpu-check", "gpu-vllm"])
def test_every_stage_passes(script: str, tmp_path: Path) -> None:
    script_path = str(SCRIPTS / script)
    command = [sys.executable, script_path, "--rehearse", "--deadline", "1100", "--out", str(tmp_path)]
    variables = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [each for each in summary["stages"] if each["problem"]] == [], done.stdout[-5000:]
    assert done.returncode == 0


@pytest.mark.slow
def test_a_package_that_is_missing_ends_the_check(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check.environment"]
    (tmp_path / "llguidance.py").write_text("raise ImportError('not packed')")
    root = SCRIPTS.parent
    paths = os.pathsep.join(map(str, (tmp_path, root / "src", root)))
    variables = {"PYTHONPATH": paths, "GPU_CHECK_OUT": str(tmp_path), "GPU_CHECK_REHEARSE": "1"}
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False, cwd=root
    )
    assert "FAIL import onbeat.engine.build: ImportError: not packed" in done.stdout
    assert done.returncode == 1
