"""`onbeat profile` and a server that uses what it wrote, as processes."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.cpu.e2e.program import SMALL, command_line, environment, run_program, serving

TINY = (*SMALL, "--load-format", "dummy", "--dtype", "float32", "--max-num-seqs", "16")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return environment(XDG_CACHE_HOME=str(tmp_path / "cache"))


@pytest.mark.slow
def test_a_server_uses_the_profile_that_was_measured(tiny_directory, env, tmp_path):
    run = run_program("profile", tiny_directory, *TINY, "--seconds", "1", env=env)
    assert run.returncode == 0, run.stderr
    assert "held back" in run.stdout
    assert "MBU" in run.stdout
    assert "held back, with drafts" in run.stdout
    (path,) = (tmp_path / "cache" / "onbeat" / "profiles").glob("*.json")
    assert str(path) in run.stdout
    assert json.loads(path.read_text())["schema_version"] == 3
    page = path.with_suffix(".html").read_text()
    assert "against measured" in page

    timeline = tmp_path / "timeline.json"
    flags = ("--timeline", timeline, "--log-level", "debug")
    with serving(tiny_directory, *TINY, *flags, env=env) as server:
        assert any(f"profile {path}" in line for line in server.lines)
        assert any("`onbeat profile`)" in line for line in server.lines)
        body = {"model": str(tiny_directory), "prompt": "a" * 100, "max_tokens": 20, "ignore_eos": True}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).raise_for_status()
        metrics = server.metrics()
        server.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
    assert metrics["onbeat_step_predicted_seconds_count"] == metrics["onbeat_steps_total"] == 20
    assert metrics["onbeat_step_mbu_ratio"] > 0
    assert metrics["onbeat_step_prediction_bias_ratio"] > 0
    steps = [event["args"] for event in json.loads(timeline.read_text()) if event["name"] == "step"]
    assert len(steps) == 20
    assert all(step["predicted_ms"] > 0 and step["mfu"] > 0 for step in steps)


@pytest.mark.slow
def test_ctrl_c_leaves_no_half_profile(tiny_directory, env, tmp_path):
    output = tmp_path / "p.json"
    arguments = ("profile", tiny_directory, *TINY, "--seconds", "60", "--output", output)
    with subprocess.Popen(command_line(*arguments), stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        assert any("warming up" in line for line in process.stderr)  # what is measured comes next
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
    assert process.returncode == 130
    assert "no profile" in errors
    assert not list(tmp_path.glob("p.*"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--seconds", "0"), "seconds is 0"),
        (("--output", "/proc/nowhere/p.json"), "--output: cannot write /proc/nowhere/p.json"),
        (("--second", "3"), "mean --seconds"),
    ],
)
def test_bad_input_is_refused_before_anything_is_loaded(tiny_directory, env, arguments, expected):
    run = run_program("profile", tiny_directory, *TINY, *arguments, env=env)
    assert run.returncode == 2
    assert expected in run.stderr
