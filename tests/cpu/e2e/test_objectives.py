"""Promises through the real program: what it says at start, in answers, in refusals and in metrics."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cpu.e2e.program import SMALL, run_program, serving
from tests.waiting import wait_for

TINY = ("--load-format", "dummy", "--dtype", "float32", *SMALL)
PLANNED = ("--policy", "slo", "--step-time-profile", "roofline", "--max-num-seqs", "1")

CLASSES = """
classes:
  - {name: hopeless, ttft_ms: 1, tbt_ms: 1, e2e_ms: 1, shed: true}
  - {name: patient, ttft_ms: 3600000, tbt_ms: 3600000}
api_keys:
  - {key_env: PATIENT_KEY, class: patient}
"""


def ask(url: str, *, key: str = "plain", max_tokens: int = 4, **fields: Any) -> httpx.Response:
    body = {"prompt": [5] * 40, "max_tokens": max_tokens, "ignore_eos": True, **fields}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)


@pytest.mark.slow
def test_promises_from_flags_to_metrics(
    tiny_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATIENT_KEY", "patient-key")
    file = tmp_path / "classes.yaml"
    file.write_text(CLASSES)
    keys = ("--api-key", "plain", "--api-key", "patient-key")
    flags = ("--slo-classes", file, *keys, "--max-num-queued-reqs", "2")
    with serving(tiny_directory, *TINY, *PLANNED, *flags) as server:
        kept = ask(server.url, key="patient-key").json()["slo"]
        assert (kept["class"], kept["met"], kept["relegated"]) == ("patient", True, False)
        assert "slo" not in ask(server.url).json()
        num_refused = check_full_queue(server.url)
        check_hopeless(server.url)
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'onbeat_slo_requests_total{outcome="good",slo_class="patient"}' in metrics
        assert f'onbeat_requests_rejected_total{{reason="queue_full"}} {num_refused}.0' in metrics
        assert f"{num_refused} queue_full" in run_program("top", server.url, "--once").stdout
        assert "patient-key" not in metrics + "\n".join(server.lines)


@pytest.mark.slow
def test_a_queue_that_is_too_long_is_refused_and_counted(tiny_directory: Path) -> None:
    flags = ("--max-queue-seconds", "0.000001")
    with serving(tiny_directory, *TINY, *PLANNED, *flags) as server:
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda _: ask(server.url, max_tokens=200), range(6)))
        refused = [answer for answer in answers if answer.status_code == 503]
        assert {answer.status_code for answer in answers} == {200, 503}
        for answer in refused:
            assert answer.json()["error"]["code"] == "server_overloaded"
            assert "max_queue_seconds" in answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) >= 1
            assert int(answer.headers["retry-after-ms"]) >= 50
        wait_for(lambda: httpx.get(f"{server.url}/load").json()["server_load"] == 0)
        metrics = httpx.get(f"{server.url}/metrics").text
        assert f'onbeat_requests_rejected_total{{reason="queue_too_long"}} {len(refused)}.0' in metrics
        assert "onbeat_predicted_queue_seconds 0.0" in metrics
        assert ask(server.url).status_code == 200


def check_full_queue(url: str) -> int:
    """One request runs and two wait: one more is refused, whatever it was promised. Return how many were."""
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: ask(url, max_tokens=200), range(6)))
    refused = [answer for answer in answers if answer.status_code == 503]
    assert {answer.status_code for answer in answers} == {200, 503}
    for answer in refused:
        assert answer.json()["error"]["code"] == "server_overloaded"
        assert int(answer.headers["retry-after"]) >= 1
    wait_for(lambda: httpx.get(f"{url}/load").json()["server_load"] == 0)
    return len(refused)


def check_hopeless(url: str) -> None:
    """Behind long requests, a TTFT of 1 ms is refused at once or once it is out of reach; never answered."""
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            ahead = [pool.submit(ask, url, max_tokens=900) for _ in range(2)]
            wait(ahead, timeout=0.05)
            refused = ask(url, slo={"class": "hopeless"})
            was_behind = not all(map(Future.done, ahead))
            assert [long.result().status_code for long in ahead] == [200, 200]
            if was_behind or refused.status_code != 200:  # else a busy machine was too late to ask
                break
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) in {(429, "slo_unattainable"), (504, "deadline_exceeded")}
    assert error["slo"] == {"ttft_ms": 1.0, "tbt_ms": 1.0, "e2e_ms": 1.0, "class": "hopeless"}
