"""Tiny models on vLLM's executor under onbeat's engine: tokens equal transformers', or vLLM's own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.vllm.tiny_models import FAMILIES

pytestmark = pytest.mark.vllm


WAYS = ("alone", "together", "short")
SEVERAL = {
    "Llama-tensors": {"tensor_parallel_size": 2},
    "Llama-stages": {"pipeline_parallel_size": 2, "enforce_eager": False},
}
"""Workers that share a model; with vLLM for CPUs two stages need what only a compiled model has."""


def run(program: str, *arguments: str) -> dict[str, Any]:
    """Run a program of this folder, since vLLM's workers can be made once a process; return its result."""
    command = [sys.executable, "-m", f"tests.vllm.{program}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    line = next((each for each in done.stdout.splitlines() if each.startswith("RESULT ")), None)
    assert line is not None, done.stderr[-3000:]
    return dict(json.loads(line.removeprefix("RESULT ")))


@pytest.fixture(scope="module", params=[*FAMILIES, *SEVERAL])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    name, folder = request.param.partition("-")[0], tmp_path_factory.mktemp(request.param)
    return {
        **run("executor_program", name, str(folder), json.dumps(SEVERAL.get(request.param, {}))),
        "family": FAMILIES[name],
        # In bfloat16 a state that is rounded at another place is another.
        "ways": WAYS[:1] if FAMILIES[name].has_rounded_state else WAYS,
    }


def test_greedy_tokens_are_the_models(found: dict[str, Any]) -> None:
    assert found["has_state"] is found["family"].has_state
    assert found["preemptions"] > 0 or found["has_state"]
    assert (found["prefix_hits"] > 0) is not found["has_state"]
    for way in found["ways"]:
        assert found["greedy"][way] == found["num_asked"], way


def test_penalties_know_what_came_before_a_preemption(found: dict[str, Any]) -> None:
    assert found["penalties_differ"]
    for way in found["ways"]:
        assert found["penalties"][way] == found["num_asked"], way
    assert found["drawn"] == found["num_asked"]


def test_log_probabilities_are_the_models(found: dict[str, Any]) -> None:
    family = found["family"]
    if not family.has_rounded_state:
        assert all(error < (1e-3 if family.is_exact else 0.1) for error in found["logprob_errors"])


def test_choices_of_one_prompt_share_it_and_are_alike(found: dict[str, Any]) -> None:
    num_equal, num_asked, prefix_hits = found["choices"]
    assert num_equal == num_asked
    assert (prefix_hits > 0) is not found["has_state"]


def test_answers_end_where_they_are_stopped_and_others_go_on(found: dict[str, Any]) -> None:
    if not found["family"].has_rounded_state:
        assert all(found["stopped"])


def test_answers_follow_their_grammar(found: dict[str, Any]) -> None:
    assert found["guided"]
    for *token_ids, reason in found["guided"]:
        assert (len(token_ids), reason) == (3, "stop"), found["guided"]
