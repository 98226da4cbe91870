"""Answers under a schema through deaths and moves of replicas: valid, and the same as undisturbed."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cpu.e2e.program import ServerProgram, run_program, serving
from tests.fleet.test_stand_ins import EIGHT_B, busiest, row
from tests.grammars import check_valid
from tests.schemas import SCHEMAS, items, text, thing, whole
from tests.waiting import wait_for

NUM_STREAMS = 120


def schema_of(number: int) -> dict[str, Any]:
    """Return a schema whose answers last for some seconds, and differ."""
    entry = thing({"n": whole(0, 99), "of": SCHEMAS[number % 20], "s": text(3)})
    length = 12 + number % 5
    return items(entry, length, minItems=length)


def complete(server: ServerProgram, number: int) -> dict[str, Any]:
    body = {
        "prompt": f"{number} is it. " * 20,
        "max_tokens": 1500,
        "seed": number,
        "temperature": 0.8 * (number % 2),
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": schema_of(number), "strict": True},
        },
    }
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=240)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer["choices"][0]  # type: ignore[no-any-return]


@pytest.mark.slow
def test_guided_streams_through_a_death_and_a_move(smollm2_gguf: Path, tmp_path: Path) -> None:
    record = tmp_path / "fleet.gz"
    flags = ["--replicas", "3", "--policy", "slo", "--record", str(record), "--max-num-seqs", "96"]
    with serving("Llama-3.1-8B", "--tokenizer", smollm2_gguf, *EIGHT_B, *flags) as server:
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            expected = list(pool.map(lambda number: complete(server, number), range(NUM_STREAMS)))
            running = [pool.submit(complete, server, number) for number in range(NUM_STREAMS)]
            wait_for(lambda: busiest(server)["num_streaming"] >= 20)
            killed = busiest(server)
            os.kill(killed["process_id"], signal.SIGKILL)
            other = next(each for each in ("r0", "r1", "r2") if each != killed["replica"])
            drain = {"replica": other, "timeout": 60, "restart": True}
            assert server.change_fleet("drain", **drain).status_code == 200
            answers = [future.result() for future in running]
        assert answers == expected
        for number, answer in enumerate(answers):
            assert answer["finish_reason"] == "stop"
            check_valid(answer["text"], schema_of(number))
        wait_for(lambda: row(server, other)["num_lives"] == 2, timeout=60)
        values = server.metrics()
        assert values["onbeat_fleet_resumed_total"] >= 10
        assert values["onbeat_fleet_moves_total{moved,drain}"] >= 10
        server.send_signal(signal.SIGTERM)
        assert server.exit_code(30) == 0
    for path in sorted(tmp_path.glob("fleet.gz*")):
        replay = run_program("replay", path, "--allow-partial")  # one was killed
        assert "decisions: identical" in replay.stdout, (path, replay.stdout + replay.stderr)
