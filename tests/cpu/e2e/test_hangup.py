"""Signals: a terminal that closes drains a server; others, and whoever else sends SIGHUP, break no stream."""

from __future__ import annotations

import os
import pty
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.cpu.e2e.program import ServerProgram, starting
from tests.cpu.e2e.test_death import STAND_IN_FLAGS, Stream
from tests.waiting import wait_for

# The first terminal that a session's leader opens is the session's. Who tests may do so under nohup.
_OPEN = """import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.open(sys.argv[1], os.O_RDWR)
os.execvp(sys.argv[2], sys.argv[2:])"""


def descendants(pid: int) -> set[int]:
    """Return all processes that a process has started, and those that they have."""
    children = {
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    }
    return children.union(*map(descendants, children))


@contextmanager
def in_terminal(*arguments: str | Path, prefix: Sequence[str] = ()) -> Iterator[tuple[ServerProgram, int]]:
    """Serve in a terminal of its own; it closes with the descriptor that comes with the server."""
    master, slave = pty.openpty()
    opened = (sys.executable, "-c", _OPEN, os.ttyname(slave), *prefix)
    with starting("Llama-3.1-8B", *STAND_IN_FLAGS, *arguments, prefix=opened) as server:
        server.wait_until_ready()
        os.close(slave)
        yield server, master


def begun_stream(server: ServerProgram) -> Stream:
    stream = Stream(server.url, max_tokens=300)
    stream.wait_until_flowing()
    return stream


@pytest.mark.parametrize("flags", [(), ("--front-ends", "2")])
def test_a_closed_terminal_drains_the_server(tiny_directory: Path, flags: Sequence[str]) -> None:
    with in_terminal("--tokenizer", tiny_directory, *flags) as (server, master):
        engines, stream = server.engine_pids, begun_stream(server)
        if not flags:
            os.killpg(server.process.pid, signal.SIGHUP)  # the terminal is there: it was no hang-up
            stream.go_on()
            assert server.engine_pids == engines
            wait_for(lambda: any("--front-ends 2" in line for line in server.lines))
        os.close(master)
        stream.end()
        assert server.exit_code(30) == 0
        assert any("draining" in line for line in server.lines)


@pytest.mark.parametrize("flags", [(), ("--front-ends", "2")])
def test_signals_of_users_end_no_process(tiny_directory: Path, flags: Sequence[str]) -> None:
    with starting("Llama-3.1-8B", *STAND_IN_FLAGS, "--tokenizer", tiny_directory, *flags) as server:
        wait_for(lambda: server.lines)  # not even while it loads
        for pid in {server.process.pid} | descendants(server.process.pid):
            os.kill(pid, signal.SIGUSR1)
        server.wait_until_ready()
        stream, everybody = begun_stream(server), {server.process.pid} | descendants(server.process.pid)
        assert len(everybody) >= (6 if flags else 2)
        for pid in everybody:
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGUSR2)
        stream.end()
        assert everybody <= {server.process.pid} | descendants(server.process.pid)


def test_nohup_lets_it_outlive_its_terminal(tiny_directory: Path) -> None:
    with in_terminal("--tokenizer", tiny_directory, prefix=["sh", "-c", 'trap "" HUP; exec "$@"', "sh"]) as (
        server,
        master,
    ):
        stream = begun_stream(server)
        os.close(master)
        stream.end()
        assert httpx.get(f"{server.url}/ready").status_code == 200
