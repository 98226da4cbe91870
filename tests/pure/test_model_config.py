from __future__ import annotations

import math
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onbeat.core.errors import ModelLoadError, NeedsVllm
from onbeat.engine.dtypes import BFLOAT16
from onbeat.engine.memory import KVCacheSpec
from onbeat.engine.model_config.architecture import RopeConfig
from onbeat.engine.model_config.families import FAMILIES, GGUF_FAMILIES
from onbeat.engine.model_config.gguf import RopeFactors, model_config_from_gguf
from onbeat.engine.model_config.hf import model_config_from_hf
from onbeat.engine.step_time_spec import model_spec_of
from onbeat.engine.weights.parameters import parameter_shapes
from onbeat.perfmodel.model_spec import find_model_spec, packaged_configs
from onbeat.perfmodel.precision import Precision
from tests.many_cases import each_case

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 262144,
    "hidden_size": 640,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 2048,
    "max_position_embeddings": 32768,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "eos_token_id": 1,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.vocab_size": 49152,
    "llama.embedding_length": 576,
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": 64,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def gguf_of(architecture: str, **changes: Any) -> dict[str, Any]:
    table = {key.replace("llama.", f"{architecture}."): value for key, value in GGUF.items()}
    table["general.architecture"] = architecture
    return table | {f"{architecture}.{key.replace('__', '.')}": value for key, value in changes.items()}


def test_llama() -> None:
    config = model_config_from_hf(LLAMA | {"rope_scaling": LLAMA3_SCALING})
    assert config.family == "llama"
    assert config.head_dim == 128
    assert config.num_kv_heads == 8
    assert config.attention_scale == pytest.approx(128**-0.5)
    assert config.rope == RopeConfig(theta=500000.0, kind="llama3", factor=8.0)
    assert config.layer_rope(5) is config.rope
    assert config.layer_window(5) is None
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.dtype == "bfloat16"
    assert not config.attention_bias


def test_transformers_5_spelling_is_the_same_model() -> None:
    old = model_config_from_hf(LLAMA | {"rope_scaling": LLAMA3_SCALING})
    new = {key: value for key, value in LLAMA.items() if key not in ("rope_theta", "torch_dtype")}
    new |= {"rope_parameters": LLAMA3_SCALING | {"rope_theta": 500000.0}, "dtype": "bfloat16"}
    assert model_config_from_hf(new) == old


def test_older_spelling_of_linear_scaling() -> None:
    config = model_config_from_hf(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4}})
    assert config.rope == RopeConfig(theta=500000.0, kind="linear", factor=4.0)


@pytest.mark.parametrize("kind", ["ntk", "longrope", "su"])
def test_unsupported_scaling_names_kind_and_choices(kind: str) -> None:
    with pytest.raises(ModelLoadError, match=f"'{kind}'.*: default, linear, llama3"):
        model_config_from_hf(LLAMA | {"rope_scaling": {"rope_type": kind, "factor": 4.0}})


def test_generation_config_adds_end_tokens() -> None:
    assert model_config_from_hf(LLAMA, {"eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    assert model_config_from_hf(LLAMA, {"temperature": 0.6}).eos_token_ids == (128001, 128008, 128009)
    assert model_config_from_hf(LLAMA | {"eos_token_id": None}).eos_token_ids == ()


def test_mistral_window_applies_to_all_layers_and_may_be_null() -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"]}
    windowed = model_config_from_hf(mistral | {"sliding_window": 4096})
    assert windowed.layer_window(0) == windowed.layer_window(31) == 4096
    assert model_config_from_hf(mistral | {"sliding_window": None}).layer_window(0) is None


def test_qwen2_and_qwen3() -> None:
    qwen2 = model_config_from_hf(LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096})
    assert qwen2.attention_bias
    assert not qwen2.attention_output_bias
    assert not qwen2.qk_norm
    assert qwen2.layer_window(31) is None  # use_sliding_window is false where it is not set
    windowed = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 30}
    partly = model_config_from_hf(LLAMA | windowed | {"sliding_window": 4096})
    assert [index for index in range(32) if partly.is_sliding(index)] == [30, 31]
    qwen3 = model_config_from_hf(LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 64})
    assert qwen3.qk_norm
    assert qwen3.head_dim == 64


def test_gemma3() -> None:
    config = model_config_from_hf(GEMMA)
    assert config.tie_word_embeddings
    assert config.qk_norm
    assert config.embedding_scale == pytest.approx(640**0.5)
    assert config.norm_weight_offset == 1.0
    assert [index for index in range(18) if not config.is_sliding(index)] == [5, 11, 17]
    assert config.layer_rope(0).theta == 10000.0
    assert config.layer_rope(5).theta == 1000000.0
    assert config.layer_window(0) == 512
    assert config.layer_window(5) is None


