"""Layers against transformers' modules and plain formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from onbeat.engine.model_config.architecture import RopeConfig
from onbeat.engine.model_config.hf import model_config_from_hf
from onbeat.engine.model_config.rope import inverse_frequencies
from onbeat.engine.torch.forward import TorchKernels
from onbeat.engine.torch.kernels import Norm
from onbeat.engine.torch.weights import Rotation

CPU = torch.device("cpu")
DTYPES = {torch.float64: 0.0, torch.float32: 1e-6, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_rms_norm_equals_transformers(family: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(7, 96) * 5).to(dtype)
    weight = torch.randn(96).to(dtype)
    reference: Any = (LlamaRMSNorm if family == "llama" else Gemma3RMSNorm)(96, eps=1e-5)
    reference.weight.data = weight
    is_gemma = family == "gemma"
    norm = Norm(weight.float() + 1.0 if is_gemma else weight, 1e-5, scales_rounded=not is_gemma)
    ours = torch.empty_like(x)
    TorchKernels(dtype, CPU, 16).add_norm(None, x, norm, ours)
    with torch.inference_mode():
        torch.testing.assert_close(ours, reference(x), rtol=DTYPES[dtype], atol=DTYPES[dtype])


def test_pairs_of_a_part_of_a_head_come_half_a_head_apart() -> None:
    rotation = Rotation.of(RopeConfig(theta=1e4, rotary_dim=4, attention_factor=1.5), 10, CPU)
    heads_NH = rotation.ordered(torch.arange(20.0))
    assert heads_NH.view(2, 10).tolist() == [
        [0, 1, 4, 5, 6, 2, 3, 7, 8, 9],
        [10, 11, 14, 15, 16, 12, 13, 17, 18, 19],
    ]
    assert rotation.factors_H.tolist() == [1.5, 1.5, 1.0, 1.0, 1.0]
    assert rotation.frequencies_H.tolist() == pytest.approx([1.0, 0.01, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("num_positions", [64, 65])
@pytest.mark.parametrize("attention_factor", [None, 1.19])
def test_longropes_angles_equal_transformers_at_either_length(
    num_positions: int, attention_factor: float | None
) -> None:
    """Transformers goes by the longest position of a call, an engine by the context that it is to serve."""
    scaling = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + 0.1 * index for index in range(6)],
        "long_factor": [2.0 + index for index in range(6)],
        "attention_factor": attention_factor,
        "original_max_position_embeddings": 64,
    }
    reference = Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters=scaling,
        original_max_position_embeddings=64,
    )
    reference.architectures = ["Phi3ForCausalLM"]
    config = model_config_from_hf(reference.to_dict(), served_len=num_positions)
    positions = torch.arange(num_positions)
    ours = Rotation.of(config.rope, config.head_dim, CPU)
    cos, sin = Phi3RotaryEmbedding(reference)(torch.zeros(1), positions[None])
    half = cos.shape[-1] // 2
    angles_TH = positions[:, None] * ours.frequencies_H
    turned_TH = angles_TH.cos() * ours.factors_H, angles_TH.sin() * ours.factors_H
    for part_TH, expected in zip(turned_TH, (cos, sin), strict=True):
        torch.testing.assert_close(part_TH[:, :half], expected[0, :, :half], rtol=0, atol=1e-6)


@pytest.mark.parametrize("width", [32, 80, 128, 256])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
def test_frequencies_equal_torchs(theta: float, width: int) -> None:
    theirs = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    np.testing.assert_array_max_ulp(inverse_frequencies(RopeConfig(theta=theta), width), theirs.numpy())
    linear = RopeConfig(theta=theta, kind="linear", factor=4.0)
    np.testing.assert_array_max_ulp(inverse_frequencies(linear, width), (theirs / 4.0).numpy())


@pytest.mark.parametrize(
    "more",
    [{}, {"truncate": False}, {"beta_fast": 3.0, "beta_slow": 2.9}, {"mscale": 0.7, "mscale_all_dim": 1.2}],
)
@pytest.mark.parametrize("original", [128, 4096])
def test_yarns_frequencies_equal_transformers(more: dict[str, Any], original: int) -> None:
    scaling = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": original,
    }
    reference = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=scaling | more)
    reference.architectures = ["LlamaForCausalLM"]
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](reference, CPU)
    rope = model_config_from_hf(reference.to_dict()).rope
    np.testing.assert_array_max_ulp(inverse_frequencies(rope, 64), expected.numpy())
    assert rope.attention_factor == factor


def test_frequency_factors_divide_frequencies() -> None:
    plain = inverse_frequencies(RopeConfig(theta=1e4), 8)
    factors = (1.0, 2.0, 4.0, 8.0)
    scaled = inverse_frequencies(RopeConfig(theta=1e4, kind="factors", frequency_factors=factors), 8)
    np.testing.assert_array_max_ulp(scaled, plain / np.array(factors, np.float32))


def test_llama3_scaling_keeps_high_and_divides_low_frequencies() -> None:
    config = RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position_embeddings=8192)
    plain, scaled = inverse_frequencies(RopeConfig(theta=5e5), 128), inverse_frequencies(config, 128)
    ratio = plain / scaled
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(8.0)
    assert (np.diff(ratio) >= -1e-6).all()
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
    }
    parameters |= {"low_freq_factor": config.low_freq_factor, "high_freq_factor": config.high_freq_factor}
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](
        LlamaConfig(head_dim=128, max_position_embeddings=2**17, rope_parameters=parameters), CPU
    )
    np.testing.assert_array_max_ulp(scaled, theirs.numpy(), 8)
