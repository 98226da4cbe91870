"""`onbeat serve` where vLLM is installed: what it takes for a model, and says at its start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm.v1.executor")

from tests.cpu.e2e.program import environment, starting
from tests.cpu.e2e.tiny_directory import write_tiny_directory
from tests.waiting import wait_for

pytestmark = pytest.mark.vllm
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 512,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
}
SMALL = ("--load-format", "dummy", "--threads", "1", "--max-model-len", "256", "--dtype", "float32")


@pytest.mark.parametrize(
    ("model", "by"),
    [
        ({"head_dim": 32}, "by the native engine"),
        ({"head_dim": 32, "rope_scaling": LONGROPE}, "kind 'longrope'"),
    ],
)
def test_the_start_says_which_engine_runs_and_why(tmp_path: Path, model: dict[str, Any], by: str) -> None:
    path = write_tiny_directory(tmp_path / "model", max_position_embeddings=1024, **model)
    with starting(path, *SMALL, env=environment(VLLM_LOGGING_LEVEL="ERROR")) as server:
        wait_for(lambda: server.url or server.process.poll() is not None, 280)
        assert server.url, server.lines
        (headline,) = [line for line in server.lines if "loading" in line and "LlamaForCausalLM" in line]
        assert by in headline
        assert ("by vLLM" in headline) is ("native" not in by)
        body = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
        assert answer["usage"]["completion_tokens"] == 4


def test_workers_of_vllms_own_stay_when_the_model_is_loaded(tmp_path: Path) -> None:
    path = write_tiny_directory(tmp_path / "model", max_position_embeddings=1024, head_dim=32)
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text("vllm:\n  distributed-executor-backend: mp\n")
    own = ("--backend", "vllm", "--config", str(theirs))
    with starting(path, *SMALL, *own, env=environment(VLLM_LOGGING_LEVEL="ERROR")) as server:
        wait_for(lambda: server.url or server.process.poll() is not None, 280)
        assert server.url, server.lines
        body = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
        assert answer["usage"]["completion_tokens"] == 4
