"""Drafts through the front door: `LLM` with the configuration that `--speculative-config` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.request import SamplingParams
from onbeat.engine.llm import LLM, Generation

TEXT = Path(__file__).parents[2] / "data" / "pride_and_prejudice.txt"
OPTIONS: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 2**27, "dtype": "float32"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 6}


def generate(gguf: Path, sampling: SamplingParams, **options: Any) -> list[Generation]:
    passage = TEXT.read_text(encoding="utf-8")[:500]
    prompts = [passage + "\n\n" + passage[:60], "The capital of France is", passage[:200] + passage[:80]]
    with LLM(str(gguf), **OPTIONS, **options) as llm:
        return llm.generate(prompts, sampling, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["sarathi", "slo"])
def test_the_same_text_comes_out(smollm2_gguf: Path, policy: str) -> None:
    for sampling in (
        SamplingParams(temperature=0.0, max_tokens=40),
        SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=40, num_logprobs=1),
    ):
        plain = generate(smollm2_gguf, sampling, policy=policy)
        for draft_length in ("fixed", "adaptive"):
            speculated = generate(
                smollm2_gguf,
                sampling,
                policy=policy,
                speculative_config=NGRAM | {"draft_length": draft_length},
                async_scheduling=draft_length == "fixed",
            )
            assert [g.token_ids for g in speculated] == [g.token_ids for g in plain]
            assert [g.text for g in speculated] == [g.text for g in plain]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "ngram", "num_speculative_tokens": 17}, r"17; .* block_size \(16\)"),
        ({"method": "eagle"}, r"'eagle' .* 'model'"),
        ({"method": "eagle", "model": "some"}, "vllm"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_loaded(
    smollm2_gguf: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(smollm2_gguf), speculative_config=config, **OPTIONS)
