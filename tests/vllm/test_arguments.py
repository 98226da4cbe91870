"""Flags behind `--` are read by vLLM's own parser, and reach its configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm.engine.arg_utils")

from onbeat.core.errors import ConfigError
from onbeat.engine.vllm.surface import Settings, read_arguments

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def test_only_what_is_given_is_set() -> None:
    given = read_arguments(["--hf_overrides", '{"rope_theta": 5.0}', "--kv-cache-dtype=fp8"])
    assert given == {"hf_overrides": {"rope_theta": 5.0}, "kv_cache_dtype": "fp8"}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["--no-such-flag", "1"], "--no-such-flag"), (["--kv-cache-dtype", "int3"], "int3"), (["word"], "word")],
)
def test_what_vllm_does_not_take_is_refused_with_its_reason(arguments: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_arguments(arguments)


def test_they_reach_the_configuration(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1}
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **names, "vocab_size": 256}))
    given = read_arguments(["--hf-overrides", '{"rope_theta": 5.0}', "--max-logprobs", "7"])
    settings = Settings({"model": str(tmp_path), "skip_tokenizer_init": True, **given}, 1)
    assert settings.config.model_config.max_logprobs == 7
    assert settings.config.model_config.hf_config.rope_theta == 5.0
