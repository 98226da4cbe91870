"""Temporary directories of servers: they go with their process, or with the next one if it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from onbeat.cluster.client import OwnedFolder, remove_abandoned

OWNER = """
import sys, time
from onbeat.cluster.client import OwnedFolder
folder = OwnedFolder()
(folder.path / "to-engine").touch()
print(folder.path, flush=True)
time.sleep(60)
"""
BECOMES_ANOTHER = """
import os, sys
from onbeat.cluster.client import OwnedFolder
folder = OwnedFolder()
folder.outlive_exec()
program = "import sys, time; print(sys.argv[1], flush=True); time.sleep(60)"
os.execv(sys.executable, ["python", "-c", program, str(folder.path)])
"""


@pytest.fixture(autouse=True)
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def start_owner(program: str = OWNER) -> tuple[subprocess.Popen[str], Path]:
    """Start a process that has a directory; return both."""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def kill(owner: subprocess.Popen[str]) -> None:
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert owner.stdout is not None
    owner.stdout.close()


def test_is_removed_when_it_is_closed(temporary_files: Path) -> None:
    with closing(OwnedFolder()) as folder:
        (folder.path / "meeting").write_text("")
        assert folder.path.parent == temporary_files
        assert folder.path.stat().st_mode & 0o077 == 0
    assert not list(temporary_files.iterdir())


@pytest.mark.parametrize("program", [OWNER, BECOMES_ANOTHER])
def test_the_next_one_removes_that_of_a_process_that_was_killed(program: str) -> None:
    owner, theirs = start_owner(program)
    with closing(OwnedFolder()) as first:
        assert theirs.is_dir(), "its process lives"
        kill(owner)
        with closing(OwnedFolder()):
            assert not theirs.exists()
            assert first.path.is_dir(), "its process lives"


def test_what_is_not_ours_stays(temporary_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, theirs = start_owner()
    kill(owner)
    elsewhere = temporary_files / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (temporary_files / "onbeat-link").symlink_to(elsewhere)
    (temporary_files / "onbeat-without-a-lock").mkdir()
    linked_lock = temporary_files / "onbeat-linked-lock"
    linked_lock.mkdir()
    (linked_lock / "lock").symlink_to(elsewhere / "lock")
    (temporary_files / "onbeat-file").touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: os.geteuid() + 1)
        remove_abandoned(temporary_files)
    assert theirs.is_dir(), "of another user"
    remove_abandoned(temporary_files)
    left = {path.name for path in temporary_files.iterdir()}
    assert left == {
        "elsewhere",
        "onbeat-link",
        "onbeat-without-a-lock",
        "onbeat-linked-lock",
        "onbeat-file",
    }
    assert (elsewhere / "lock").exists()
