"""Servers under test: started once, and stopped in their tracks while another one is measured.

A server that only waits still takes time from its neighbour now and then (timers, spinning threads). Between
turns every process of a server is therefore suspended (SIGSTOP), so that two servers can take turns within
seconds instead of being started anew for each.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.servers import end_by_sigterm

START_SECONDS = 300


@dataclass(frozen=True)
class ServerSpec:
    """How to start a server.

    `url` is None for one that says in its log where it listens, as onbeat does.
    """

    name: str
    command: tuple[str, ...]
    url: str | None = None


class Server:
    """A running server; suspended unless it is its turn."""

    def __init__(self, spec: ServerSpec, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = spec.name
        self.url = ""
        self._process, self.pid = process, process.pid
        self._log = log

    @contextmanager
    def turn(self) -> Iterator[str]:
        """Let the server run; yields its URL."""
        self._signal(signal.SIGCONT)
        try:
            yield self.url
        finally:
            self._signal(signal.SIGSTOP)

    def stop(self) -> None:
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait(10)

    def log_tail(self, size: int = 3000) -> str:
        return self._log.read_text(errors="replace")[-size:]

    def _signal(self, number: signal.Signals) -> None:
        # The process group is the server's own: it was started as the leader of a session.
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


class Fleet:
    """Several servers, one of which runs at a time. A context manager: it stops them all."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.servers: dict[str, Server] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for server in self.servers.values():
                print(f"--- end of the log of {server.name}:\n{server.log_tail()}", flush=True)
        self._stack.close()

    def start(self, spec: ServerSpec) -> Server:
        """Start a server, wait until it answers, suspend it."""
        end_by_sigterm()
        began = time.monotonic()
        log = Path(self._stack.enter_context(tempfile.TemporaryDirectory())) / "server.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                spec.command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        server = Server(spec, process, log)
        self._stack.callback(server.stop)
        server.url = _wait_until_ready(spec, process, log)
        server._signal(signal.SIGSTOP)
        self.servers[spec.name] = server
        print(f"started {spec.name} in {time.monotonic() - began:.0f} s", flush=True)
        return server

    def start_all(self, specs: Sequence[ServerSpec]) -> None:
        for spec in specs:
            self.start(spec)

    def keep(self, names: Sequence[str]) -> None:
        """Stop all servers but these."""
        for name in [name for name in self.servers if name not in names]:
            self.servers.pop(name).stop()


def _wait_until_ready(spec: ServerSpec, process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        text = log.read_text(errors="replace")
        if spec.url is None:
            if found := re.search(r"ready in .*?(http://[\w.:]+)", text):
                return found[1]
        elif _answers(f"{spec.url}/health"):
            return spec.url
        time.sleep(0.2)
    sys.exit(f"{spec.name} did not start:\n{log.read_text(errors='replace')[-3000:]}")


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except (urllib.error.URLError, OSError):
        return False
    return True


def onbeat_spec(name: str, policy: str, flags: Sequence[str], *, model: str | None = None) -> ServerSpec:
    """Return how `onbeat serve` is started with a policy, on a free port."""
    command = [sys.executable, "-m", "onbeat.cli.main", "serve", *([model] if model else []), "--port", "0"]
    command += ["--no-log-requests", "--max-model-len", "2048", "--policy", policy, *flags]
    return ServerSpec(name, tuple(command))


def command_spec(name: str, command: str, url: str, environment: Mapping[str, str]) -> ServerSpec:
    """Return how another server is started: by a command line, listening at a known URL."""
    settings = [f"{key}={value}" for key, value in environment.items()]
    return ServerSpec(name, ("env", *settings, *shlex.split(command)), url)


def busy_share(seconds: float = 0.5) -> float:
    """Return the share of this machine's CPU time that somebody uses now."""

    def read() -> tuple[int, int]:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]

    total, idle = read()
    time.sleep(seconds)
    total_after, idle_after = read()
    return 1 - (idle_after - idle) / max(1, total_after - total)
