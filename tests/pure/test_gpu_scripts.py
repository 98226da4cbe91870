"""scripts/gpu-check stops what is late and goes on; scripts/gpu-pack refuses what is too large to travel."""

from __future__ import annotations

import json
import sys
import threading
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
NOTE = """
import json, os, pathlib
pathlib.Path(os.environ["GPU_CHECK_OUT"], "numbers.jsonl").write_text(json.dumps({line}) + "\\n")
"""
LINE = {
    "stage": "B",
    "name": "rate",
    "value": 2.5,
    "unit": "TB/s",
    "passed": False,
    "bound": ">= 3",
    "shown": True,
}


def load(name: str) -> Any:
    loader = SourceFileLoader(name, str(ROOT / "scripts" / name))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module: ModuleType = module_from_spec(spec)
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with three stages of its own: late with a child, failing, and passing."""
    script = load("gpu-check")
    stages = tmp_path / "benchmarks" / "gpu_check"
    stages.mkdir(parents=True)
    (stages / "__init__.py").touch()
    sleeper = "import subprocess, sys, time; "
    sleeper += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    sleeper += "print('child', child.pid, flush=True); time.sleep(60)"
    (stages / "late.py").write_text(sleeper)
    (stages / "failing.py").write_text("raise SystemExit(3)")
    (stages / "noting.py").write_text(NOTE.format(line=LINE))
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "PACK", tmp_path)
    monkeypatch.setattr(script, "SHORTEST", 0.1)
    stage = script.Stage
    monkeypatch.setattr(
        script, "STAGES", (stage("A", "late", 1.0), stage("B", "failing", 30), stage("T", "noting", 30))
    )
    return script


def run(script: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu-check", *arguments])
    return int(script.main())


def is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_late_stage_is_stopped_with_its_children_and_the_next_ones_run(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(check, monkeypatch, "--rehearse", "--stages", "ABT", "--out", str(out)) == 1
    summary = json.loads((out / "summary.json").read_text())
    assert [each["problem"] for each in summary["stages"]] == ["stopped after 1 s", "exit code 3", None]
    assert summary["numbers"] == [LINE]
    assert "FAIL B rate" in (out / "summary.txt").read_text()
    assert "FAIL B rate" in capsys.readouterr().out.splitlines()[-2]
    pid = int((out / "log.txt").read_text().partition("child ")[2].split()[0])
    wait_for(lambda: not is_running(pid))


def test_a_stage_that_misses_a_bound_has_not_passed(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert run(check, monkeypatch, "--rehearse", "--stages", "T", "--out", str(out)) == 1
    (stage,) = json.loads((out / "summary.json").read_text())["stages"]
    assert (stage["problem"], stage["passed"]) == (None, False)
    assert (out / "summary.txt").read_text().startswith("bounds not kept: 1 ")


def test_the_reference_engine_takes_no_time_from_the_gpu_engine() -> None:
    script = load("gpu-check")
    letters = [stage.letter for stage in script.STAGES]
    assert letters[-1] == "T"
    assert sorted(letters) == letters


@pytest.mark.slow
def test_tests_that_do_not_end_in_time_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    golden, record = (import_module(f"gpu_check.{name}") for name in ("golden", "record"))
    marked = "import time, pytest\n@pytest.mark.gpu\ndef test_"
    (tmp_path / "test_a.py").write_text(f"{marked}quick(): pass\n")
    (tmp_path / "test_b.py").write_text(f"{marked}wrong(): raise OSError\n")
    began = tmp_path / "began"
    (tmp_path / "test_c.py").write_text(
        f"{marked}endless():\n  open({str(began)!r}, 'w')\n  time.sleep(99)\n"
    )

    def timer(seconds: float, function: Any, arguments: tuple[Any, ...]) -> threading.Thread:
        def end() -> None:
            wait_for(began.exists)
            function(*arguments)

        assert seconds < golden.seconds_left()
        found = threading.Thread(target=end)
        monkeypatch.setattr(found, "cancel", lambda: None, raising=False)
        return found

    monkeypatch.setattr(golden.threading, "Timer", timer)
    monkeypatch.setattr(golden, "TESTS", tmp_path)
    monkeypatch.setattr(record, "OUT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["golden", "cuda"])
    assert golden.main() == 1
    said = capsys.readouterr().out
    assert "FAIL tests/gpu (cuda): {'failed': 1, 'passed': 1}, exit code 2" in said
    assert "FAIL failed test: FAILED " in said


def test_nothing_runs_after_a_stage_that_must_pass(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = (check.Stage("A", "failing", 30, must_pass=True), check.Stage("B", "noting", 30))
    monkeypatch.setattr(check, "STAGES", stages)
    assert run(check, monkeypatch, "--rehearse", "--stages", "AB", "--out", str(tmp_path / "out")) == 1
    assert not (tmp_path / "out" / "numbers.jsonl").exists()


def test_stages_that_the_deadline_leaves_no_time_for_are_named(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--rehearse", "--stages", "BT", "--deadline", "0", "--out", str(tmp_path / "out"))
    assert run(check, monkeypatch, *arguments) == 1


def test_an_unknown_stage_is_refused(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(check, monkeypatch, "--stages", "AZ", "--out", str(tmp_path))
    assert "there is no stage Z" in capsys.readouterr().err


def test_the_pack_has_what_onbeat_needs_and_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("gpu-pack")
    assert script.forgotten() == []
    monkeypatch.setattr(script, "WHEELS", [name for name in script.WHEELS if "llguidance" not in name])
    with pytest.raises(SystemExit, match="onbeat needs llguidance: add that to WHEELS"):
        script.pack_wheels()


def test_a_pack_says_how_many_kernels_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load("gpu-pack")
    monkeypatch.setattr(script, "PACK", tmp_path / "pack")
    monkeypatch.setattr(script, "KERNELS", tmp_path / "kernels")
    script.pack_kernels()
    (tmp_path / "kernels" / "one").mkdir(parents=True)
    (tmp_path / "kernels" / "one" / "one.so").touch()
    script.pack_kernels()
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == [
        f"There are {number} of 10 kernels" for number in (0, 1)
    ]
    assert (tmp_path / "pack" / "kernels" / "one" / "one.so").exists()


def test_a_pack_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load("gpu-pack")
    for name in ("pack_wheels", "pack_kernels", "pack_tokenizer"):
        monkeypatch.setattr(script, name, lambda: None)
    monkeypatch.setattr(script, "PACK", tmp_path)
    monkeypatch.setattr(script, "tree_bytes", lambda: 10)
    monkeypatch.setattr(sys, "argv", ["gpu-pack"])
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "a.whl").write_bytes(bytes(100))
    assert script.main() == 0
    monkeypatch.setattr(script, "MOST_BYTES", 100)
    assert script.main() == 1
    assert "too much" in capsys.readouterr().out