def test_the_text_part_of_a_multimodal_gemma3() -> None:
    """As the hub has Gemma 3 4B: what the class has by default is left out."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    whole: dict[str, Any] = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": text,
        "vision_config": {"hidden_size": 1152},
    }
    config = model_config_from_hf(whole)
    assert (config.architecture, config.family) == ("Gemma3ForCausalLM", "gemma3")
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert (config.hidden_size, config.num_layers, config.sliding_window) == (2560, 34, 1024)
    assert config.rope == RopeConfig(theta=1_000_000.0, kind="linear", factor=8.0)
    assert config.eos_token_ids == (1, 106)
    assert config.dtype == "bfloat16"
    with pytest.raises(ModelLoadError, match="text_config"):
        model_config_from_hf({"architectures": whole["architectures"], "text_config": []})


def test_gemma3_transformers_5_spelling() -> None:
    scaled = GEMMA | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {key: value for key, value in GEMMA.items() if not key.startswith("rope_")}
    new["layer_types"] = ["full_attention" if index % 6 == 5 else "sliding_attention" for index in range(18)]
    new["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert model_config_from_hf(new) == model_config_from_hf(scaled)
    # Only full-attention layers are scaled.
    assert model_config_from_hf(scaled).layer_rope(0) == RopeConfig(theta=10000.0)


@pytest.mark.parametrize("name", ["gemma-4-E2B", "gemma-4-E4B", "gemma-4-26B-A4B", "gemma-4-31B"])
def test_sizes_of_gemma4_are_those_that_step_times_know(name: str) -> None:
    known = packaged_configs()[name]
    text = {**known, "final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision"}
    whole = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    config, spec = model_config_from_hf(whole), find_model_spec(name)
    assert model_spec_of(config, name) == spec
    duplicates = spec.num_layers * 2 * spec.hidden_size  # norms, which a specification counts by two a layer
    num_parameters = sum(math.prod(shape) for shape in parameter_shapes(config).values())
    assert num_parameters == pytest.approx(spec.num_parameters, abs=4 * duplicates)
    kv = KVCacheSpec.of_model(config, dtype=BFLOAT16, block_size=16)
    assert kv.block_bytes == 16 * spec.kv_bytes_per_token(Precision())
    assert config.layer_rope(0) == RopeConfig(theta=10_000.0)
    assert config.rope.frequency_factors == (1.0,) * 64 + (math.inf,) * 192
    full = {index: {"head_dim": 512} for index in range(config.num_layers) if not config.is_sliding(index)}
    heads = known.get("num_global_key_value_heads")
    saved = {key: value for key, value in known.items() if "global" not in key}
    each = {index: one | ({"num_key_value_heads": heads} if heads else {}) for index, one in full.items()}
    again = model_config_from_hf({**whole, "text_config": {**text, **saved, "per_layer_config": each}})
    assert again == config
    with pytest.raises(ModelLoadError, match="per_layer_config"):
        model_config_from_hf(
            {**whole, "text_config": {**saved, "per_layer_config": each | {"5": {"head_dim": 8}}}}
        )


def test_the_documents_list_the_families_that_run() -> None:
    page = Path(__file__).parents[2] / "docs/models.md"
    assert page.read_text() == runpy.run_path(str(page.parents[1] / "scripts/families"))["page"]()
    assert all(
        f"| `{name}` |" in page.read_text() for name in (*FAMILIES, *GGUF_FAMILIES) if "Phimoe" not in name
    )


def test_yarn_lengthens_the_context_and_dynamic_scaling_begins_behind_it() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    config = model_config_from_hf(LLAMA | {"max_position_embeddings": 5120, "rope_scaling": scaling})
    assert config.max_position_embeddings == 16_384
    dynamic = model_config_from_hf(LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert dynamic == model_config_from_hf(LLAMA)


def test_families_that_a_file_divides_further() -> None:
    text = {key: value for key, value in LLAMA.items() if key not in ("architectures", "rope_theta")}
    of_vision = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": text | {"model_type": "ministral3"},
    }
    assert model_config_from_hf(of_vision).query_growth == (0.1, 16_384)
    granite = LLAMA | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "num_local_experts": 0,
        "attention_multiplier": 0.1,
    }
    dense = granite | {"layer_types": ["attention"] * 32, "shared_intermediate_size": 512}
    config = model_config_from_hf(dense | {"position_embedding_type": "nope"})
    assert (config.intermediate_size, config.nope_layers) == (512, (True,) * 32)
    assert model_config_from_hf(dense | {"position_embedding_type": "rope"}).nope_layers == ()
    with pytest.raises(NeedsVllm, match="Mamba"):
        model_config_from_hf(granite | {"layer_types": ["attention", "mamba"] * 16})
    with pytest.raises(NeedsVllm, match="num_local_experts to 8"):
        model_config_from_hf(dense | {"num_local_experts": 8})
    cohere = LLAMA | {"architectures": ["Cohere2ForCausalLM"], "num_hidden_layers": 4, "logit_scale": 0.25}
    config = model_config_from_hf(cohere)
    assert config.nope_layers == (False, False, False, True)
    assert (config.logits_divisor, config.rms_norm_eps, config.rope.interleaves) == (4.0, 1e-5, True)
    phi = LLAMA | {"num_local_experts": 4, "lm_head_bias": True}
    for name in ("PhiMoEForCausalLM", "PhimoeForCausalLM"):
        config = model_config_from_hf(phi | {"architectures": [name]})
        assert config.experts is not None
        assert (config.head_bias, config.experts.mixer_jitter) == (True, 0.01)


@pytest.mark.parametrize(
    ("name", "model_type", "architecture"),
    [
        ("Mistral3ForConditionalGeneration", "mistral", "MistralForCausalLM"),
        ("Qwen3VLForConditionalGeneration", "qwen3_vl_text", "Qwen3ForCausalLM"),
        ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", "Qwen2ForCausalLM"),
    ],
)
def test_texts_of_other_multimodal_models(name: str, model_type: str, architecture: str) -> None:
    text = LLAMA | {
        "model_type": model_type,
        "rope_scaling": {"type": "mrope", "mrope_section": [24, 20, 20]},
    }
    whole = {"architectures": [name], "text_config": text, "tie_word_embeddings": True, "vision_config": {}}
    config = model_config_from_hf(whole)
    assert config == model_config_from_hf(
        LLAMA | {"architectures": [architecture], "tie_word_embeddings": True}
    )
    if architecture.startswith("Qwen2"):  # older files have no parts
        assert model_config_from_hf(text | {"architectures": [name], "tie_word_embeddings": True}) == config


@each_case(
    ("change", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            r"'MambaForCausalLM' .* supported: .*Gemma3For.*docs/models.md",
        ),
        ({"architectures": ["Gemma3TextModel"]}, "needs attention in both directions"),
        ({"architectures": ["GptOssForCausalLM"], "swiglu_limit": 9.0}, "swiglu_limit to 9.0"),
        ({"architectures": ["Gemma3nForConditionalGeneration"]}, "not supported"),
        ({"rope_scaling": {"rope_type": "su", "factor": 4.0}}, "'su'.*yarn.*, and longrope in Phi-3"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "alpha": 1000}}, "alpha to 1000"),
        ({"architectures": ["MistralForCausalLM"], "mlp_bias": True}, "mlp_bias to True"),
        ({"hidden_act": "gelu"}, "hidden_act to 'gelu'.*'silu'"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping to 50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "4096"}, "hidden_size is '4096';"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1000000000;",
        ),
        ({"num_key_value_heads": 5}, r"32 .* 5"),
        ({"head_dim": 31}, "head_dim is 31"),
        ({"architectures": ["Gemma4ForCausalLM"], "use_bidirectional_attention": "all"}, "'all'"),
        ({"architectures": ["Gemma4ForCausalLM"], "vocab_size_per_layer_input": 9}, "per_layer_input to 9"),
        (
            {"architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 6, "num_kv_shared_layers": 2}
            | {
                "vocab_size_per_layer_input": 128256,
                "layer_types": ["full_attention"] * 4 + ["sliding_attention"] * 2,
            },
            "layer 4 shares",
        ),
        ({"rms_norm_eps": True}, "rms_norm_eps is True"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
    ],
)
def test_what_would_change_the_output_is_an_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        model_config_from_hf(LLAMA | change)


def test_unknown_layer_type_is_an_error() -> None:
    with pytest.raises(ModelLoadError, match="'linear_attention'"):
        model_config_from_hf(GEMMA | {"layer_types": ["linear_attention"] * 18})


def test_configuration_saved_without_a_model_is_known_by_its_type() -> None:
    table = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert model_config_from_hf(table | {"model_type": "qwen3"}).family == "qwen3"
    with pytest.raises(ModelLoadError, match="'t5'"):
        model_config_from_hf(table | {"model_type": "t5"})


def test_gguf_llama() -> None:
    config = model_config_from_gguf(GGUF, tensor_names={"output.weight", "blk.0.attn_q.bias"})
    assert (config.head_dim, config.num_layers, config.vocab_size) == (64, 30, 49152)
    assert config.rope == RopeConfig(theta=100000.0)
    assert not config.tie_word_embeddings
    assert config.attention_bias
    other = GGUF | {"general.architecture": "mamba"}
    with pytest.raises(ModelLoadError, match=r"'mamba'.*gemma3"):
        model_config_from_gguf(other, tensor_names=())
    tied = model_config_from_gguf(GGUF, tensor_names=())
    assert tied.tie_word_embeddings
    assert not tied.attention_bias
    assert tied.eos_token_ids == (2,)


def test_gguf_rope_scaling() -> None:
    def rope(factors: tuple[float, ...] = (), **changes: Any) -> RopeConfig:
        table = gguf_of("llama", **changes)
        return model_config_from_gguf(table, tensor_names=(), rope_factors=RopeFactors(factors)).rope

    assert rope(rope__scaling__type="linear", rope__scaling__factor=4.0).factor == 4.0
    assert rope(rope__scale_linear=2.0).kind == "linear"
    assert rope(rope__scaling__type="none", rope__scaling__factor=4.0).kind == "default"
    assert rope((1.0, 8.0)) == RopeConfig(theta=100000.0, kind="factors", frequency_factors=(1.0, 8.0))
    scaled: dict[str, Any] = {"rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 2048}
    of_hf = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    expected = model_config_from_hf(LLAMA | {"head_dim": 64, "rope_theta": 1e5, "rope_scaling": of_hf}).rope
    assert rope(rope__scaling__type="yarn", **scaled) == expected
    of_hf |= {"mscale": 1.0, "mscale_all_dim": 0.5}
    expected = model_config_from_hf(LLAMA | {"head_dim": 64, "rope_theta": 1e5, "rope_scaling": of_hf}).rope
    assert rope(rope__scaling__type="yarn", rope__scaling__yarn_log_multiplier=0.5, **scaled) == expected
    with pytest.raises(ModelLoadError, match="kind 'longrope'"):
        rope(rope__scaling__type="longrope", rope__scaling__factor=4.0)
    with pytest.raises(ModelLoadError, match="only one"):
        rope((1.0, 8.0), rope__scale_linear=2.0)


def test_gguf_mistral_small_3_has_another_name_and_is_the_same_model() -> None:
    older = model_config_from_gguf(GGUF, tensor_names=())
    newer = model_config_from_gguf(gguf_of("mistral3"), tensor_names=())
    assert newer == replace(older, family=newer.family, architecture="Ministral3ForCausalLM")


def test_gguf_gemma3_constants_that_the_format_leaves_out() -> None:
    table = gguf_of(
        "gemma3", attention__sliding_window=512, attention__key_length=256, attention__head_count_kv=3
    )
    table["gemma3.rope.dimension_count"] = 256
    config = model_config_from_gguf(table, tensor_names=())
    assert config.local_rope == RopeConfig(theta=10000.0)
    assert [index for index in range(30) if not config.is_sliding(index)] == [5, 11, 17, 23, 29]
    assert config.query_pre_attn_scalar == 256.0
    assert config.norm_weight_offset == 1.0
    assert config.hidden_activation == "gelu_pytorch_tanh"
    # The 27B is known by its depth: its scalar is the hidden size over the heads.
    large = model_config_from_gguf(table | {"gemma3.block_count": 62}, tensor_names=())
    assert large.query_pre_attn_scalar == 576 / 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_count": 8}, r"lacks llama\.expert_used_count"),
        ({"expert_count": 2, "expert_used_count": 3}, "3 experts of 2"),
        ({"expert_count": 8, "expert_gating_func": 2}, "expert_gating_func to 2"),
        ({"attention__head_count_kv": [3, 1]}, "the same for every layer"),
        ({"rope__dimension_count": 32}, "rope.dimension_count"),
        ({"attention__value_length": 32}, "value_length"),
        ({"attention__sliding_window": 512}, "sliding_window to 512,"),
        ({"block_count": None}, r"lacks llama\.block_count"),
    ],
)
def test_gguf_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        model_config_from_gguf(gguf_of("llama", **change), tensor_names=())


def test_loads_no_torch() -> None:
    code = "import sys, onbeat.engine.model_config, onbeat.hub; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
