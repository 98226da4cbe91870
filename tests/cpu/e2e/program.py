"""Run the `onbeat` program as its user does: a process, its output, signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.waiting import wait_for

START_SECONDS = 60.0
MODEL = "Llama-3.1-8B"
"""Of stand-ins."""
_FLEET_KEY = "of the tests"


def command_line(*arguments: str | Path) -> list[str]:
    """Return the command that runs `onbeat` with these arguments."""
    return [sys.executable, "-m", "onbeat.cli.main", *map(str, arguments)]


def environment(**changes: str | None) -> dict[str, str]:
    """Return this process's environment, changed; None removes a variable."""
    merged = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


class ServerProgram:
    """A running `onbeat serve`; `url` is known once it is ready."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.url = ""
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if found := re.search(r"ready in .*?(https?://\S+)", line):
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def wait_until_ready(self) -> None:
        wait_for(self._ready.is_set, START_SECONDS)
        assert self.url, f"the server did not start: {self.lines}"

    @property
    def engine_pid(self) -> int:
        """The process id of the first engine."""
        process_ids = self.engine_pids
        assert process_ids, "the server has no engine process"
        return process_ids[0]

    @property
    def engine_pids(self) -> list[int]:
        """The process ids of the engines and front ends, whoever has started them."""
        return [
            pid for keeper in (self.process.pid, *self.keepers) for pid in _children(keeper, "spawn_main")
        ]

    @property
    def keepers(self) -> list[int]:
        """The process id of the keeper, where the program itself only looks after it."""
        return _children(self.process.pid, "onbeat.cli.main")

    def example(self) -> str:
        """Return the command that the ready line tells to try."""
        wait_for(lambda: any(line.lstrip().startswith("-d ") for line in self.lines))
        start = next(i for i, line in enumerate(self.lines) if line.startswith("  curl "))
        return "\n".join(self.lines[start : start + 2])

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def press_ctrl_c(self) -> None:
        """Send SIGINT to the server and its children, as a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def exit_code(self, timeout: float = 15.0) -> int:
        """Wait for the end; the program's output is complete then."""
        wait_for(lambda: self.process.poll() is not None, timeout)
        self._reader.join(60)
        return self.process.returncode

    def fleet(self) -> dict[str, Any]:
        """Return what the server shows of its replicas."""
        found: dict[str, Any] = self._ask("GET", "/fleet").raise_for_status().json()
        return found

    def change_fleet(self, what: str, **fields: Any) -> httpx.Response:
        """Ask for a change: `drain`, `scale` or `restart`."""
        return self._ask("POST", f"/fleet/{what}", json=fields)

    def _ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {_FLEET_KEY}"}
        return httpx.request(method, self.url + path, headers=headers, timeout=60, **options)

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name; those with labels as `name{value,value}`."""
        return read_metrics(httpx.get(f"{self.url}/metrics").text)


def _children(pid: int, what: str) -> list[int]:
    """Return the children of a process that were started with these words; multiprocessing has its own."""
    found = []
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with suppress(OSError):
                if what.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


def connections(server: ServerProgram, pid: int) -> set[int]:
    """Return the ports of the clients that a front end is connected with."""
    port = f":{urlsplit(server.url).port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = {
        f"socket:[{row[9]}]": int(row[2].rpartition(":")[2], 16)
        for row in rows
        if row[1].endswith(port) and row[3] == "01"
    }
    found = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            found.add(ports.get(os.readlink(each), 0))
    return found - {0}


def read_metrics(text: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(str(value) for value in sample.labels.values())
            values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return values


@contextmanager
def serving(*arguments: str | Path, env: dict[str, str] | None = None) -> Iterator[ServerProgram]:
    """Run `onbeat serve` on a free port until the block ends."""
    with starting(*arguments, env=env) as server:
        server.wait_until_ready()
        yield server


@contextmanager
def starting(
    *arguments: str | Path, env: dict[str, str] | None = None, prefix: Sequence[str] = ()
) -> Iterator[ServerProgram]:
    """Start `onbeat serve`, by a command that goes before it; it may not be ready yet, or never get so."""
    process = subprocess.Popen(
        (*prefix, *command_line("serve", *arguments, "--port", "0")),
        stderr=subprocess.PIPE,
        text=True,
        env={**(os.environ if env is None else env), "ONBEAT_FLEET_KEY": _FLEET_KEY},
        start_new_session=True,  # a process group of its own, as a shell gives it
    )
    server = ServerProgram(process)
    try:
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        server._reader.join(5)
        assert process.stderr is not None
        process.stderr.close()


def run_program(
    *arguments: str | Path, env: dict[str, str] | None = None, timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        command_line(*arguments), capture_output=True, text=True, env=env, timeout=timeout, check=False
    )


def is_running(pid: int) -> bool:
    """Return whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


SMALL = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "128M", "--threads", "1")
"""Limits that start quickly and leave memory to the other tests."""
