"""The stages of scripts/gpu-check and gpu-vllm: what they make of what they find, and of what fails."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_check import golden, record, serve
from benchmarks.gpu_check import profile as stage_g
from benchmarks.gpu_check import slo as stage_k
from benchmarks.gpu_check import versus as stage_v
from benchmarks.gpu_check.models import model_config
from onbeat.core.slo import SLO
from onbeat.core.step import BatchShape
from onbeat.engine.step_time_spec import model_spec_of
from onbeat.perfmodel.device_spec import Parallelism, find_device
from onbeat.perfmodel.fitted import FitTarget, fit_best
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.profile import Profile, ProfileKey
from onbeat.perfmodel.shapes import MeasuredStep
from onbeat.workload.slo_classes import read_slo_config
from onbeat.workload.trace import read_trace
from tests.waiting import wait_for


def test_errors_are_told_by_the_kind_of_step() -> None:
    """Steps of each kind take as long as predicted, but for those of one, which take twice as long."""
    shapes = {kind: BatchShape() for kind in stage_g.KINDS}
    shapes["verify"].add_verify(40, 3)
    shapes["verify"].add(0, 20, samples=True)
    shapes["decode"].add(40, 1, samples=True)
    shapes["chunk"].add(0, 20, samples=True)
    shapes["mixed"].add(40, 1, samples=True)
    shapes["mixed"].add(0, 20, samples=True)
    target = FitTarget(model=model_spec_of(model_config("8b"), "any"), device=find_device("h100-sxm"))
    batches = [
        BatchShape.of_decodes(rows, rows * context) for rows in (1, 4, 16, 64) for context in (64, 512, 2048)
    ]
    fitted = fit_best(target, [MeasuredStep(shape, 1e-3) for shape in batches], [])
    predicted = target.predict(fitted, [MeasuredStep(shape, 1.0) for shape in shapes.values()])
    profile = Profile(
        key=ProfileKey(
            model="any",
            device="h100-sxm",
            device_name="H100",
            precision=Precision(),
            parallelism=Parallelism(),
        ),
        onbeat_version="0",
        created="2026-01-01T00:00:00+00:00",
        steps=[
            MeasuredStep(shape, float(seconds) * (2 if kind == "mixed" else 1))
            for (kind, shape), seconds in zip(shapes.items(), predicted, strict=True)
        ],
        fitted=fitted,
    )
    errors = stage_g.errors_by_kind(profile)
    assert {kind: round(found.p50, 6) for kind, found in errors.items()} == {
        "verify": 0.0,
        "decode": 0.0,
        "chunk": 0.0,
        "mixed": 0.5,
    }


def test_a_load_of_stage_k_is_read_by_client_and_simulator(tmp_path: Path) -> None:
    options = stage_k.Load(long=2048, rate=25.0, seed=4).options(tmp_path)
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert (given["--request-rate"], given["--seed"], given["--num-prompts"]) == ("25.0", "4", "300")
    chats, long = read_slo_config(Path(given["--slo-config"]))
    assert (chats.share, long.share) == (0.88, 0.12)
    assert chats.slo == long.slo == SLO(ttft=0.5, tbt=0.025)
    assert chats.trace is not None
    assert long.trace is not None
    prompts = read_trace(chats.trace).num_prompt_tokens
    assert 153 <= prompts.min() < 160 < 450 < prompts.max() <= 459
    assert set(read_trace(long.trace).num_prompt_tokens.tolist()) == {2048}


@pytest.mark.slow
def test_tests_that_do_not_end_in_time_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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

        assert seconds < record.seconds_left()
        found = threading.Thread(target=end)
        monkeypatch.setattr(found, "cancel", lambda: None, raising=False)
        return found

    monkeypatch.setattr(threading, "Timer", timer)
    monkeypatch.setattr(golden, "TESTS", tmp_path)
    monkeypatch.setattr(record, "OUT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["golden", "cuda"])
    assert golden.main() == 1
    said = capsys.readouterr().out
    assert "tests/gpu" in said
    assert "FAIL failed test: FAILED " in said


@pytest.fixture
def versus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for each in (stage_v, record):
        monkeypatch.setattr(each, "OUT", tmp_path)
    for each in (stage_v, serve):
        monkeypatch.setattr(each, "seconds_left", lambda: 100.0)
    return stage_v


def test_a_server_that_does_not_start_leaves_the_end_of_its_log(
    versus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(name: str) -> Any:
        log = tmp_path / f"serve-{name}.log"
        command = [sys.executable, "-c", "raise SystemExit('no such flag')"]
        return versus.Server(name, versus.free_port(), log, versus.start_server(command, log))

    monkeypatch.setattr(versus, "start", start)
    monkeypatch.setattr(sys, "argv", ["versus", "vllm", "onbeat"])
    assert versus.main() == 1
    lines = (tmp_path / "versus.txt").read_text().splitlines()
    assert lines == [
        "missing: vllm did not start, or did not answer",
        "--- last lines of serve-vllm.log",
        "no such flag",
    ]


def test_rounds_without_numbers_are_missing_and_the_others_are_compared(
    versus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(port: int, name: str, users: int, *_rest: object) -> dict[str, float] | None:
        if users == 64 or (users == 32 and port == 2):
            return None
        return {"output_throughput": users * port * 100.0, "median_ttft_ms": 20.0}

    monkeypatch.setattr(versus, "load", measure)
    monkeypatch.setattr(versus, "wait_until_idle", lambda: None)
    process = SimpleNamespace(kill=lambda: None)
    servers = [versus.Server(name, port, tmp_path, process) for name, port in (("vllm", 1), ("onbeat", 2))]
    rounds: dict[Any, Any] = {}
    missing = versus.take_turns(servers, rounds)
    assert missing[:2] == ["onbeat, 32 users, turn 2", "onbeat, 32 users, turn 3"]
    assert len(missing) == 6
    _, first, second, third, fourth = (line.split() for line in versus.table(rounds))
    assert first == ["1", "100.0", "100.0", "200.0", "200.0", "2.000", "20", "20", "against", "20", "20"]
    assert second[5] == "2.000"
    assert third == ["32", "3200.0", "3200.0", "-", "-", "20", "20", "against", "-"]
    assert fourth == ["64", "-", "-", "-", "-", "against", "-"]
