"""`onbeat replay` at the terminal: what it prints, writes and exits with."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from onbeat.cli.main import main
from tests.pure.recording.recorded import make_header, start_run
from tests.pure.scheduler.driver import make_config, make_request


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.gz"
    run = start_run(path, make_config())
    for index in range(6):
        run.add(make_request(f"r{index}", 20 + index, 30, arrival=run.now))
        for _ in range(5):
            run.step()
    run.finish()
    return path


def rewrite(path: Path, change) -> None:
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    change(lines)
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))


def test_an_identical_run_exits_with_0(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "decisions: identical" in shown
    assert "recorded step times" in shown
    assert "TTFT P99" in shown
    assert re.search(r"note: not .* None", shown)


def test_a_different_run_exits_with_1_and_shows_where(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(lines) -> None:
        chosen = [line for line in lines if line.get("call") == "schedule" and line.get("rows")]
        chosen[3]["rows"][1] += 1

    rewrite(path, change)
    assert main(["replay", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "decisions: DIFFERENT" in shown
    assert "step 3" in shown
    assert "recorded: (" in shown
    assert "replayed: (" in shown


def test_a_model_and_a_device_give_predicted_step_times(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(path, lambda lines: lines[0]["engine"].update(dtype="bfloat16"))
    found = tmp_path / "found.json"
    flags = ["--model", "Llama-3.1-8B", "--device", "h100-sxm", "--host-overhead-ms", "1"]
    assert main(["replay", str(path), *flags, "--json", str(found)]) == 0
    assert "with roofline" in capsys.readouterr().out
    result = json.loads(found.read_text())
    assert (result["schema"], result["kind"]) == (2, "replay")
    assert result["identity"]["is_identical"] is True
    assert result["identity"]["difference"] is None
    assert set(result["forecasts"]) == {"recorded step times", "roofline"}
    for error in result["forecasts"]["roofline"]["errors"]:
        assert error["relative_error"] == pytest.approx(error["simulated_ms"] / error["measured_ms"] - 1)
    assert result["record"]["scheduler"] == dict(make_header(make_config()).scheduler)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "h1000"], "h1000"),
        (["--model", "nobody/knows", "--device", "h100-sxm"], "'nobody/knows'"),
        (["--profile", "missing.json"], "missing.json"),
        (
            ["--step-time", "fited", "--model", "Llama-3.1-8B", "--device", "h100-sxm"],
            "mean fitted?",
        ),
        (["--json", "/proc/nowhere/found.json"], "/proc/nowhere/found.json: "),
    ],
)
def test_bad_flags_exit_with_2(
    path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(path, lambda lines: lines[0]["engine"].update(dtype="bfloat16", model_name="Llama-3.1-8B"))
    assert main(["replay", str(path), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_cut_file_needs_a_flag(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(path, lambda lines: lines.pop())
    assert main(["replay", str(path)]) == 2
    assert "--allow-partial" in capsys.readouterr().err
    assert main(["replay", str(path), "--allow-partial"]) == 0
    assert "cut short" in capsys.readouterr().out


def test_the_steps_of_a_record_are_steps_as_those_of_other_engines(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(path, lambda lines: lines[0]["engine"].update(dtype="float16"))
    rewrite(path, lambda lines: lines.pop())  # its server was killed: what is there are steps all the same
    found, profile = tmp_path / "found.json", tmp_path / "profile.json"
    flags = ["--model", "Llama-3.1-8B", "--device", "h100-sxm"]
    assert main(["replay", "--steps", str(path), *flags, "--json", str(found)]) == 0
    kinds = {each["kind"]: each["num_steps"] for each in json.loads(found.read_text())["errors"]}
    assert kinds["all"] == kinds["decode"] + kinds["mixed"] + kinds["prompt"] > 30
    assert main(["profile", "--from", str(path), *flags, "--output", str(profile)]) == 0
    key = json.loads(profile.read_text())["key"]
    assert (key["backend"], key["engine_version"], key["precision"]["weights"]) == (
        *("onbeat", "0.0.test", "fp16"),
    )
    assert f"--profile {profile}" in capsys.readouterr().out


def test_either_a_run_or_steps_are_replayed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["replay"], ["replay", str(path), "--steps", str(path)]):
        assert main(arguments) == 2
        assert "--record`" in capsys.readouterr().err
