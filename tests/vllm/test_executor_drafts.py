"""Drafts on vLLM's executor: greedy tokens equal transformers', however many are right."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.test_executor import run

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", params=["ngram", "draft-model", "eagle", "eagle3", "mtp"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp(request.param))
    return {"method": request.param, **run("drafts_program", request.param, folder)}


def test_greedy_tokens_are_those_without_drafts(found: dict[str, Any]) -> None:
    """Alone, together, in a KV cache that is too small, and with two steps in flight."""
    for way in ("alone", "together", "short", "two"):
        assert found[way]["equal"] == found["num_asked"], way
        assert found[way]["proposed"] > 0
        assert found[way]["prefix_hits"] > 0
        if found["method"] in ("ngram", "draft-model"):  # a random head is right by chance alone
            assert found[way]["accepted"] > 0
    assert found["short"]["preemptions"] > 0
    if found["method"] == "draft-model":  # which is the model itself
        assert found["alone"]["accepted"] == found["alone"]["proposed"]


def test_all_that_goes_with_tokens_is_there(found: dict[str, Any]) -> None:
    assert all(error < 1e-3 for error in found["logprob_errors"])
    assert found["drawn"] == found["num_asked"] - 1
    for *token_ids, reason in found["guided"]:
        assert (len(token_ids), reason) == (3, "stop"), found["guided"]
    assert found["left_out"] == ["logit_bias", "min_p"]
