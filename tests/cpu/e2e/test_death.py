"""How the program ends: drained, hurried, orphaned, or with a dead engine."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cpu.e2e.program import SMALL, ServerProgram, is_running, serving, starting
from tests.cpu.e2e.tiny_directory import write_tiny_directory
from tests.waiting import wait_for

TINY_FLAGS = ("--load-format", "dummy", "--dtype", "float32", *SMALL[2:], "--max-model-len", "32k")
STAND_IN_FLAGS = ("--load-format", "stand-in", "--device", "h100-sxm", "--max-model-len", "4096")
"""Its tokens do not depend on the batch, as a sampled token of a model may in its last bits."""


class Stream:
    """A streamed completion read in a thread; its events are gathered until it ends."""

    def __init__(self, url: str, headers: Any = None, **fields: Any) -> None:
        self._url, self._headers = url, headers
        self._fields = {"prompt": "a", "stream": True, "ignore_eos": True, **fields}
        self.events: list[bytes] = []
        self.error: Exception | None = None
        self._is_left = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            url = f"{self._url}/v1/completions"
            with httpx.stream("POST", url, headers=self._headers, json=self._fields, timeout=60) as reply:
                reply.raise_for_status()
                # Not iter_lines(): it also splits at separators that random bytes of a text may form.
                data = b""
                for piece in reply.iter_bytes():
                    *events, data = (data + piece).split(b"\n\n")
                    self.events += [event.removeprefix(b"data: ") for event in events]
                    if self._is_left:
                        return
        except Exception as error:
            self.error = error

    def wait_until_flowing(self) -> None:
        wait_for(lambda: len(self.events) > 5 or self.error)
        assert self.error is None, self.error

    def is_broken(self) -> bool:
        """Return whether it has ended, but not as it should."""
        return not self._thread.is_alive() and self.events[-1:] != [b"[DONE]"]

    def go_on(self) -> None:
        """Wait until more of it comes, or it breaks."""
        num_events = len(self.events)
        wait_for(lambda: len(self.events) > num_events + 5 or not self._thread.is_alive())

    def leave(self) -> list[Any]:
        """Close the connection, and return the events so far: those of a stream that was whole to there."""
        self._is_left = True
        wait_for(lambda: not self._thread.is_alive())
        assert self.error is None, self.error
        return [json.loads(event) for event in self.events if event != b"[DONE]"]

    def end(self, timeout: float = 20.0) -> list[Any]:
        """Wait for the regular end of the stream and return its events before `[DONE]`."""
        wait_for(lambda: not self._thread.is_alive(), timeout)
        assert self.error is None, self.error
        assert self.events[-1] == b"[DONE]"
        return [json.loads(event) for event in self.events[:-1]]


@pytest.fixture
def server(tiny_directory: Path) -> Iterator[ServerProgram]:
    with serving(tiny_directory, *TINY_FLAGS) as program:
        yield program


def status(url: str) -> int:
    return httpx.get(url, timeout=60).status_code


def text_of(events: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in events)


def replicas(server: ServerProgram) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = server.fleet()["replicas"]
    return rows


# A fleet of one goes on likewise in tests/fleet, and comes back with the real program below.
@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_streams_of_a_killed_engine_go_on(tiny_directory: Path, num_replicas: int) -> None:
    flags = (*STAND_IN_FLAGS, "--tokenizer", tiny_directory, "--replicas", str(num_replicas))
    with serving("Llama-3.1-8B", *flags) as server:
        fields = {"max_tokens": 300, "seed": 7, "temperature": 0.8, "presence_penalty": 0.5}
        whole = text_of(Stream(server.url, **fields).end(timeout=60))
        streams = [Stream(server.url, **fields) for _ in range(4)]
        # Asked of the fleet: the clients may read long after the engines have ended.
        looks: list[dict[str, Any]] = []

        def is_streaming() -> bool:
            looks.append(max(replicas(server), key=lambda row: row["num_streaming"]))
            return bool(looks[-1]["num_streaming"])

        wait_for(is_streaming)
        killed = looks[-1]["process_id"]
        os.kill(killed, signal.SIGKILL)
        for stream in streams:
            events = stream.end(timeout=60)
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            assert text_of(events) == whole
        wait_for(lambda: all(row["state"] == "ready" for row in replicas(server)), timeout=60)
        assert len(server.engine_pids) == num_replicas
        assert killed not in server.engine_pids
        values = server.metrics()
        assert values["onbeat_fleet_resumed_total"] >= 1
        assert values["onbeat_fleet_lost_total"] == 0
        server.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert any("exit code -9" in line for line in server.lines)
        assert not any("Traceback" in line for line in server.lines)


def test_an_engine_that_comes_back_has_the_same_model_or_does_not_serve(tmp_path: Path) -> None:
    config = write_tiny_directory(tmp_path / "tiny") / "config.json"
    with serving(tmp_path / "tiny", *TINY_FLAGS) as server:
        config.write_text(config.read_text())
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_for(lambda: replicas(server)[0]["num_lives"] == 2, timeout=60)
        wait_for(lambda: status(f"{server.url}/ready") == 200, timeout=60)
        config.write_text(config.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_for(lambda: replicas(server)[0]["state"] == "down", timeout=90)
        assert "config.json" in replicas(server)[0]["why"]
        assert status(f"{server.url}/health") == 503


def test_the_engines_of_a_killed_server_end_by_themselves(tiny_directory: Path) -> None:
    with serving(tiny_directory, *TINY_FLAGS, "--replicas", "2") as server:
        streams = [Stream(server.url, max_tokens=30_000) for _ in range(2)]
        for stream in streams:
            stream.wait_until_flowing()
        engines = server.engine_pids
        assert len(engines) == 2
        server.send_signal(signal.SIGKILL)
        server.exit_code()
        wait_for(lambda: not any(map(is_running, engines)), timeout=5)


def test_a_signal_to_all_processes_drains_the_server(tiny_directory: Path) -> None:
    with serving(tiny_directory, *TINY_FLAGS, "--replicas", "2") as server:
        streams = [Stream(server.url, max_tokens=600) for _ in range(2)]
        for stream in streams:
            stream.wait_until_flowing()
        engines = server.engine_pids
        os.killpg(server.process.pid, signal.SIGTERM)
        for stream in streams:
            assert stream.end()[-1]["choices"][0]["finish_reason"] == "length"
        assert server.exit_code() == 0
        assert not any(map(is_running, engines))
        assert not any("started again" in line for line in server.lines)


def test_metrics_show_no_path_and_sigterm_drains_then_exits_with_0(
    server: ServerProgram, tiny_directory: Path
) -> None:
    text = httpx.get(f"{server.url}/metrics").text
    assert 'model="tiny"' in text
    assert str(tiny_directory.parent) not in text
    engine = server.engine_pid
    stream = Stream(server.url, max_tokens=600)
    stream.wait_until_flowing()
    server.send_signal(signal.SIGTERM)
    wait_for(lambda: status(f"{server.url}/ready") == 503, timeout=2)
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=60).status_code == 503
    assert stream.end()[-1]["choices"][0]["finish_reason"] == "length"
    assert server.exit_code() == 0
    assert not is_running(engine)


# SIGINT after SIGTERM is in tests/cpu/server/test_run.py.
def test_a_second_signal_stops_at_once(server: ServerProgram) -> None:
    engine = server.engine_pid
    stream = Stream(server.url, max_tokens=30_000)
    stream.wait_until_flowing()
    server.send_signal(signal.SIGTERM)
    wait_for(lambda: status(f"{server.url}/ready") == 503, timeout=2)
    assert server.process.poll() is None
    server.send_signal(signal.SIGTERM)
    assert server.exit_code(5) == 0
    assert stream.end(timeout=1)[-1]["error"]["code"] == "aborted"
    assert not is_running(engine)


@pytest.mark.alone
def test_the_engine_of_a_killed_idle_server_ends_at_once(server: ServerProgram) -> None:
    engine = server.engine_pid
    time.sleep(0.7)  # a heartbeat has been sent
    server.send_signal(signal.SIGKILL)
    wait_for(lambda: not is_running(engine), timeout=1)


def test_a_server_killed_while_it_loads_leaves_no_engine(tiny_directory: Path) -> None:
    with starting(tiny_directory, *TINY_FLAGS) as server:
        engine = wait_for_engine(server)
        server.send_signal(signal.SIGKILL)
        server.process.wait(5)
        wait_for(lambda: not is_running(engine), timeout=20)


def test_sigterm_while_it_loads_stops_at_once(tiny_directory: Path) -> None:
    with starting(tiny_directory, *TINY_FLAGS) as server:
        engine = wait_for_engine(server)
        server.send_signal(signal.SIGTERM)
        assert server.exit_code(6) == 143
        assert not is_running(engine)
        assert not any("Traceback" in line for line in server.lines)


@pytest.mark.parametrize("delay", [0.1, 0.4])
def test_ctrl_c_while_it_loads_stops_at_once(tiny_directory: Path, delay: float) -> None:
    with starting(tiny_directory, *TINY_FLAGS) as server:
        engine = wait_for_engine(server)
        time.sleep(delay)
        server.press_ctrl_c()
        assert server.exit_code(6) == 130
        assert not is_running(engine)
        assert server.lines[-1] == "onbeat: interrupted"
        assert not any("Traceback" in line for line in server.lines)


def wait_for_engine(server: ServerProgram) -> int:
    def has_engine() -> bool:
        try:
            return bool(server.engine_pid)
        except (AssertionError, FileNotFoundError):
            return False

    wait_for(has_engine, timeout=20)
    return server.engine_pid
