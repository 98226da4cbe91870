"""Files that a command writes at its end: tried before the work, none lost to the failure of another."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from rich.console import Console

from onbeat.cli.outputs import check_writable, save_all, shown_settings
from onbeat.core.errors import ConfigError
from tests.pure.cli.simulating import LOAD, MODEL


def test_trying_leaves_no_trace(tmp_path: Path) -> None:
    there, new = tmp_path / "there.json", tmp_path / "sub" / "new.json"
    there.write_text("kept")
    check_writable(Namespace(), {"--json": there, "--report": new, "--records": None})
    assert there.read_text() == "kept"
    assert not new.exists()
    assert new.parent.is_dir()


@pytest.mark.parametrize("name", [".", "file/below", "/proc/nowhere/x.json"])
def test_what_cannot_be_written_is_found_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--json"):
        check_writable(Namespace(), {"--json": tmp_path / name})


def test_two_flags_may_not_name_one_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--json.*--report.*/x"):
        check_writable(Namespace(), {"--json": tmp_path / "x", "--report": tmp_path / "x"})


@pytest.mark.parametrize("name", ["trace", "config", "dataset_path"])
def test_an_input_is_not_overwritten(tmp_path: Path, name: str) -> None:
    given, link = tmp_path / "there.json", tmp_path / "link.json"
    given.write_text("kept")
    link.symlink_to(given)
    args = Namespace(**{name: str(given)}, json=link)
    with pytest.raises(ConfigError, match=r"--json would overwrite .*link.json"):
        check_writable(args, {"--json": link})
    assert given.read_text() == "kept"


def test_a_result_is_overwritten_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("of before")
    check_writable(Namespace(json=path, label=str(path), num_prompts=3), {"--json": path})


def test_a_setting_of_0_is_shown() -> None:
    given = Namespace(seed=0, temperature=0.0, shed=False, kinds=[], json=None)
    assert shown_settings(given) == {"seed": 0, "temperature": 0.0}


def test_a_device_is_taken_as_it_is() -> None:
    check_writable(Namespace(), {"--json": Path("/dev/null")})


def test_one_that_fails_does_not_keep_the_others_from_being_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    def fail(_path: Path) -> None:
        raise ConfigError("cannot write a")

    good = tmp_path / "b"
    with pytest.raises(ConfigError, match="cannot write a"):
        save_all({tmp_path / "a": fail, good: lambda path: path.touch()}, Console(width=20))
    assert capsys.readouterr().out == f"saved {good}\n"
    assert good.exists()


def test_a_reader_that_has_had_enough_keeps_nothing_from_being_saved(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    end, begin = os.pipe()
    os.close(end)
    command = [sys.executable, "-m", "onbeat", "simulate", *MODEL, *LOAD, "--json", str(path)]
    ended = subprocess.run(command, stdout=begin, stderr=subprocess.PIPE, check=False, text=True)
    os.close(begin)
    assert (ended.returncode, path.exists()) == (0, True)
    assert ended.stderr.splitlines()[1:] == [f"saved {path}"]


def test_a_full_disk_ends_in_one_sentence() -> None:
    command = [sys.executable, "-m", "onbeat", "simulate", *MODEL, *LOAD]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False, text=True)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[1:] == [
        "onbeat: error: cannot write on: No space left on device; make room, or write to another place"
    ]
