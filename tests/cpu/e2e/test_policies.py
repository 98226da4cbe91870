"""Every policy serves the same greedy text through the whole program."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from onbeat.scheduler.replica.policies import POLICIES
from tests.cpu.e2e.conftest import SMOLLM2_FLAGS
from tests.cpu.e2e.program import ServerProgram, serving

PROMPTS = ["The capital of France is", "Once upon a time", "one two three four " * 40, "A"]


def texts(server: ServerProgram) -> list[str]:
    """Return the greedy answers to all prompts, asked for at once."""

    def ask(prompt: str) -> str:
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(ask, PROMPTS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--policy", "static"),
        ("--policy", "orca"),
        ("--policy", "prefill-first"),
        ("--policy", "sarathi", "--max-num-batched-tokens", "64"),
        ("--policy", "sarathi", "--async-scheduling"),
        ("--policy", "slo", "--async-scheduling", "--slo-tbt-ms", "5", "--slo-ttft-ms", "50"),
        ("--policy", "sarathi", "--scheduling-policy", "priority", "--no-enable-prefix-caching"),
    ],
    ids=" ".join,
)
def test_the_embedded_model(
    smollm2_gguf: Path, smollm2_server: ServerProgram, flags: tuple[str, ...]
) -> None:
    with serving(smollm2_gguf, *SMOLLM2_FLAGS, *flags) as server:
        assert texts(server) == texts(smollm2_server)


@pytest.mark.slow
def test_a_tiny_model(tiny_directory: Path) -> None:
    common = ("--load-format", "dummy", "--dtype", "float32", "--threads", "1", "--max-model-len", "1024")
    answers = []
    for policy in POLICIES:
        with serving(tiny_directory, *common, "--policy", policy) as server:
            answers.append(texts(server))
    assert all(len(text) > 0 for text in answers[0])
    assert answers[1:] == answers[:1] * (len(POLICIES) - 1)
