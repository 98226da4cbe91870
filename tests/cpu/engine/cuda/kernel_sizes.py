"""What operators are made for in these tests."""

from __future__ import annotations

import torch

from onbeat.engine.model_config.architecture import ModelConfig, RopeConfig
from onbeat.engine.torch.kernels import KernelSizes


def kernel_sizes(
    *, num_heads: int = 8, num_kv_heads: int = 2, head_dim: int = 64, dtype: torch.dtype = torch.float32
) -> KernelSizes:
    """Return the sizes of a small model on the CPU, in blocks of 16 tokens."""
    config = ModelConfig(
        family="llama",
        architecture="LlamaForCausalLM",
        vocab_size=1000,
        hidden_size=256,
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=512,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e4),
    )
    return KernelSizes(
        config=config,
        dtype=dtype,
        kv_dtype=dtype,
        device=torch.device("cpu"),
        block_size=16,
        max_rows=8,
        max_tokens=64,
        max_row_blocks=64,
    )
