"""A live fleet that changes its own size, from none to several and back, before stand-ins for GPUs."""

from __future__ import annotations

import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cpu.e2e.program import ServerProgram, run_program, serving
from tests.waiting import wait_for

L4 = ("--load-format", "stand-in", "--device", "l4", "--max-model-len", "4096", "--policy", "slo")
"""A prompt of 2,600 tokens takes it some 0.5 s."""


def complete(server: ServerProgram, number: int, **fields: Any) -> httpx.Response:
    body = {"prompt": f"{number} is it. " * 400, "max_tokens": 8, "temperature": 0, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)


def num_ready(server: ServerProgram) -> int:
    return sum(each["state"] == "ready" for each in server.fleet()["replicas"])


@pytest.mark.slow
def test_a_fleet_follows_its_load_from_none_to_several_and_back(smollm2_gguf: Path, tmp_path: Path) -> None:
    record = tmp_path / "fleet.gz"
    flags = ("--autoscale", "0..2", "--scale-down-seconds", "4", "--record", record)
    with serving("Llama-3.1-8B", "--tokenizer", smollm2_gguf, *L4, *flags) as server:
        scaling = server.fleet()["scaling"]
        assert [scaling[key] for key in ("policy", "least", "most", "planned_share")] == [
            "objective",
            0,
            2,
            0.85,
        ]
        wait_for(lambda: not server.fleet()["replicas"], timeout=60)
        for path in ("/health", "/ready"):
            assert httpx.get(server.url + path, timeout=30).status_code == 200, "it only sleeps"
        # from none: the first request waits for a replica; who would not wait is told
        hasty = complete(server, 0, slo={"ttft_ms": 50, "shed": True})
        assert hasty.status_code == 429, hasty.text
        assert int(hasty.headers["retry-after"]) >= 1
        first = complete(server, 1)
        assert first.status_code == 200, first.text
        # more than one of them can do: six prompts a second, if this client can send as many
        with ThreadPoolExecutor(100) as pool:
            sent: list[Future[httpx.Response]] = []
            end = time.monotonic() + 240
            while num_ready(server) < 2 and time.monotonic() < end:
                sent += [pool.submit(complete, server, 10 + len(sent) + each) for each in range(3)]
                time.sleep(0.5)
            assert num_ready(server) == 2, server.fleet()
            answers = [each.result() for each in sent]
        assert {each.status_code for each in answers} == {200}
        wait_for(lambda: not server.fleet()["replicas"], timeout=120)
        assert server.fleet()["scaling"]["why"] == "spare"
        values = server.metrics()
        assert values["onbeat_fleet_replicas_wanted"] == 0
        assert values["onbeat_fleet_rescales_total{up,arrival}"] >= 1
        assert values["onbeat_fleet_rescales_total{up,work}"] >= 1
        assert values["onbeat_fleet_rescales_total{down,spare}"] >= 2
        # a number that is asked for holds
        asked = server.change_fleet("scale", replicas=1)
        assert asked.status_code == 200, asked.text
        wait_for(lambda: num_ready(server) == 1, timeout=60)
        bounds = server.change_fleet("scale", min=2, max=3).json()
        assert (bounds["scaling"]["least"], bounds["scaling"]["most"]) == (2, 3)
        wait_for(lambda: num_ready(server) == 2, timeout=60)
        for wrong in ({"min": 3, "max": 2}, {"min": 1}, {"replicas": 1, "max": 2}, {}):
            assert server.change_fleet("scale", **wrong).status_code == 400
        server.send_signal(signal.SIGTERM)
        assert server.exit_code(30) == 0
    replay = run_program("replay", record)
    assert "decisions: identical" in replay.stdout, replay.stdout + replay.stderr
    assert "Rescale" not in replay.stdout
    assert "work" in replay.stdout
