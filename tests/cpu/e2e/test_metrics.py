"""/metrics and the timeline agree with what clients were told."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import httpx

from tests.cpu.e2e.program import SMALL, ServerProgram, serving
from tests.waiting import wait_for


def complete(server: ServerProgram, **fields: Any) -> dict[str, Any]:
    reply = httpx.post(f"{server.url}/v1/completions", json={"temperature": 0, **fields}, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json()["usage"])


def test_tokens_counted_are_the_tokens_of_usage(smollm2_server: ServerProgram) -> None:
    before = smollm2_server.metrics()
    usages = [
        complete(smollm2_server, prompt="Count with me: one, two," * 4, max_tokens=5),
        complete(smollm2_server, prompt="Count with me: one, two," * 4, max_tokens=7),
        complete(smollm2_server, prompt=["a b", "c d e"], max_tokens=3, n=2),
    ]
    after = smollm2_server.metrics()

    def moved(name: str) -> float:
        return after[name] - before[name]

    assert moved("onbeat_output_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
    assert moved("onbeat_prompt_tokens_cached_total") == sum(
        usage.get("prompt_tokens_details", {}).get("cached_tokens", 0) for usage in usages
    )
    assert moved("onbeat_prompt_tokens_cached_total") >= 16
    num_choices = 6
    assert moved("onbeat_time_to_first_token_seconds_count") == num_choices
    assert moved("onbeat_request_e2e_seconds_count") == num_choices
    assert moved("onbeat_requests_total{length}") + moved("onbeat_requests_total{stop}") == num_choices
    assert moved("onbeat_requests_total{error}") == 0
    assert moved("onbeat_steps_total") == moved("onbeat_step_seconds_count") > 0
    assert moved("onbeat_time_to_first_token_seconds_sum") <= moved("onbeat_request_e2e_seconds_sum")
    for name in ("onbeat_requests_running", "onbeat_requests_waiting", "onbeat_kv_blocks_used"):
        assert after[name] == 0
    assert after["onbeat_kv_blocks"] > 100


def test_the_batch_shows_while_it_runs(smollm2_server: ServerProgram) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 200, "stream": True, "n": 3, "ignore_eos": True}
    with httpx.stream("POST", f"{smollm2_server.url}/v1/completions", json=body, timeout=60) as reply:
        lines = reply.iter_lines()  # kept: dropping the iterator would close the connection
        next(lines)
        wait_for(lambda: smollm2_server.metrics()["onbeat_requests_running"] == 3)
        assert smollm2_server.metrics()["onbeat_kv_blocks_used"] > 0
    # Leaving aborts all three and frees their blocks.
    wait_for(lambda: smollm2_server.metrics()["onbeat_requests_running"] == 0, timeout=5)
    after = smollm2_server.metrics()
    assert after["onbeat_kv_blocks_used"] == 0
    assert after["onbeat_requests_total{abort}"] >= 3


def test_timeline_and_alias_names(tiny_directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    flags = ("--load-format", "dummy", *SMALL, "--timeline", file, "--metrics-aliases", "vllm")
    with serving(tiny_directory, *flags) as server:
        assert server.metrics()["onbeat_kv_blocks_used"] == 0
        for _ in range(3):
            complete(server, prompt="hello", max_tokens=20, ignore_eos=True)
        values = server.metrics()
        assert values["onbeat_output_tokens_total"] == 60
        aliases = {name: value for name, value in values.items() if name.startswith("vllm:generation_tokens")}
        assert list(aliases.values()) == [60]
        server.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
    events = json.loads(file.read_text())
    names = [event["name"] for event in events]
    assert names.count("step") == values["onbeat_steps_total"]
    spans = [(event["name"], event["ph"]) for event in events]
    for span in (("queued", "X"), ("prefill", "X"), ("decode", "B"), ("decode", "E")):
        assert spans.count(span) == 3
    assert all(event.get("dur", 0) >= 0 and event.get("ts", 0) >= 0 for event in events)
