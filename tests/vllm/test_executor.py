"""Tiny models on vLLM's executor under onbeat's engine: tokens equal transformers', or vLLM's own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.vllm.executor_program import FAMILIES

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", params=list(FAMILIES))
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.executor_program", request.param, str(folder)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    line = next((each for each in done.stdout.splitlines() if each.startswith("RESULT ")), None)
    assert line is not None, done.stderr[-3000:]
    return dict(json.loads(line.removeprefix("RESULT ")))


def test_greedy_tokens_are_the_models(found: dict[str, Any]) -> None:
    assert found["preemptions"] > 0 or found["has_state"]
    assert (found["prefix_hits"] > 0) is not found["has_state"]
    wanted = dict.fromkeys(("alone", "together", "short"), found["num_asked"])
    if found["has_state"]:  # in bfloat16, where a state that is rounded at another place is another
        wanted |= {way: found["greedy"][way] for way in ("together", "short")}
    assert found["greedy"] == wanted


def test_penalties_know_what_came_before_a_preemption(found: dict[str, Any]) -> None:
    assert found["penalties_differ"]
    if not found["has_state"]:
        assert found["penalties"] == dict.fromkeys(("alone", "together", "short"), found["num_asked"])
    assert found["drawn"] == found["num_asked"]


def test_log_probabilities_are_the_models(found: dict[str, Any]) -> None:
    assert all(error < 1e-3 for error in found.get("logprob_errors", ()))


def test_answers_follow_their_grammar(found: dict[str, Any]) -> None:
    assert found["guided"]
    for *token_ids, reason in found["guided"]:
        assert (len(token_ids), reason) == (3, "stop"), found["guided"]
