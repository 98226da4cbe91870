"""Files of Gemma 4, as llama.cpp's converter writes them, give transformers' tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from onbeat.core.errors import ModelLoadError
from onbeat.engine.weights.open import open_checkpoint
from onbeat.hub.files import ModelFiles
from tests.cpu.engine.gemma4_models import GEMMA4
from tests.cpu.engine.tiny_models import SIZES, hf_tiny_model
from tests.cpu.weights.tiny_models import check_tokens, finish, write_metadata

pytestmark = pytest.mark.golden

SAME = (*("num_hidden_layers", "rms_norm_eps", "model_type", "rope_parameters"),)
"""What the converter takes from a configuration as it is."""


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("name", GEMMA4)
def test_tokens_and_logits_equal_the_reference(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, *, is_native: bool
) -> None:
    model = hf_tiny_model(name, torch.float64)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", model, name))
    check_tokens(checkpoint, name, request.getfixturevalue("native_library") if is_native else None)


def test_layers_of_three_kinds_are_refused(tmp_path: Path) -> None:
    model = hf_tiny_model("gemma4-moe", torch.float32)
    files = write_gguf(tmp_path / "model.gguf", model, "gemma4-moe", num_key_value_heads=[1, 2, 4])
    with pytest.raises(ModelLoadError, match=r"head_count_kv.*\[1, 2, 4\]"):
        open_checkpoint(files)


def write_gguf(path: Path, model: Any, name: str, **said: Any) -> ModelFiles:
    """Write a model; `said`: sizes that the file shall have in place of its own."""
    config, options = model.config, GEMMA4[name][2]
    writer = gguf.GGUFWriter(path, "gemma4")
    num_layers, width, wide = config.num_hidden_layers, options["head_dim"], options["global_head_dim"]
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    num_shared = options.get("num_kv_shared_layers", 0)
    own: dict[str, Any] = SIZES | {key: getattr(config, key) for key in SAME}
    if "num_global_key_value_heads" in options:
        counts = options["num_global_key_value_heads"], SIZES["num_key_value_heads"]
        own["num_key_value_heads"] = [counts[each] for each in slides]
    if options.get("use_double_wide_mlp"):
        sizes = [config.intermediate_size * (1 + (n >= num_layers - num_shared)) for n in range(num_layers)]
        own["intermediate_size"] = sizes
    write_metadata(writer, SimpleNamespace(**own | {"head_dim": wide} | said))
    writer.add_key_length_swa(width)
    writer.add_value_length_swa(width)
    writer.add_rope_dimension_count(wide)
    writer.add_rope_dimension_count_swa(width)
    writer.add_rope_freq_base_swa(10_000.0)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(num_shared)
    writer.add_embedding_length_per_layer_input(options["hidden_size_per_layer_input"])
    if cap := options.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(cap)
    if options.get("enable_moe_block"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    factors = [1.0] * (wide // 8) + [1e30] * (wide // 2 - wide // 8)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    for tensor_name, tensor in model.state_dict().items():
        if tensor_name != "lm_head.weight":
            writer.add_tensor(gguf_name(tensor_name, num_layers), tensor.detach().float().numpy())
    if num_shared:  # files may have these of layers that read the KV of others
        writer.add_tensor(f"blk.{num_layers - 1}.attn_k.weight", np.ones((64, 64), np.float32))
    finish(writer)
    return ModelFiles(kind="gguf", path=path, name="tiny")


def gguf_name(name: str, num_layers: int) -> str:
    """Return what the converter calls a tensor."""
    stem, _, kind = name.rpartition(".")
    block = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
    if stem.endswith(".router") and "scale" in kind:
        return f"{block}{'ffn_down_exps' if kind == 'per_expert_scale' else 'ffn_gate_inp'}.scale"
    if kind != "weight":
        stem, kind = name, "weight"
    own = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, num_layers).get_name(stem)
    assert own is not None, name
    return f"{own}.{kind}"
