"""Processes of vLLM that die, stand still or cannot start: streams go on as with our own engines."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

pytest.importorskip("vllm.v1.executor")

from tests.cpu.e2e.program import ServerProgram, environment, starting
from tests.cpu.e2e.tiny_directory import write_tiny_directory
from tests.fleet.test_stopped_server import Seen
from tests.vllm.test_executor import run
from tests.waiting import wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
START_SECONDS = 280.0
FLAGS = (
    *("--backend", "vllm", "--load-format", "dummy", "--dtype", "float32", "--max-model-len", "4096"),
    *("--max-num-seqs", "8", "--kv-cache-memory-bytes", "64MiB", "--enforce-eager"),
)


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[ServerProgram]:
    """Serve a tiny model by vLLM."""
    path = write_tiny_directory(folder / "model", hidden_size=128, head_dim=32)
    with starting(path, *FLAGS, *flags, env=environment(VLLM_LOGGING_LEVEL="ERROR")) as server:
        wait_for(lambda: server.url or server.process.poll() is not None, START_SECONDS)
        assert server.url, server.lines
        yield server


def workers_of(engine: int) -> list[int]:
    """Return the processes of vLLM's workers that an engine has."""
    tasks = Path(f"/proc/{engine}/task").glob("*/children")
    children = [int(each) for file in tasks for each in file.read_text().split()]
    return [each for each in children if b"VLLM::" in Path(f"/proc/{each}/cmdline").read_bytes()]


def is_there(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def is_ready(server: ServerProgram) -> bool:
    return httpx.get(f"{server.url}/ready", timeout=60).status_code == 200


def begin(server: ServerProgram, number: int, num_tokens: int) -> list[Seen]:
    """Begin streams, and wait until all run."""
    streams = [Seen(server, max_tokens=num_tokens) for _ in range(number)]
    wait_for(lambda: all(len(each.events) > 10 for each in streams), START_SECONDS)
    return streams


def check(streams: list[Seen], alone: Seen) -> None:
    """Check that all got every token once."""
    for each in streams:
        each._reader.join(START_SECONDS)
        assert not each._reader.is_alive(), "a stream hangs"
        assert len(each.token_times) == len(alone.token_times)
        assert each.text == alone.text


def test_streams_go_on_when_a_worker_stands_still_and_when_it_dies(tmp_path: Path) -> None:
    with serving(tmp_path, "--tensor-parallel-size", "2", "--threads", "2") as server:
        (alone,) = begin(server, 1, 1500)
        alone.end()
        engine = server.engine_pid
        workers = workers_of(engine)
        assert len(workers) == 2
        streams = begin(server, 4, 1500)
        os.kill(workers[0], signal.SIGSTOP)
        time.sleep(3)
        os.kill(workers[0], signal.SIGCONT)
        check(streams, alone)
        assert "onbeat_fleet_replicas_lost_total{r0}" not in server.metrics(), "none was lost"
        assert workers_of(engine) == workers
        streams = begin(server, 4, 1500)
        os.kill(workers[1], signal.SIGKILL)
        check(streams, alone)
        wait_for(lambda: is_ready(server), START_SECONDS)
        assert not [each for each in (engine, *workers) if is_there(each)]
        assert len(workers_of(server.engine_pid)) == 2
        metrics = server.metrics()
        assert metrics["onbeat_fleet_replicas_lost_total{r0}"] == 1
        assert metrics["onbeat_fleet_resumed_total"] > 0
        assert [line for line in server.lines if "worker of vLLM" in line]
        last = workers_of(server.engine_pid)
    assert not [each for each in last if is_there(each)]


def test_another_replica_takes_over_what_a_killed_engine_served(tmp_path: Path) -> None:
    with serving(tmp_path, "--replicas", "2") as server:
        (alone,) = begin(server, 1, 4000)
        alone.end()
        streams = begin(server, 4, 4000)
        busiest = max(server.fleet()["replicas"], key=lambda each: each["num_streaming"])
        assert busiest["num_streaming"] > 0
        os.kill(busiest["process_id"], signal.SIGKILL)
        check(streams, alone)
        assert is_ready(server)
        metrics = server.metrics()
        assert metrics["onbeat_fleet_resumed_total"] > 0
        assert metrics["onbeat_fleet_resumed_tokens_total"] > 0


def test_workers_end_where_their_start_fails_behind_them(tmp_path: Path) -> None:
    found = run("faults_program", str(tmp_path))
    assert "memory" in found["why"].lower()
    assert found["left"] == []
