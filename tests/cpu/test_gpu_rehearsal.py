"""scripts/gpu-check and gpu-vllm run on a CPU: minutes of a GPU are not spent on their own mistakes."""

from __future__ import annotations

import csv
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
    command = [sys.executable, script_path, "--rehearse", "--deadline", "1150", "--out", str(tmp_path)]
    variables = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [each for each in summary["stages"] if each["problem"]] == [], done.stdout[-5000:]
    assert done.returncode == 0
    if script == "gpu-check":
        check_what_comes_home(tmp_path, variables)


def check_what_comes_home(out: Path, variables: dict[str, str]) -> None:
    """Look at the tables, and simulate the loads of stage K by the profile of stage G."""
    with (out / "kernels.csv").open(newline="") as file:
        kernels = list(csv.DictReader(file))
    assert {"2 decodes + 20 of a prompt, in pieces", "prompt"} <= {each["case"] for each in kernels}
    assert any("mm" in each["name"] and float(each["ms"]) > 0 < float(each["calls"]) for each in kernels)
    with (out / "slo.csv").open(newline="") as file:
        assert [each["policy"] for each in csv.DictReader(file)][::2] == ["slo", "sarathi 256", "sarathi 512"]
    command = [sys.executable, "-m", "benchmarks.gpu_check.slo", "--simulate", str(out)]
    own = {"PYTHONPATH": "src:.", "GPU_CHECK_REHEARSE": "1", "GPU_CHECK_WORK": str(out / "work")}
    done = subprocess.run(
        command,
        env=variables | own,
        capture_output=True,
        text=True,
        check=False,
        cwd=SCRIPTS.parent,
    )
    assert len(done.stdout.splitlines()) == 7, done.stderr[-2000:]


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
    assert "onbeat.engine.start" in done.stdout
    assert done.returncode == 1
