"""A vLLM server with onbeat in it, as users start it. ONBEAT_VLLM_MODEL names the folder of a small model."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler")

from tests.vllm.live import serving

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif("ONBEAT_VLLM_MODEL" not in os.environ, reason="ONBEAT_VLLM_MODEL names no model"),
]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FAULTS = ("onbeat failed", "is not the planned one", "plans no more")
"""Of the log, where a step was not as planned."""


def words(num: int, seed: int) -> str:
    rng = random.Random(seed)
    known = ("time", "house", "river", "people", "work", "place", "water", "world", "music", "letter", "city")
    return " ".join(rng.choice(known) for _ in range(num))


def check_log(server) -> None:
    text = server.log.read_text()
    assert not [each for each in FAULTS if each in text], text[-3000:]


@pytest.fixture(scope="module")
def model():
    return os.environ["ONBEAT_VLLM_MODEL"]


EXACT = ("--dtype", "float32", "--max-num-seqs", "8", "--max-num-batched-tokens", "512")


def tokens_of(server):
    """Ask for 24 answers, 8 at a time; greedy and in float32, so that nothing but a fault changes them."""
    bodies = [body(20 + 97 * index % 600, index, max_tokens=24 + 5 * index % 40) for index in range(24)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda each: server.post(COMPLETIONS, {**each, "return_token_ids": True}), bodies)
        )
    assert [answer.status for answer in answers] == [200] * 24
    tokens = [answer.body["choices"][0]["token_ids"] for answer in answers]
    assert [len(each) for each in tokens] == [each["max_tokens"] for each in bodies]
    return tokens


def body(num_words=20, seed=1, *, max_tokens=8, **more):
    return {
        "model": "default",
        "prompt": words(num_words, seed),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("plain"), model, EXACT) as server:
        return tokens_of(server)


def test_with_objectives_tokens_are_those_of_vllm(plain, model, tmp_path):
    objectives = ("--slo-ttft-ms", "1000", "--slo-tbt-ms", "60", "--slo-mode", "gap")
    with serving(tmp_path, model, EXACT, onbeat=objectives) as server:
        found = tokens_of(server)
    check_log(server)
    assert found == plain


def test_under_random_plans_tokens_are_those_of_vllm(plain, model, tmp_path):
    counts = tmp_path / "counts.json"
    flags = (*EXACT, "--scheduler-cls", "tests.vllm.chaos.ChaosScheduler")
    with serving(tmp_path, model, flags, CHAOS_COUNTS=str(counts)) as server:
        found = tokens_of(server)
    check_log(server)
    counted = json.loads(counts.read_text())
    assert found == plain
    assert counted["faults"] == counted["mismatches"] == 0
    assert counted["planned"] > 10 * counted["foreign"]
    assert counted["skipped"] > 100
    assert counted["preempted"] > 3


def test_steps_are_measured_while_nobody_is_served(model, tmp_path):
    flags = ("--dtype", "float32", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
    with serving(tmp_path, model, flags, onbeat=(), XDG_CACHE_HOME=str(tmp_path)) as server:
        assert server.post(COMPLETIONS, body(slo={"ttft_ms": 60_000})).status == 200
        assert "guessed" in server.log.read_text()
        deadline = time.monotonic() + 600
        while "step times: measured in" not in server.log.read_text():
            assert time.monotonic() < deadline, server.log.read_text()[-3000:]
            time.sleep(1)
        answer = server.post(COMPLETIONS, body(slo={"ttft_ms": 60_000}))
        assert answer.body["slo"]["met"] is True
    check_log(server)
    assert len(list((tmp_path / "onbeat" / "profiles" / "vllm").iterdir())) == 1


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    flags = ("--dtype", "float32", "--max-num-seqs", "1", "--max-num-batched-tokens", "256")
    with serving(tmp_path_factory.mktemp("server"), model, flags, onbeat=()) as server:
        server.post(COMPLETIONS, body(max_tokens=20))  # the first steps are slow
        yield server


def test_the_last_event_of_a_stream_has_the_verdict(server):
    objectives = {"ttft_ms": 60_000, "tbt_ms": 30_000, "shed": True}
    answer = server.post(COMPLETIONS, body(stream=True, slo=objectives))
    assert answer.status == 200
    with_verdict = [index for index, event in enumerate(answer.events) if "slo" in event]
    assert with_verdict == [len(answer.events) - 1]
    verdict = answer.events[-1]["slo"]
    assert verdict["met"] is True
    assert 0 < verdict["ttft_ms"] < 60_000
    assert verdict["predicted_ttft_ms"] > 0


def test_chats_and_whole_answers_have_it_too(server):
    ask = body(slo={"ttft_ms": 60_000})
    assert server.post(COMPLETIONS, ask).body["slo"]["met"] is True
    del ask["prompt"]
    ask["messages"] = [{"role": "user", "content": "Why is the sky blue?"}]
    assert server.post(CHAT, ask).body["slo"]["met"] is True
    assert server.post(CHAT, {**ask, "stream": True}).events[-1]["slo"]["met"] is True


def test_a_header_states_objectives(server):
    answer = server.post(COMPLETIONS, body(), x_llm_d_slo_ttft_ms="60000")
    assert answer.body["slo"]["met"] is True
    assert server.post(COMPLETIONS, body()).body.get("slo") is None


def test_a_wrong_objective_is_named(server):
    answer = server.post(COMPLETIONS, body(slo={"ttft_sm": 5}))
    assert answer.status == 400
    assert "ttft_ms" in answer.body["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_who_would_be_late_and_says_so_is_refused(server, stream):
    ask = body(slo={"ttft_ms": 1, "shed": True}, stream=stream)
    server.post(COMPLETIONS, ask)  # an idle server that has seen few steps may try one
    answer = server.post(COMPLETIONS, ask)
    assert answer.status == 429
    assert answer.headers["x-should-retry"] == "false"
    assert "idle" in answer.body["error"]["message"]
    assert answer.body["error"]["predicted_ttft_ms"] > 1


def test_who_waits_in_vain_is_told_so(server):
    """The engine stands still before it has seen the request, which would be served at once else."""
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.post, COMPLETIONS, body(max_tokens=60))
        time.sleep(0.5)
        os.kill(server.engine_pid(), signal.SIGSTOP)
        ask = body(slo={"ttft_ms": 8000, "shed": True}, stream=True)
        second = pool.submit(server.post, COMPLETIONS, ask)
        time.sleep(9)
        os.kill(server.engine_pid(), signal.SIGCONT)
        assert first.result().status == 200
        assert second.result().status in {429, 504}


def test_metrics_are_both(server):
    text = server.get("/metrics")
    assert "vllm:num_requests_running" in text
    for name in ("onbeat_slo_attainment", "onbeat_requests_late", "onbeat_step_time_ratio"):
        assert name in text


def test_an_engine_that_is_killed_ends_all_with_a_sentence(server):
    """The last one: nothing serves after it."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.post, COMPLETIONS, body(max_tokens=1500, slo={"ttft_ms": 60_000}))
        time.sleep(1)
        check_log(server)
        os.kill(server.engine_pid(), signal.SIGKILL)
        answer = asked.result()
    assert answer.status == 500
    assert "EngineCore" in answer.body["error"]["message"]
    server.process.wait(60)
