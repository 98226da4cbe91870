"""Embeddings by vLLM's workers are transformers', and models that need whole prompts or have none say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.test_executor import run

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(("base", "pooling"), [("Qwen3", "last"), ("Qwen3", "mean"), ("Bert", "cls")])
def test_embeddings_are_the_models(base: str, pooling: str, tmp_path: Path) -> None:
    found = run("embed_program", base, pooling, str(tmp_path / "model"))
    assert max(found["errors"]) < 1e-3
    assert (found["pooling"], found["size"], found["generates"]) == (pooling, 128, False)
    assert ("--policy prefill-first" in found["refused"]) is (pooling != "last")
