"""Layers against transformers' modules and plain formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from onbeat.engine.layers import linear
from onbeat.engine.layers.embedding import Embedding
from onbeat.engine.layers.linear import PackedLinear, PlainLinear, select_linear_kernel
from onbeat.engine.layers.norm import RMSNorm
from onbeat.engine.layers.rotary import RotaryEmbedding
from onbeat.engine.model_config import RopeConfig, inverse_frequencies, model_config_from_hf

CPU = torch.device("cpu")
DTYPES = {torch.float64: 0.0, torch.float32: 1e-6, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_rms_norm_equals_transformers(family: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(7, 3, 96) * 5).to(dtype)
    weight = torch.randn(96).to(dtype)
    reference: Any = (LlamaRMSNorm if family == "llama" else Gemma3RMSNorm)(96, eps=1e-5)
    reference.weight.data = weight
    is_gemma = family == "gemma"
    ours = RMSNorm(weight, eps=1e-5, offset=float(is_gemma), rounds_once=is_gemma)(x)
    assert ours.dtype == dtype
    with torch.inference_mode():
        torch.testing.assert_close(ours, reference(x), rtol=DTYPES[dtype], atol=DTYPES[dtype])


def test_rotation_equals_transformers() -> None:
    torch.manual_seed(0)
    x_TNH = torch.randn(9, 3, 32, dtype=torch.float64)
    positions = torch.tensor([0, 1, 5, 100, 4, 3, 511, 2, 7])
    rotation = RotaryEmbedding(RopeConfig(theta=1e4), 32, dtype=torch.float64, device=CPU).at(positions)
    frequencies = torch.from_numpy(inverse_frequencies(RopeConfig(theta=1e4), 32))
    angles = positions[:, None].float() * frequencies.repeat(2)
    cos, sin = angles.cos().double()[None], angles.sin().double()[None]
    expected, _ = apply_rotary_pos_emb(x_TNH.transpose(0, 1)[None], x_TNH.transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(rotation.apply(x_TNH), expected[0].transpose(0, 1), rtol=0, atol=1e-15)


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
    ours = RotaryEmbedding(config.rope, config.head_dim, dtype=torch.float32, device=CPU).at(positions)
    cos, sin = Phi3RotaryEmbedding(reference)(torch.zeros(1), positions[None])
    half = cos.shape[-1] // 2
    torch.testing.assert_close(ours.cos_T1P[:, 0], cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.sin_T1P[:, 0, half:], sin[0, :, half:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("width", [32, 80, 128, 256])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
def test_frequencies_equal_torchs(theta: float, width: int) -> None:
    theirs = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    np.testing.assert_array_max_ulp(inverse_frequencies(RopeConfig(theta=theta), width), theirs.numpy())
    linear = RopeConfig(theta=theta, kind="linear", factor=4.0)
    np.testing.assert_array_max_ulp(inverse_frequencies(linear, width), (theirs / 4.0).numpy())


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


@pytest.mark.parametrize("num_tokens", [1, 2, 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_product_equals_the_plain_one(num_tokens: int, with_bias: bool) -> None:
    torch.manual_seed(0)
    kernel = select_linear_kernel(torch.bfloat16, CPU)
    weight = torch.randn(100, 72).to(torch.bfloat16)
    bias = torch.randn(100).to(torch.bfloat16) if with_bias else None
    x = torch.randn(num_tokens, 72).to(torch.bfloat16)
    expected = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(kernel(weight, bias)(x).float(), expected, rtol=1e-2, atol=1e-1)


def test_a_torch_without_the_packed_operator_gets_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(linear.PackedLinear, "__init__", missing)
    assert select_linear_kernel(torch.bfloat16, CPU) is PlainLinear


def test_a_packed_operator_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedLinear, "__call__", lambda self, x: torch.zeros(x.shape[0], 48))
    assert select_linear_kernel(torch.bfloat16, CPU) is PlainLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_bfloat16_is_packed(dtype: torch.dtype) -> None:
    assert select_linear_kernel(dtype, CPU) is PlainLinear


def test_embedding_scale_is_rounded_to_the_models_type() -> None:
    weight = torch.ones(4, 8, dtype=torch.bfloat16)
    rows = Embedding(weight, scale=640**0.5)(torch.tensor([1, 3]))
    assert (rows == torch.tensor(640**0.5, dtype=torch.bfloat16)).all()
    assert (weight == 1).all()
