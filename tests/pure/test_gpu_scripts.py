"""scripts/gpu-check stops what is late and goes on; gpu-pack and gpu-vllm pack what can travel."""

from __future__ import annotations

import json
import random
import sys
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType, SimpleNamespace
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
    for package in (stages.parent, stages):
        (package / "__init__.py").touch()
    sleeper = "import subprocess, sys, time; "
    sleeper += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    sleeper += "print('child', child.pid, flush=True); time.sleep(60)"
    (stages / "late.py").write_text(sleeper)
    (stages / "failing.py").write_text("raise SystemExit(3)")
    (stages / "noting.py").write_text(NOTE.format(line=LINE))
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "PACK", tmp_path)
    monkeypatch.setattr(script, "SHORTEST", 0.1)
    monkeypatch.setattr(script, "RELAXED", 1)
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


@pytest.mark.parametrize("letters", ["ABCDEF", "AGH", "AGK"])
def test_the_stages_of_a_call_have_time_in_it(letters: str) -> None:
    """A command on a lent machine may take ten minutes, of which installing takes some seconds."""
    script = load("gpu-check")
    assert letters == script.FIRST or letters[0] == "A"
    stages = script.chosen_stages(letters, "")
    assert {stage.letter for stage in stages} == set(letters)
    assert sum(stage.limit for stage in stages) + 10 <= 560


def test_the_load_is_that_of_stage_k(check: Any) -> None:
    check.STAGES = (check.Stage("A", "noting", 30), check.Stage("K", "noting", 30))
    stages = check.chosen_stages("AK", "--seed 4 --long 4096 2048")
    assert [stage.arguments for stage in stages] == [(), ("--seed", "4", "--long", "4096", "2048")]


