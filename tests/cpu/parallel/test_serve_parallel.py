"""`onbeat serve --tensor-parallel-size 2`: the program, its sentences, a dead rank, and no process left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.cpu.e2e.program import ServerProgram, is_running, run_program, serving
from tests.cpu.e2e.tiny_directory import write_tiny_directory
from tests.cpu.parallel.processes import rank_pids
from tests.waiting import wait_for

FLAGS = (
    *("--load-format", "dummy", "--dtype", "float32", "--device", "cpu", "--kv-cache-memory-bytes", "32M"),
    *("--max-model-len", "4k", "--step-time-profile", "roofline"),
)
REQUEST = {"prompt": "The sky is", "max_tokens": 24, "temperature": 0, "ignore_eos": True}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_directory(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def server(directory: Path) -> Iterator[ServerProgram]:
    with serving(directory, *FLAGS, "--threads", "2", "-tp", "2") as program:
        yield program


def complete(url: str) -> str:
    reply = httpx.post(f"{url}/v1/completions", json=REQUEST, timeout=30)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def test_a_split_server_answers_as_a_whole_one(server: ServerProgram, directory: Path) -> None:
    with serving(directory, *FLAGS, "--threads", "1", "--backend", "torch") as whole:
        expected = complete(whole.url)
    assert complete(server.url) == expected
    assert any("tensor parallel: 2 ranks of 1 thread each" in line for line in server.lines), server.lines
    engine = server.engine_pid
    [rank] = rank_pids(engine)
    server.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0
    assert not is_running(engine)
    assert not is_running(rank)


def test_streams_go_on_in_another_engine_when_a_rank_is_killed(server: ServerProgram) -> None:
    engine = server.engine_pid
    [rank] = rank_pids(engine)
    request = {**REQUEST, "max_tokens": 3000}
    whole = httpx.post(f"{server.url}/v1/completions", json=request, timeout=60).json()["choices"]
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(httpx.post, f"{server.url}/v1/completions", json=request, timeout=120)
            for _ in range(2)
        ]
        wait_for(lambda: server.metrics()["onbeat_requests_running"] == 2)
        os.kill(rank, signal.SIGKILL)
        replies = [future.result() for future in running]
    for reply in replies:
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"] == whole
    wait_for(lambda: not is_running(engine))
    cause = f"rank 1 (process {rank}) was ended by SIGKILL"
    assert any("r0 is lost" in line and cause in line for line in server.lines)
    assert not any("Traceback" in line for line in server.lines)


def test_a_rank_killed_while_nothing_runs_is_noticed(server: ServerProgram) -> None:
    complete(server.url)
    engine = server.engine_pid
    [rank] = rank_pids(engine)
    os.kill(rank, signal.SIGKILL)
    wait_for(lambda: not is_running(engine))
    wait_for(lambda: httpx.get(f"{server.url}/ready").status_code == 200, timeout=60)
    complete(server.url)
    cause = f"rank 1 (process {rank}) was ended by SIGKILL"
    assert any("r0 is lost" in line and cause in line for line in server.lines)


def test_a_size_that_does_not_divide_is_one_line(directory: Path) -> None:
    done = run_program("serve", directory, *FLAGS, "--tensor-parallel-size", "3", "--port", "0")
    assert done.returncode == 2
    assert "sizes that do: 1, 2, 4" in done.stderr
    assert "Traceback" not in done.stderr
