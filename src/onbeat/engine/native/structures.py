"""The C interface's constants and structures (`native/include/onbeat_native.h`), field for field."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

from onbeat.engine.engine_config import ActivationQuantization

ABI_VERSION = 12


class Status(IntEnum):
    """What a call returns that can fail."""

    OK = 0
    MALFORMED = -1
    NO_MEMORY = -2
    FAILED = -3


class Store(IntEnum):
    """How a packed matrix keeps its numbers."""

    F32 = 0
    BF16 = 1
    Q8 = 2
    Q4 = 3
    Q8_MIN = 4


class Source(IntEnum):
    """Types of the rows that are packed: GGUF's own numbers."""

    F32 = 0
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    BF16 = 30


ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
"""By the name in `ModelConfig.hidden_activation`."""

ACTIVATION_QUANTIZATIONS: Mapping[ActivationQuantization, int] = {"auto": 0, "none": 1, "int8": 2}


MOST_QKV = 3
"""Matrices that a layer's query, key and value projections may be in."""


class LayerStructure(Structure):
    """`ob_layer`."""

    _fields_ = (
        ("qkv", c_void_p * MOST_QKV),
        ("o", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("router", c_void_p),
        ("expert_gate_up", c_void_p),
        ("expert_down", c_void_p),
        ("qkv_bias", c_void_p),
        ("o_bias", c_void_p),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("after_attention_norm", c_void_p),
        ("after_mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("window", c_int64),
        ("rope", c_int64),
    )


class ModelStructure(Structure):
    """`ob_model`."""

    _fields_ = (
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("intermediate_size", c_int32),
        ("vocab_size", c_int32),
        ("activation", c_int32),
        ("precision", c_int32),
        ("block_size", c_int32),
        ("num_blocks", c_int32),
        ("num_threads", c_int32),
        ("activation_quantization", c_int32),
        ("batch_invariant", c_int32),
        ("rotary_dim", c_int32),
        ("norms_span_heads", c_int32),
        ("num_experts", c_int32),
        ("experts_per_token", c_int32),
        ("expert_size", c_int32),
        ("normalizes_experts", c_int32),
        ("copy_rows", c_int64),
        ("rms_norm_eps", c_float),
        ("attention_scale", c_float),
        ("embedding_scale", c_float),
        ("rotary_scale", c_float),
        ("residual_scale", c_float),
        ("embedding", c_void_p),
        ("lm_head", c_void_p),
        ("final_norm", c_void_p),
        ("head_norm", c_void_p),
        ("layers", c_void_p),
        ("rope_frequencies", c_void_p),
    )


class StepStructure(Structure):
    """`ob_step`."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("num_rows", c_int64),
        ("query_lens", c_void_p),
        ("context_lens", c_void_p),
        ("slots", c_void_p),
        ("block_tables", c_void_p),
        ("num_block_tables", c_int64),
        ("block_table_stride", c_int64),
        ("num_samples", c_int64),
        ("sample_tokens", c_void_p),
        ("logits", c_void_p),
        ("best_ids", c_void_p),
        ("best_logits", c_void_p),
        ("num_hidden", c_int64),
        ("hidden_tokens", c_void_p),
        ("hidden", c_void_p),
        ("seconds", c_double),
    )