@pytest.mark.parametrize(
    ("second", "flags", "expected"),
    [
        ("noting", [], "1"),
        ("failing", [], ""),
        ("failing", ["--pieces"], "1"),
        ("noting", ["--no-pieces"], ""),
    ],
)
def test_pieces_are_served_once_both_of_their_stages_have_passed(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str, flags: list[str], expected: str
) -> None:
    """And in later calls on the same machine, to which the profile is given, too."""
    say = "import os, pathlib; out = pathlib.Path(os.environ['GPU_CHECK_OUT'])\n"
    say += "(out / ('was' + os.environ['GPU_CHECK_STAGE'])).write_text(os.environ['GPU_CHECK_PIECES'])\n"
    stages = tmp_path / "benchmarks" / "gpu_check"
    (stages / "noting.py").write_text(say)
    (stages / "profiling.py").write_text(say + "(out / 'profile.json').write_text('measured')")
    names = {"C": "noting", "D": "noting", "E": second, "G": "profiling"}
    monkeypatch.setattr(check, "STAGES", tuple(check.Stage(*each, 30) for each in names.items()))
    monkeypatch.setattr(check, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(check, "install", lambda *_: None)
    out = tmp_path / "out"
    run(check, monkeypatch, "--stages", "CDEG", *flags, "--out", str(out))
    assert (out / "wasG").read_text() == expected
    run(check, monkeypatch, "--stages", "C", "--out", str(tmp_path / "later"))
    assert (tmp_path / "later" / "wasC").read_text() == ("1" if second == "noting" else "")
    assert (tmp_path / "later" / "profile.json").read_text() == "measured"


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
    assert "stage Z" in capsys.readouterr().err


def test_the_pack_has_what_onbeat_needs_and_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("gpu-pack")
    assert script.forgotten() == []
    monkeypatch.setattr(script, "WHEELS", [name for name in script.WHEELS if "llguidance" not in name])
    with pytest.raises(SystemExit, match=r"llguidance.*WHEELS"):
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
    said = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert said[::2] == [f"There are {number} of 5 kernels" for number in (0, 1)]
    assert "versions" in said[1]
    assert (tmp_path / "pack" / "kernels" / "one" / "one.so").exists()


def test_only_kernels_of_these_versions_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, builder = load("gpu-pack"), load("gpu-kernels")
    monkeypatch.setattr(script, "PACK", tmp_path / "pack")
    monkeypatch.setattr(script, "KERNELS", tmp_path / "kernels")
    (tmp_path / "kernels" / "one").mkdir(parents=True)
    (tmp_path / "kernels" / "one" / "one.so").touch()
    stamp = tmp_path / "kernels" / builder.STAMP
    stamp.write_text(builder.VERSIONS)
    script.pack_kernels()
    assert "versions" not in capsys.readouterr().out
    stamp.write_text(builder.VERSIONS.replace("flashinfer-python==0.6.14", "flashinfer-python==0.6.13"))
    with pytest.raises(SystemExit, match=r"flashinfer-python==0\.6\.13.*scripts/gpu-kernels"):
        script.pack_kernels()


def test_kernels_are_compiled_for_the_card_that_runs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer asks a card that is there; the variable stands for one that is not."""
    name = "FLASHINFER_CUDA_ARCH_LIST"
    monkeypatch.delenv(name, raising=False)
    assert name not in load("gpu-check").environment(tmp_path, is_rehearsal=False)
    assert load("gpu-check").environment(tmp_path, is_rehearsal=True)[name] == "9.0a"
    assert load("gpu-kernels").environment(tmp_path)[name] == "9.0a"
    monkeypatch.setenv(name, "8.0 8.9")
    builder = load("gpu-kernels")
    assert builder.environment(tmp_path)[name] == "8.0 8.9"
    assert "compute capability 8.0 8.9" in builder.VERSIONS


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


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, whose download makes two small wheels."""

    def download(names: list[str], folder: Path) -> None:
        assert "vllm==0.26.0" in names
        assert "msgspec==1" in names
        assert "gguf==1" not in names
        folder.mkdir(parents=True)
        for wheel in ("vllm-0.26.0-cp38.whl", "msgspec-1-py3.whl"):
            with zipfile.ZipFile(folder / wheel, "w") as archive:
                for file in ("kept.so", "vllm_flash_attn/_vllm_fa2_C.so", "vllm-rs"):
                    archive.writestr(f"{wheel.split('-')[0]}/{file}", random.Random(file).randbytes(900))

    script = load("gpu-vllm")
    pack = SimpleNamespace(
        WHEELS=("msgspec==1", "gguf==1"), download=download, MOST_BYTES=9000, tree_bytes=lambda: 4000
    )
    monkeypatch.setattr(script, "script", lambda _name: pack)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "VLLM", tmp_path / "vllm")
    monkeypatch.setattr(script, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(script, "PART_BYTES", 4096)
    return script


def test_what_is_packed_in_parts_is_unpacked_there(
    vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu-vllm", "--pack"])
    assert vllm.main() == 0
    calls = [line for line in capsys.readouterr().out.splitlines() if line.startswith("carry")]
    assert len(calls) > 2
    assert calls[-1].startswith('carry [".gpu/pack"]')
    for number in range(1, len(calls)):
        assert (tmp_path / "vllm" / f"part{number}" / "data").stat().st_size <= 4096
        assert calls[number - 1].endswith(f"python3 scripts/gpu-vllm --keep {number}")
        monkeypatch.setattr(sys, "argv", ["gpu-vllm", "--keep", str(number)])
        assert vllm.main() == 0
        assert f"part {number} of {len(calls) - 1}" in capsys.readouterr().out
    assert vllm.unpack(tmp_path / "site") == 2
    assert [path.name for path in (tmp_path / "site" / "vllm").iterdir()] == ["kept.so"]
    assert (tmp_path / "site" / "msgspec" / "vllm-rs").read_bytes() == random.Random("vllm-rs").randbytes(900)


def test_a_part_that_is_damaged_or_missing_is_named(vllm: Any, tmp_path: Path) -> None:
    vllm.pack()
    with pytest.raises(SystemExit, match=r"/part9\b"):
        vllm.keep(9)
    with pytest.raises(SystemExit, match=r"missing.*--keep 1"):
        vllm.unpack(tmp_path / "site")
    vllm.keep(1)
    with pytest.raises(SystemExit, match=r"missing.*--keep 2"):
        vllm.unpack(tmp_path / "site")
    (tmp_path / "vllm" / "part2" / "data").write_bytes(b"cut off")
    with pytest.raises(SystemExit, match=r"damaged.*--keep 2"):
        vllm.keep(2)


def test_parts_too_large_to_travel_are_refused(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "PART_BYTES", 6000)
    with pytest.raises(SystemExit, match="PART_BYTES"):
        vllm.pack()
