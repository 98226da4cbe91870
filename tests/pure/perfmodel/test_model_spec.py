"""Sizes from configurations: parameter counts as published, families, and what bad input gets."""

import json
from dataclasses import replace

import pytest

from onbeat.core.errors import ConfigError
from onbeat.perfmodel.model_spec import find_model_spec, model_spec_from_hf, packaged_configs
from onbeat.perfmodel.precision import Precision, bytes_of, narrower_formats, precision_by_weights
from tests.many_cases import each_case

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}

PUBLISHED_BILLIONS = {
    "Llama-2-7b-hf": 6.74,
    "Llama-2-70b-hf": 68.98,
    "meta-llama/Llama-3.1-8B": 8.03,
    "meta-llama/Meta-Llama-3-70B-Instruct": 70.55,
    "Llama-3.2-1B": 1.24,
    "mistralai/Mistral-7B-v0.1": 7.24,
    "Mixtral-8x7B": 46.70,
    "Mixtral-8x22B": 140.6,
    "Qwen2.5-7B": 7.62,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235.1,
    "Qwen-72B": 72.3,
    "Yi-34B": 34.4,
    "codellama/CodeLlama-34b-hf": 33.7,
    "internlm-20b": 20.1,
    "phi-2": 2.78,
    "gemma-3-27b": 27.0,
    "gemma-2-9b": 9.24,
    "opt-13b": 12.85,
    "opt-175b": 174.6,
    "bloom": 176.2,
    "SmolLM2-135M": 0.1345,
    "microsoft/Phi-4-mini-instruct": 3.84,
    "OLMo-2-1124-7B": 7.30,
    "OLMo-2-0425-1B": 1.485,
    "SmolLM3-3B": 3.08,
    "granite-3.3-8b-instruct": 8.17,
    "granite-3.3-2b-instruct": 2.53,
    "openai/gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.8,
    "deepseek-ai/DeepSeek-V3": 671.0,
    "DeepSeek-R1": 671.0,
    "zai-org/GLM-4.5-Air": 106.9,
    "Qwen/Qwen3.5-27B": 26.9,
    "qwen3.5-122b-a10b": 122.1,
    "Qwen3.5-397B-A17B": 396.4,
    "google/gemma-4-26B-A4B-it": 25.2,
    "gemma-4-31b": 30.7,
    "google/gemma-4-E2B-it": 4.63,
    "mistralai/Mistral-Nemo-Instruct-2407": 12.25,
    "Mistral-Small-3.1-24B-Instruct-2503": 23.57,
}


@each_case(("name", "billions"), PUBLISHED_BILLIONS.items())
def test_parameter_count_is_the_published_one(name, billions):
    assert find_model_spec(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Mixtral-8x7B", 12.9), ("Qwen3-30B-A3B", 3.3), ("Qwen3-235B-A22B", 22.2), ("gemma-4-E2B", 2.3)],
)
def test_active_parameters_of_experts(name, billions):
    assert find_model_spec(name).num_active_parameters / 1e9 == pytest.approx(billions, rel=0.02)


@each_case("name", packaged_configs())
def test_every_packaged_configuration_is_readable_by_all_its_names(name):
    spec = find_model_spec(name)
    for hub_id in packaged_configs()[name]["hub_ids"]:
        assert find_model_spec(hub_id.upper()) == spec


def test_kv_and_weight_bytes_follow_the_precision():
    spec = find_model_spec("Llama-3.1-8B")
    assert spec.kv_bytes_per_token(Precision()) == 2 * 32 * 8 * 128 * 2
    assert spec.kv_bytes_per_token(Precision(kv="fp8")) == 2 * 32 * 8 * 128
    embeddings = 2 * spec.embedding_parameters
    assert spec.weight_bytes(Precision()) == 2 * spec.num_parameters
    assert spec.weight_bytes(Precision(weights="int4")) == spec.layer_parameters / 2 + 2 * embeddings
    with_embedding = Precision(weights="int4", embedding="int8")
    assert spec.weight_bytes(with_embedding) == spec.layer_parameters / 2 + embeddings
    assert str(with_embedding) == "int4 weights (int8 embedding), bf16 KV, bf16 arithmetic"
    in_groups = replace(with_embedding, group=32)
    assert spec.weight_bytes(in_groups) == 0.625 * spec.layer_parameters + 1.0625 * embeddings
    assert spec.weight_bytes(Precision(weights="fp32")) == 4 * spec.num_parameters


def test_tied_embeddings_count_once():
    tied = model_spec_from_hf({**LLAMA, "tie_word_embeddings": True}, name="tied")
    untied = model_spec_from_hf(LLAMA, name="untied")
    assert untied.num_parameters - tied.num_parameters == 100 * 64


