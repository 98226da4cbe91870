"""The real GGUF files against transformers' own reading of them; skipped where they have not been fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onbeat.core.errors import ModelLoadError
from onbeat.engine.weights import open_checkpoint
from onbeat.hub.resolve import resolve_model
from tests.cpu.weights.tiny_models import parameters

pytestmark = [pytest.mark.golden, pytest.mark.slow]


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma3-270m"])
def test_equals_transformers(name: str) -> None:
    try:
        files = resolve_model(name, offline=True)
    except ModelLoadError as error:
        pytest.skip(str(error))
    checkpoint = open_checkpoint(files)
    model = read_with_transformers(files.path)
    expected = parameters(model)
    assert set(checkpoint.names()) == set(expected)
    for parameter, tensor in expected.items():
        assert torch.equal(checkpoint.get(parameter, torch.float32), tensor), parameter
    check_config(checkpoint.config, model.config)


def read_with_transformers(path: Path) -> Any:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return auto.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, **options)


def check_config(ours: Any, theirs: Any) -> None:
    assert ours.vocab_size == theirs.vocab_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == theirs.head_dim
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    rope = theirs.rope_parameters
    if ours.family == "gemma3":
        assert ours.rope.theta == rope["full_attention"]["rope_theta"]
        assert ours.local_rope.theta == rope["sliding_attention"]["rope_theta"]
        assert ours.sliding_layers == tuple(kind == "sliding_attention" for kind in theirs.layer_types)
        assert ours.sliding_window == theirs.sliding_window
        assert ours.query_pre_attn_scalar == theirs.query_pre_attn_scalar
    else:
        assert ours.rope.theta == rope["rope_theta"]
