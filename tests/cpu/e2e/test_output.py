"""A server whose log goes nowhere: a full disk, a pipe that nobody reads."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx
import pytest

from benchmarks.harness.servers import free_port
from tests.cpu.e2e.program import command_line, is_running, read_metrics
from tests.waiting import wait_for

STAND_IN = ("--load-format", "stand-in", "--device", "h100-sxm", "--max-model-len", "4096")
PIPE_BYTES = 4096


@contextmanager
def serving_to(output: int | IO[bytes], port: int, tokenizer: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `onbeat serve` with its output there."""
    process = subprocess.Popen(
        command_line("serve", "Llama-3.1-8B", *STAND_IN, "--tokenizer", tokenizer, "--port", str(port)),
        stdout=output,
        stderr=output,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def check_serves_and_ends(process: subprocess.Popen[bytes], url: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as client:
        for _ in range(200):
            assert client.get("/v1/models").status_code == 200
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert client.get("/health").status_code == 200
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: process.poll() is not None, 20)
    assert process.returncode == 0
    wait_for(lambda: not any(is_running(int(child)) for child in children))


def test_a_full_disk(tiny_directory: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with Path("/dev/full").open("wb") as full, serving_to(full, port, tiny_directory) as process:
        wait_for(lambda: is_healthy(url))
        wait_for(lambda: read_metrics(httpx.get(f"{url}/metrics").text)["onbeat_log_lines_dropped_total"] > 0)
        check_serves_and_ends(process, url)


@pytest.mark.parametrize("is_read_again", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_pipe_that_nobody_reads(tiny_directory: Path, is_read_again: bool) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with serving_to(writer, port, tiny_directory) as process:
        os.close(writer)
        wait_for(lambda: is_healthy(url))
        if not is_read_again:
            check_serves_and_ends(process, url)
            assert len(os.read(reader, 2**20)) <= PIPE_BYTES
        else:
            for _ in range(200):
                assert httpx.get(f"{url}/v1/models").status_code == 200
            process.send_signal(signal.SIGTERM)
            with os.fdopen(os.dup(reader)) as lines:
                text = lines.read()
            assert process.wait(60) == 0
            assert len(re.findall("GET /v1/models 200", text)) == 200
            assert "draining" in text
    os.close(reader)