def test_windows_by_family():
    assert find_model_spec("Mistral-7B-v0.1").num_sliding_layers == 32
    assert find_model_spec("Mistral-7B-v0.3").sliding_window is None
    gemma = find_model_spec("gemma-3-27b-it")
    assert (gemma.sliding_window, gemma.num_sliding_layers) == (1024, 52)
    listed = {**LLAMA, "model_type": "gemma2", "sliding_window": 8, "layer_types": ["full_attention"] * 2}
    assert model_spec_from_hf(listed, name="listed").sliding_window is None
    assert find_model_spec("Qwen2.5-7B").sliding_window is None  # its configuration switches the window off


def test_sparse_layers_are_counted():
    config = {
        **LLAMA,
        "model_type": "qwen2_moe",
        "num_hidden_layers": 6,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
    }
    spec = model_spec_from_hf(config, name="sparse")
    assert spec.num_moe_layers == 2
    assert spec.layer_parameters - spec.active_layer_parameters == 2 * 2 * 3 * 64 * 32


def test_file_and_directory_are_read(tmp_path):
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA))
    assert find_model_spec(str(directory)).name == "tiny"
    assert find_model_spec(str(directory / "config.json")) == find_model_spec(str(directory))


def test_text_part_of_a_multi_modal_model():
    text = {key: value for key, value in LLAMA.items() if key != "model_type"}
    config = {"model_type": "gemma3", "text_config": {**text, "head_dim": 16, "sliding_window": 32}}
    assert model_spec_from_hf(config, name="seeing").sliding_window == 32


def test_unknown_model_names_near_ones():
    with pytest.raises(ConfigError, match=r"'Llama-3.1-9B'.*llama-3.1-8b"):
        find_model_spec("Llama-3.1-9B")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_key_value_heads": 3}, r"4 .* 3 KV"),
        ({"num_attention_heads": 0}, "num_heads is 0;"),
        ({"intermediate_size": -1}, "intermediate_size is -1;"),
        ({"num_hidden_layers": 10**12}, r"num_hidden_layers is 1000000000000; .* 67108864"),
        ({"hidden_size": 10**400}, r"hidden_size is 1000.*; .* 67108864"),
    ],
)
def test_bad_configurations_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        model_spec_from_hf({**LLAMA, **change}, name="bad")


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        find_model_spec(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        find_model_spec(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="mapping"):
        find_model_spec(str(tmp_path))


def test_unknown_number_format():
    with pytest.raises(ConfigError, match="'fp6'"):
        bytes_of("fp6")
    with pytest.raises(ConfigError, match="'fp6'"):
        Precision(kv="fp6")


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("DeepSeek-V3", 61 * (512 + 64)),  # one latent vector for all heads
        ("Qwen3.5-27B", 16 * 2 * 4 * 256),  # every fourth layer
        ("gemma-4-31B", 50 * 2 * 16 * 256 + 10 * 2 * 4 * 512),  # wider heads, fewer of them
        ("GLM-4.5", 92 * 2 * 8 * 128),
    ],
)
def test_kv_of_attention_that_is_not_plain(name: str, numbers: int) -> None:
    assert find_model_spec(name).kv_bytes_per_token(Precision()) == 2 * numbers


def test_linear_attention_keeps_a_state_of_each_request() -> None:
    model = find_model_spec("Qwen3.5-27B")
    matrices, inputs = 48 * 128 * 128 * 4, (2 * 2048 + 6144) * 3 * 4
    assert model.state_bytes == 48 * (matrices + inputs)
    assert model.draft_state_bytes == 48 * (inputs // 3 + 2 * 48 * 4)
    assert find_model_spec("Qwen3-32B").state_bytes == 0


def test_beside_experts_in_mxfp4_everything_else_has_sixteen_bits() -> None:
    """The sizes of the published checkpoints, GiB."""
    for name, gib in (("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)):
        assert find_model_spec(name).weight_bytes(Precision("mxfp4")) / 2**30 == pytest.approx(gib, rel=0.01)


def test_four_bits_multiply_in_what_the_device_has() -> None:
    assert precision_by_weights("nvfp4", computes=("bf16", "fp8")).compute == "bf16"
    assert precision_by_weights("nvfp4", computes=("bf16", "nvfp4")).compute == "nvfp4"
    assert precision_by_weights("int4", computes=("bf16", "int4")).compute == "bf16"
    assert "nvfp4" not in narrower_formats("fp8")


def test_layers_of_several_kinds_must_be_named() -> None:
    config = dict(packaged_configs()["gemma-4-31B"])
    del config["layer_types"]
    with pytest.raises(ConfigError, match="layer_types"):
        model_spec_from_hf(config, name="mine")
