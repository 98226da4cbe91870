"""Tiny random Hugging Face models of each family, as references."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from onbeat.engine.model_config import model_config_from_hf
from onbeat.engine.models.model import Model
from onbeat.engine.models.registry import build_model
from onbeat.engine.weights import parameter_shapes

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False}),
    "llama-tied-linear-rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
        },
    ),
    "mistral-sliding": (
        MistralForCausalLM,
        MistralConfig,
        {"sliding_window": 24, "head_dim": 16, "tie_word_embeddings": False},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 24, "tie_word_embeddings": False}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "head_dim": 32,
            "num_key_value_heads": 1,
            "sliding_window": 20,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 48,
        },
    ),
}


class StateCheckpoint:
    """A Hugging Face model's parameters as a checkpoint."""

    def __init__(self, hf_model: Any) -> None:
        self.config = model_config_from_hf(hf_model.config.to_dict())
        self.state = hf_model.state_dict()

    def names(self) -> list[str]:
        return list(parameter_shapes(self.config))

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor: torch.Tensor = self.state[name]
        return tensor.to(dtype)


@dataclass(frozen=True)
class TinyModel:
    """A reference, and the same weights in our model."""

    name: str
    hf_model: Any
    model: Model

    @functools.cache  # noqa: B019 -- lives as long as the test session anyway
    def reference(self, prompt: tuple[int, ...], max_tokens: int) -> tuple[list[int], torch.Tensor]:
        """Return greedy tokens of `generate`, and the logits [max_tokens, vocabulary] behind them."""
        with torch.inference_mode():
            output = self.hf_model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=max_tokens,
                do_sample=False,
            )
            # `generate` reports logits rounded to float32, so they are computed again.
            logits = self.hf_model(output[:, :-1]).logits[0, len(prompt) - 1 :]
        return output[0, len(prompt) :].tolist(), logits


def hf_tiny_model(name: str, dtype: torch.dtype) -> Any:
    """Return a random reference model, the same for the same name."""
    model_class, config_class, options = FAMILIES[name]
    config = config_class(**{**SIZES, **options}, attn_implementation="sdpa")
    config.architectures = [model_class.__name__]
    torch.manual_seed(len(name))
    hf_model = model_class(config).to(torch.float64)
    with torch.no_grad():
        for parameter_name, parameter in hf_model.named_parameters():
            # Matrices that keep activations at their size, norms and biases that are not the identity.
            is_matrix = parameter.dim() == 2
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5 if is_matrix else 0.3)
            if "norm" in parameter_name and "gemma" not in name:
                parameter.add_(1.0)
        hf_model.model.embed_tokens.weight.normal_(0.0, 1.0)
    hf_model.generation_config.eos_token_id = None
    return hf_model.to(dtype).eval()


@functools.cache
def tiny_model(name: str, dtype: torch.dtype = torch.float64) -> TinyModel:
    hf_model = hf_tiny_model(name, dtype)
    model = build_model(StateCheckpoint(hf_model), dtype=dtype, device=torch.device("cpu"))
    return TinyModel(name, hf_model, model)


def random_prompt(length: int, vocab_size: int = 211) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(1, vocab_size, (length,), generator=generator).tolist()
