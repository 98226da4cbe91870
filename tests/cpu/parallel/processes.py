"""Find the processes of ranks."""

from __future__ import annotations

from pathlib import Path


def rank_pids(parent: int) -> list[int]:
    """Return the process ids of the ranks that a process has started, in the order of ranks."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return sorted(int(child) for child in children if b"engine.parallel.worker" in _command(child))


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""
