"""The real GGUF files against transformers' own reading of them; skipped where they have not been fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onbeat.core.errors import ModelLoadError
from onbeat.engine.dtypes import FLOAT32
from onbeat.engine.weights.open import open_checkpoint
from onbeat.hub.known import KNOWN_MODELS
from onbeat.hub.resolve import resolve_model
from tests.cpu.weights.tiny_models import head_dim

pytestmark = [pytest.mark.golden, pytest.mark.slow]


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_equals_transformers(name: str) -> None:
    try:
        files = resolve_model(name, offline=True)
    except ModelLoadError as error:
        pytest.skip(str(error))
    checkpoint = open_checkpoint(files)
    expected, config = read_with_transformers(files.path)
    assert set(checkpoint.names()) == set(expected)
    for parameter, tensor in expected.items():
        assert np.array_equal(checkpoint.get(parameter, FLOAT32), tensor.numpy()), parameter
    check_config(checkpoint.config, config)


def read_with_transformers(path: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """Return every tensor as float32 by its Hugging Face name, and the configuration."""
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # `from_pretrained(gguf_file=...)` does the same, but asks for one more package (accelerate).
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        skeleton = auto.from_config(config)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=skeleton)["tensors"]
    return {name: tensor.float() for name, tensor in tensors.items()}, config


def check_config(ours: Any, theirs: Any) -> None:
    assert ours.vocab_size == theirs.vocab_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == head_dim(theirs)
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
