"""The real program before stand-ins for GPUs: their text depends on all that their KV holds."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cpu.e2e.program import ServerProgram, is_running, run_program, serving
from tests.cpu.e2e.tiny_directory import write_tiny_directory
from tests.waiting import wait_for

STAND_IN = ("--load-format", "stand-in", "--device", "h100-sxm", "--max-model-len", "4096")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_directory(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "fleet.gz"


@pytest.fixture
def server(directory: Path, record: Path) -> Iterator[ServerProgram]:
    with serving(directory, *STAND_IN, "--replicas", "3", "--record", record) as program:
        yield program


def complete(server: ServerProgram, number: int, **fields: Any) -> dict[str, Any]:
    body = {"prompt": f"{number} " * 40, "max_tokens": 3500, "ignore_eos": True, "seed": number, **fields}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def rows(server: ServerProgram) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.fleet()["replicas"]
    return found


@pytest.mark.slow
def test_texts_are_the_same_through_deaths_and_drains(server: ServerProgram, record: Path) -> None:
    sampled = {"temperature": 0.9, "presence_penalty": 0.7, "logprobs": 2, "echo": True}
    whole = [complete(server, number, **sampled)["choices"] for number in range(6)]
    processes = server.engine_pids
    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(complete, server, number, **sampled) for number in range(6)]
        wait_for(lambda: sum(row["num_streaming"] for row in rows(server)) >= 2)
        busiest = max(rows(server), key=lambda row: row["num_streaming"])
        os.kill(busiest["process_id"], signal.SIGKILL)
        other = next(row for row in rows(server) if row["replica"] != busiest["replica"])
        drain = {"replica": other["replica"], "timeout": 0, "restart": True}
        assert server.change_fleet("drain", **drain).status_code == 200
        answers = [future.result() for future in running]
    assert [answer["choices"] for answer in answers] == whole
    assert all(answer["usage"]["completion_tokens"] == 3500 for answer in answers)
    wait_for(lambda: all(row["state"] == "ready" for row in rows(server)), timeout=60)
    values = server.metrics()
    assert values["onbeat_fleet_resumed_total"] >= 1
    assert values["onbeat_fleet_lost_total"] == 0
    server.send_signal(signal.SIGTERM)
    assert server.exit_code(30) == 0
    assert not any(map(is_running, processes))
    replay = run_program("replay", record)
    assert "decisions: identical" in replay.stdout, replay.stdout + replay.stderr
    assert {path.name for path in record.parent.glob("fleet.gz.r?")} == {f"fleet.gz.r{n}" for n in range(3)}


EIGHT_B = ("--load-format", "stand-in", "--device", "h100-sxm", "--max-model-len", "4096")


@pytest.mark.slow
def test_texts_are_the_same_where_streams_move(smollm2_gguf: Path, tmp_path: Path) -> None:
    record = tmp_path / "fleet.gz"
    pools = ["--disaggregate", "prefill=1,decode=2", "--policy", "slo", "--record", str(record)]
    pools += ["--max-num-batched-tokens", "256"]  # a prompt takes several steps
    pools += ["--kinds", "device=h200,tp=2,policy=sarathi", "device=a100-80-sxm,replicas=2"]
    with serving("Llama-3.1-8B", "--tokenizer", smollm2_gguf, *EIGHT_B, *pools) as server:
        bodies = [{"prompt": f"{number} is it. " * 250, "max_tokens": 250} for number in range(6)]
        for body in bodies[::2]:
            body["prompt_logprobs"] = 1
        whole = [complete(server, number, **body)["choices"] for number, body in enumerate(bodies)]
        before = server.metrics()["onbeat_fleet_moves_total{moved,prefill}"]
        assert before == len(bodies), "each prompt was computed on r0"
        with ThreadPoolExecutor(6) as pool:
            running = [pool.submit(complete, server, each, **body) for each, body in enumerate(bodies)]
            wait_for(lambda: row(server, "r1")["num_streaming"] >= 1)
            drain = {"replica": "r1", "timeout": 60, "restart": True}
            assert server.change_fleet("drain", **drain).status_code == 200
            answers = [future.result() for future in running]
        assert [answer["choices"] for answer in answers] == whole
        wait_for(lambda: row(server, "r1")["num_lives"] == 2, timeout=60)
        values = server.metrics()
        assert values["onbeat_fleet_resumed_total"] == 0
        assert values["onbeat_fleet_moves_total{moved,drain}"] > 0
        assert values["onbeat_fleet_moved_bytes_total"] > 0
        server.send_signal(signal.SIGTERM)
        assert server.exit_code(30) == 0
    for path in sorted(tmp_path.glob("fleet.gz*")):
        replay = run_program("replay", path)
        assert "decisions: identical" in replay.stdout, (path, replay.stdout + replay.stderr)


@pytest.mark.slow
def test_a_real_model_says_the_same_where_its_streams_move(smollm2_gguf: Path) -> None:
    flags = ["--max-model-len", "1024", "--kv-cache-memory-bytes", "200M", "--replicas", "2"]
    flags += ["--kinds", "policy=sarathi", "policy=slo"]
    with serving(smollm2_gguf, *flags) as server:
        bodies = [
            {"prompt": f"Story {number}: once upon a time", "max_tokens": 300, "temperature": number % 2}
            for number in range(6)
        ]
        whole = [complete(server, number, **body)["choices"] for number, body in enumerate(bodies)]
        with ThreadPoolExecutor(6) as pool:
            running = [pool.submit(complete, server, each, **body) for each, body in enumerate(bodies)]
            wait_for(lambda: busiest(server)["num_streaming"] >= 2)
            drained = busiest(server)
            os.kill(drained["process_id"], signal.SIGTERM)
            answers = [future.result() for future in running]
        assert [answer["choices"] for answer in answers] == whole
        wait_for(lambda: row(server, drained["replica"])["num_lives"] == 2, timeout=60)
        values = server.metrics()
        assert values["onbeat_fleet_resumed_total"] == 0
        assert values["onbeat_fleet_moves_total{moved,drain}"] >= 1
        assert values["onbeat_fleet_moved_bytes_total"] % (16 * 23_040) == 0, "whole blocks"


def busiest(server: ServerProgram) -> dict[str, Any]:
    return max(rows(server), key=lambda each: each["num_streaming"])


def row(server: ServerProgram, replica: str) -> dict[str, Any]:
    return next(each for each in rows(server) if each["replica"] == replica)


@pytest.mark.slow
def test_embeddings_are_the_same_through_a_death(server: ServerProgram, record: Path) -> None:
    texts = [f"{number} " * 400 for number in range(2000)]

    def embed() -> list[list[float]]:
        body = {"input": texts, "dimensions": 32, "truncate_prompt_tokens": 1000}
        reply = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["prompt_tokens"] > 2000 * 400
        return [each["embedding"] for each in reply.json()["data"]]

    whole = embed()
    assert len({tuple(vector) for vector in whole}) == 2000
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(embed)
        wait_for(lambda: min(row["num_outstanding"] for row in rows(server)) >= 1)
        os.kill(rows(server)[0]["process_id"], signal.SIGKILL)
        assert running.result() == whole
    wait_for(lambda: all(row["state"] == "ready" for row in rows(server)), timeout=60)
    server.send_signal(signal.SIGTERM)
    assert server.exit_code(30) == 0
    replay = run_program("replay", record)
    assert "decisions: identical" in replay.stdout, replay.stdout + replay.stderr
