"""What the machine gives: its limits, who takes its processor time, how much memory a server holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.pages import REPOSITORY

PROC = Path("/proc")
TICK = os.sysconf("SC_CLK_TCK")


def measure_limits() -> dict[str, float]:
    """Measure in a process of its own, so that its threads are gone before the next server runs."""
    command = [sys.executable, "-m", "benchmarks.serve.peers.machine_limits"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    limits: dict[str, float] = json.loads(done.stdout)
    return limits


@dataclass(frozen=True, slots=True, kw_only=True)
class CPUTime:
    """Processor time since some beginning, seconds, all cores together."""

    total: float
    """Idle time included: elapsed time times cores."""
    busy: float
    server: float
    client: float

    def shares_since(self, start: CPUTime) -> dict[str, float]:
        """Return whose the time since `start` was: server, client and others, as shares of all cores."""
        total = max(self.total - start.total, 1e-9)
        busy = (self.busy - start.busy) / total
        server = (self.server - start.server) / total
        client = (self.client - start.client) / total
        # Ticks of processes and of the whole are counted apart, so the difference may fall below 0 a little.
        return {"server": server, "client": client, "others": max(0.0, busy - server - client)}


def cpu_time(session: int | None) -> CPUTime:
    """Return the processor time used so far; `session` is the server's."""
    fields = [int(field) for field in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    used = os.times()
    return CPUTime(
        total=sum(fields) / TICK,
        busy=(sum(fields) - fields[3] - fields[4]) / TICK,
        server=0.0 if session is None else sum(_ticks(pid) for pid in session_members(session)) / TICK,
        client=used.user + used.system,
    )


def child_sessions() -> set[int]:
    """Return the sessions that children of this process lead: every server leads one."""
    return {
        status.session
        for status in map(_status, _pids())
        if status is not None and status.parent == os.getpid() and status.session == status.pid
    }


def session_members(session: int) -> list[int]:
    """Return the processes of a session."""
    return [
        status.pid for status in map(_status, _pids()) if status is not None and status.session == session
    ]


def memory_bytes(session: int) -> int:
    """Return the memory of a session's processes; pages that several share count once."""
    return sum(_proportional_bytes(pid) for pid in session_members(session))


def available_share() -> float:
    """Return the share of the machine's memory that is still to be had."""
    lines = (PROC / "meminfo").read_text().splitlines()
    sizes = {key: int(rest.split()[0]) for key, _, rest in (line.partition(":") for line in lines)}
    return sizes["MemAvailable"] / sizes["MemTotal"]


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """Of /proc/PID/stat what is needed here."""

    pid: int
    parent: int
    session: int
    ticks: int
    """Of processor time, in user and system mode."""


def parse_status(text: str) -> ProcessStatus:
    """Read a line of /proc/PID/stat; the name in it may hold blanks and brackets."""
    pid = int(text.split(" ", 1)[0])
    fields = text.rpartition(")")[2].split()
    return ProcessStatus(pid, int(fields[1]), int(fields[3]), int(fields[11]) + int(fields[12]))


def _pids() -> list[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]


def _status(pid: int) -> ProcessStatus | None:
    try:
        return parse_status((PROC / str(pid) / "stat").read_text(errors="replace"))
    except OSError:  # it has ended
        return None


def _ticks(pid: int) -> int:
    status = _status(pid)
    return 0 if status is None else status.ticks


def _proportional_bytes(pid: int) -> int:
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
