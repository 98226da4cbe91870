"""`onbeat serve --record`, then `onbeat replay`: the programs as their user runs them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from onbeat.core.errors import ConfigError
from onbeat.recording.reader import Recording
from tests.cpu.e2e.program import ServerProgram, run_program, serving
from tests.cpu.e2e.tiny_directory import write_tiny_directory
from tests.waiting import wait_for

TINY = ("--load-format", "dummy", "--dtype", "float32", "--threads", "1", "--max-model-len", "1024")
FEW_BLOCKS = ("--kv-cache-memory-bytes", "530k", "--max-num-seqs", "16", "--max-num-batched-tokens", "64")
"""Fewer blocks than the requests want, so that some are preempted."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_directory(tmp_path_factory.mktemp("models") / "tiny")


async def ask(session: aiohttp.ClientSession, url: str, dice: random.Random) -> None:
    """Send a request; every sixth client leaves before the end."""
    start = 5 if dice.random() < 0.5 else dice.randrange(100, 200)
    body: dict[str, Any] = {
        "prompt": [(start + i) % 250 for i in range(dice.choice([3, 60, 200, 300]))],
        "max_tokens": dice.randrange(20, 260),
        "ignore_eos": dice.random() < 0.7,
        "temperature": 1.0,
    }
    if dice.random() < 0.3:
        body["stop"] = ["a"]
    try:
        async with asyncio.timeout(dice.choice([0.05, 0.3, None, None, None, None])):
            async with session.post(f"{url}/v1/completions", json=body) as reply:
                assert reply.status == 200, await reply.text()
                await reply.read()
    except TimeoutError:
        pass


async def load(server: ServerProgram, number: int, seed: int) -> None:
    dice = random.Random(seed)
    gate = asyncio.Semaphore(24)

    async def one(session: aiohttp.ClientSession) -> None:
        async with gate:
            await ask(session, server.url, dice)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(one(session) for _ in range(number)))


def num_steps_on_disk(record: Path) -> int:
    """Return what a kill would leave now."""
    try:
        return Recording(record, allow_partial=True).num_steps
    except ConfigError:
        return 0  # nothing was flushed yet


def replay(*arguments: str | Path, code: int = 0) -> str:
    run = run_program("replay", *arguments)
    assert run.returncode == code, run.stdout + run.stderr
    return run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["--no-async-scheduling", "--async-scheduling"])
def test_a_recorded_server_replays_identically(model: Path, tmp_path: Path, mode: str) -> None:
    record, found = tmp_path / "run.gz", tmp_path / "found.json"
    with serving(model, *TINY, *FEW_BLOCKS, mode, "--record", record) as server:
        while server.metrics()["onbeat_steps_total"] < 2000:
            asyncio.run(load(server, 150, seed=1))
        num_steps = server.metrics()["onbeat_steps_total"]
        server.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
    shown = replay(record, "--json", found)
    assert "decisions: identical" in shown
    result = json.loads(found.read_text())
    identity = result["identity"]
    assert identity["is_identical"]
    assert result["record"]["is_complete"]
    assert identity["num_steps"] == num_steps >= 2000
    assert identity["num_predictions"] == num_steps, "the step-time model learned the same"
    assert identity["num_preemptions"] > 0
    assert identity["num_prefix_hits"] > 0
    assert identity["num_aborted"] > 0
    assert set(result["forecasts"]) == {"recorded step times", "roofline (the engine's own)"}
    forecast = result["forecasts"]["recorded step times"]
    assert forecast["num_recorded_steps"] == num_steps
    assert {error["metric"] for error in forecast["errors"]} == {"ttft", "itl", "e2el"}


@pytest.mark.slow
def test_a_killed_engine_leaves_a_file_that_says_so(model: Path, tmp_path: Path) -> None:
    record = tmp_path / "run.gz"
    with serving(model, *TINY, "--record", record) as server:
        asyncio.run(load(server, 4, seed=2))
        wait_for(lambda: num_steps_on_disk(record) > 0)
        os.kill(server.engine_pid, signal.SIGKILL)
    refused = replay(record, code=2)
    assert f"{record} is cut short" in refused
    assert "--allow-partial" in refused
    shown = replay(record, "--allow-partial")
    assert "decisions: identical" in shown
    assert "cut short" in shown


def test_a_record_that_cannot_be_written_stops_the_start(model: Path) -> None:
    run = run_program("serve", model, *TINY, "--port", "0", "--record", "/dev/null/run.gz")
    assert run.returncode == 2
    assert "--record: cannot write /dev/null/run.gz" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing.gz",), "read nothing.gz:"),
        (("--allow-partail", "x.gz"), "--allow-partail; did you mean --allow-partial?"),
        (("x.gz", "--host-overhead-ms", "much"), "got 'much'"),
        ((), "FILE"),
    ],
)
def test_bad_command_lines_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    said = replay(*arguments, code=2)
    assert message in said
    assert said.count("\n") == 1
