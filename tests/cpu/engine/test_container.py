"""Limits of control groups, of either version, nested and missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from onbeat.engine.container import cpu_quota, memory_left, private_bytes

GIB = 2**30
Files = dict[str, str]


class Groups:
    """Made-up control groups."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "cgroup"
        self.membership = folder / "membership"

    def write(self, membership: str, files: Files) -> None:
        self.membership.write_text(membership)
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    def memory_left(self) -> int | None:
        return memory_left(self.root, self.membership)

    def cpu_quota(self) -> float | None:
        return cpu_quota(self.root, self.membership)


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path)


def v2(folder: str, **values: object) -> Files:
    return {f"{folder}{name.replace('_', '.', 1)}": str(value) for name, value in values.items()}


def v1(folder: str, limit: int, usage: int) -> Files:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    return {f"memory{folder}/{name}": str(value) for name, value in zip(names, (limit, usage), strict=True)}


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", v2("", memory_max=4 * GIB, memory_current=GIB), 3 * GIB),
        ("0::/\n", v2("", memory_max="max", memory_current=GIB), None),
        ("0::/\n", v2("", memory_max=GIB, memory_current=2 * GIB), 0),
        (
            "0::/pod/one\n",
            v2("pod/one/", memory_max="max", memory_current=1) | v2("pod/", memory_max=GIB, memory_current=0),
            GIB,
        ),
        (
            "0::/\n",
            v2("", memory_max=4 * GIB, memory_current=3 * GIB, memory_stat=f"anon 1\ninactive_file {GIB}"),
            2 * GIB,
        ),
        ("0::/../../elsewhere\n", v2("", memory_max=GIB, memory_current=0), GIB),
        ("4:memory:/docker/a\n0::/\n", v1("/docker/a", 2 * GIB, GIB), GIB),
        ("4:memory:/docker/a\n0::/\n", v1("", 3 * GIB, GIB), 2 * GIB),
        ("4:memory:/a\n", v1("/a", 3 * GIB, 0) | {"memory/a/memory.stat": "total_inactive_file 5"}, 3 * GIB),
        ("3:cpuset:/\n", v1("", 3 * GIB, GIB), None),
        ("", v1("", 3 * GIB, GIB), 2 * GIB),
        ("", {}, None),
    ],
)
def test_memory(groups: Groups, membership: str, files: Files, expected: int | None) -> None:
    groups.write(membership, files)
    assert groups.memory_left() == expected


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/a/b\n", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 0.5),
        (
            "1:cpu,cpuacct:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"},
            3.0,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("0::/\n", {}, None),
    ],
)
def test_cpu_quota(groups: Groups, membership: str, files: Files, expected: float | None) -> None:
    groups.write(membership, files)
    assert groups.cpu_quota() == expected


def test_the_memory_of_a_process_is_its_own_and_its_children_s() -> None:
    script = "import subprocess, sys; held = bytearray(b'x') * {}; {}; print(flush=True); sys.stdin.read()"
    child = f"subprocess.Popen([sys.executable, '-c', {script.format(2**26, 'pass')!r}]).stdin"
    command = [sys.executable, "-c", script.format(2**25, child)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        found = private_bytes(process.pid)
        process.terminate()
    assert 2**25 + 2**26 < found < 2**25 + 2**26 + 2**26
    assert private_bytes(process.pid) == private_bytes(None) == 0
