"""Tiny random models of the families that vLLM runs on a CPU, some with quantized weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
GLM = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_expand": 2}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 2.0,
        "rope_theta": 10000.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 512,
    },
}
"""Ranks and widths of vLLM's kernel for CPUs, and the kind of rotary embedding that this computes right."""
GROUP = 32
"""Rows of a matrix that share a scale in 4 bits."""


@dataclass(frozen=True)
class Family:
    """A tiny model.

    Parameters
    ----------
    sizes : of its configuration, beside those of all.
    base : of the names of transformers' classes; empty: the family's name.
    dtype : in which it is computed.
    weights : how they are quantized.
    has_state : whether it has layers without attention.
    """

    sizes: Mapping[str, Any] = field(default_factory=dict)
    base: str = ""
    dtype: str = "float32"
    weights: str = ""
    has_state: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether its tokens are held to transformers'.

        Others are held to those of vLLM's own scheduler over the same executor, since a product that is
        rounded at another place gives another token.
        """
        return self.dtype == "float32" and not self.weights

    @property
    def has_rounded_state(self) -> bool:
        """Whether its state is another where a step ends at another place."""
        return self.has_state and self.dtype != "float32"


FAMILIES: Mapping[str, Family] = {
    "Llama": Family(),
    "Qwen3": Family(),
    "Gemma3": Family({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}),
    "Qwen3Moe": Family(EXPERTS),
    "DeepseekV2": Family(MLA),
    "Glm4Moe": Family(GLM),
    "Llama-int8": Family(base="Llama", weights="int8"),
    "Llama-awq": Family(base="Llama", weights="awq", dtype="bfloat16"),
    "Llama-gptq": Family(base="Llama", weights="gptq", dtype="bfloat16"),
    "Qwen3Next": Family(
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 64,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
        dtype="bfloat16",
        has_state=True,
    ),
    "FalconH1": Family({**MAMBA, "mamba_d_ssm": 256}, has_state=True),
    "GraniteMoeHybrid": Family(
        {
            **MAMBA,
            "num_hidden_layers": 4,
            "layer_types": ["attention", "mamba", "attention", "attention"],  # three groups of KV blocks
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "shared_intermediate_size": 64,
            "attention_multiplier": 32**-0.5,
        },
        has_state=True,
    ),
    "Mamba2": Family(
        {"num_heads": 8, "state_size": 32, "n_groups": 1, "expand": 2, "use_conv_bias": True}, has_state=True
    ),
}


def make_model(name: str, folder: Path) -> Any:
    """Save a random model in float32, and return one that computes what it says."""
    family = FAMILIES[name]
    base = family.base or name
    config_class = getattr(transformers, f"{base}{'Text' if base == 'Gemma3' else ''}Config")
    config = config_class(**{**SIZES, **family.sizes}, dtype="float32")
    torch.manual_seed(len(base))
    model = getattr(transformers, f"{base}ForCausalLM")(config).to(torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("A_log", "dt_bias", ".D")):
                continue
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5 if parameter.dim() >= 2 else 0.3)
            if "norm" in parameter_name:
                parameter.add_(1.0)
        model.get_input_embeddings().weight.normal_(0.0, 1.0)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    if family.weights:
        _quantize(model, folder, family.weights)
    return model.eval()


def _quantize(model: Any, folder: Path, how: str) -> None:
    """Write the weights of its layers anew, quantized, and give the model what they stand for."""
    write, settings = _WAYS[how]
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            parts, weight_NK = write(module.weight.detach())
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{part}": value.contiguous() for part, value in parts.items()}
            module.weight.data = weight_NK
            if how == "int8":
                vars(module)["forward"] = _rounding(module)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))


def _rounding(module: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return its product with each token rounded to 8 bits."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return torch.nn.functional.linear((x / scale).round(), module.weight) * scale

    return forward


Parts = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Of a matrix in a file, and the numbers that they stand for."""


def _int8(weight_NK: torch.Tensor) -> Parts:
    scale_N1 = weight_NK.abs().amax(1, keepdim=True) / 127
    whole_NK = (weight_NK / scale_N1).round()
    return {"weight": whole_NK.to(torch.int8), "weight_scale": scale_N1}, whole_NK * scale_N1


def _four_bits(weight_NK: torch.Tensor, *, is_even: bool = False) -> tuple[torch.Tensor, ...]:
    """Return numbers of 0 to 15 by [K, N], the zero and the scale of each group, and what they stand for."""
    weight_KN = weight_NK.t()
    groups_GRN = weight_KN.reshape(-1, GROUP, weight_KN.shape[1])
    low_GN, high_GN = groups_GRN.amin(1), groups_GRN.amax(1)
    scale_GN = ((high_GN - low_GN) / 15).to(torch.float16).float()
    zero_GN = torch.full_like(scale_GN, 8) if is_even else (-low_GN / scale_GN).round().clamp(1, 15)
    scale_KN, zero_KN = (each.repeat_interleave(GROUP, 0) for each in (scale_GN, zero_GN))
    whole_KN = (weight_KN / scale_KN + zero_KN).round().clamp(0, 15)
    return whole_KN, zero_GN, scale_GN, ((whole_KN - zero_KN) * scale_KN).t().contiguous()


def _packed(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack eight columns into each word of 32 bits."""
    eight = values.to(torch.int64).reshape(values.shape[0], -1, 8)[..., list(order)]
    return (eight << (4 * torch.arange(8))).sum(-1).to(torch.int32)


def _awq(weight_NK: torch.Tensor) -> Parts:
    whole_KN, zero_GN, scale_GN, meant_NK = _four_bits(weight_NK)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": _packed(whole_KN, order), "qzeros": _packed(zero_GN, order)}
    return {**parts, "scales": scale_GN.to(torch.float16)}, meant_NK


def _gptq(weight_NK: torch.Tensor) -> Parts:
    whole_KN, zero_GN, scale_GN, meant_NK = _four_bits(weight_NK, is_even=True)
    groups = torch.arange(len(whole_KN), dtype=torch.int32) // GROUP
    parts = {"qweight": _packed(whole_KN.t()).t(), "qzeros": _packed(zero_GN - 1), "g_idx": groups}
    return {**parts, "scales": scale_GN.to(torch.float16)}, meant_NK


_INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}
_FOUR = {"bits": 4, "group_size": GROUP}
_WAYS: Mapping[str, tuple[Callable[[torch.Tensor], Parts], Mapping[str, Any]]] = {
    "int8": (_int8, _INT8),
    "awq": (_awq, {"quant_method": "awq", **_FOUR, "zero_point": True, "version": "gemm"}),
    "gptq": (_gptq, {"quant_method": "gptq", **_FOUR, "sym": True, "desc_act": False}),
}
