"""Tiny random Hugging Face models of each family, as references."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers as hf
from numpy.typing import NDArray

from onbeat.engine.dtypes import BFLOAT16
from onbeat.engine.model_config.families import FAMILIES as ARCHITECTURES
from onbeat.engine.model_config.hf import model_config_from_hf
from onbeat.engine.torch.types import torch_dtype
from onbeat.engine.torch.weights import TorchWeights, load_weights
from onbeat.engine.weights.checkpoint import ALL_ROWS, Checkpoint
from onbeat.engine.weights.parameters import find_rows, parameter_shapes
from tests.cpu.engine.exact_models import compute_exactly
from tests.cpu.engine.gemma4_models import GEMMA4, WINDOWED
from tests.cpu.engine.stateful_models import STATEFUL

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
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "original_max_position_embeddings": 128,
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama3": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig,
        {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False},
    ),
    "llama-tied-linear-rope": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig,
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
            "tie_word_embeddings": True,
            "mlp_bias": True,
            "num_key_value_heads": 1,
        },
    ),
    "mistral-sliding": (
        hf.MistralForCausalLM,
        hf.MistralConfig,
        {"sliding_window": 24, "head_dim": 16, "tie_word_embeddings": False},
    ),
    "qwen2": (
        hf.Qwen2ForCausalLM,
        hf.Qwen2Config,
        {"tie_word_embeddings": True, "rope_parameters": YARN_ROPE},
    ),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {"head_dim": 24, "tie_word_embeddings": False}),
    "gemma3": (
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig,
        {
            "head_dim": 32,
            "num_key_value_heads": 1,
            "sliding_window": 20,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 48,
        },
    ),
    "phi3": (
        hf.Phi3ForCausalLM,
        hf.Phi3Config,
        {
            "sliding_window": 30,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "phi3-longrope": (
        hf.Phi3ForCausalLM,
        hf.Phi3Config,
        {
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.1 * index for index in range(6)],
                "long_factor": [2.0 + index for index in range(6)],
                "attention_factor": 1.19,
            },
        },
    ),
    "olmo2": (hf.Olmo2ForCausalLM, hf.Olmo2Config, {}),
    "smollm3": (
        hf.SmolLM3ForCausalLM,
        hf.SmolLM3Config,
        {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True},
    ),
    "granite": (
        hf.GraniteForCausalLM,
        hf.GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 5.0,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss": (
        hf.GptOssForCausalLM,
        hf.GptOssConfig,
        {
            "attn_implementation": "eager",
            "head_dim": 24,
            "num_hidden_layers": 3,
            "intermediate_size": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 20,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig,
        {
            "head_dim": 24,
            "num_hidden_layers": 3,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
    ),
    "gemma2": (
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config,
        {
            "head_dim": 24,
            "sliding_window": 20,
            "query_pre_attn_scalar": 48,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "command-r": (hf.CohereForCausalLM, hf.CohereConfig, {"use_qk_norm": True, "logit_scale": 0.3}),
    "starcoder2": (
        hf.Starcoder2ForCausalLM,
        hf.Starcoder2Config,
        {"sliding_window": 40, "intermediate_size": 72},
    ),
    "phi-moe": (
        hf.PhimoeForCausalLM,
        hf.PhimoeConfig,
        {
            "num_local_experts": 5,
            "router_jitter_noise": 0.3,
            "attention_bias": True,
            "lm_head_bias": True,
            "intermediate_size": 40,
        },
    ),
    "glm4": (hf.Glm4ForCausalLM, hf.Glm4Config, {"head_dim": 24, "pad_token_id": 0}),
    "olmo3": (
        hf.Olmo3ForCausalLM,
        hf.Olmo3Config,
        {
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": YARN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "granite4": (
        hf.GraniteMoeHybridForCausalLM,
        hf.GraniteMoeHybridConfig,
        {
            "num_local_experts": 0,
            "shared_intermediate_size": 80,
            "layer_types": ["full_attention", "full_attention"],
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 5.0,
            "mamba_n_heads": 2,
        },
    ),
    "ministral3": (
        hf.Ministral3ForCausalLM,
        hf.Ministral3Config,
        {
            "head_dim": 16,
            "rope_parameters": {
                **YARN_ROPE,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
}
KIN: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "cohere2": (hf.Cohere2ForCausalLM, hf.Cohere2Config, {"num_hidden_layers": 4, "sliding_window": 24}),
    "ernie4_5": (hf.Ernie4_5ForCausalLM, hf.Ernie4_5Config, {"head_dim": 16, "use_bias": True}),
    "seed-oss": (
        hf.SeedOssForCausalLM,
        hf.SeedOssConfig,
        {"head_dim": 24, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "phi3-long": (
        hf.Phi3ForCausalLM,
        hf.Phi3Config,
        # The first token turns by no angle; from the second on transformers takes those for long contexts.
        FAMILIES["phi3-longrope"][2] | {"original_max_position_embeddings": 1},
    ),
    "granite4-rope": (
        hf.GraniteMoeHybridForCausalLM,
        hf.GraniteMoeHybridConfig,
        FAMILIES["granite4"][2] | {"position_embedding_type": "rope"},
    ),
}
"""Models of other families' layers: fewer tests run them."""

ON_TORCH = FAMILIES | GEMMA4
"""With those whose prefix hits, drafts and moves have tests of their own."""

compute_exactly()


class StateCheckpoint(Checkpoint):
    """A Hugging Face model's parameters as a checkpoint."""

    def __init__(self, hf_model: Any) -> None:
        super().__init__(model_config_from_hf(hf_model.config.to_dict()))
        family = ARCHITECTURES[self.config.architecture]
        self.state = {
            name: part
            for whole, tensor in hf_model.state_dict().items()
            for name, part in family.own_tensors(whole, tensor)
        }
        shapes = {name: tuple(tensor.shape) for name, tensor in self.state.items()}
        self.rows = find_rows(shapes, parameter_shapes(self.config), self.config)

    def get(self, name: str, dtype: np.dtype[Any], rows: slice = ALL_ROWS) -> NDArray[Any]:
        stored = self.rows[name]
        tensor: torch.Tensor = self.state[stored.tensor]
        if stored.tensor != name:
            tensor = tensor.flatten(0, -2)[stored.first : stored.end]
        return to_array(tensor[rows].to(torch_dtype(dtype)))


@dataclass(frozen=True)
class Reference:
    """A model of transformers, and what it has been asked."""

    hf_model: Any
    answers: dict[tuple[tuple[int, ...], int], tuple[list[int], torch.Tensor]] = field(
        default_factory=dict, compare=False
    )
    """Tokens and logits of `reference`, by its prompt and number of tokens."""

    def reference(
        self, prompt: Sequence[int], max_tokens: int, guess: Sequence[int] = ()
    ) -> tuple[list[int], torch.Tensor]:
        """Return greedy tokens of `generate`, and the logits [max_tokens, vocabulary] behind them.

        Parameters
        ----------
        guess : what the tokens may be. One pass over all of them says whether each is the best after those
            before it; then they are what `generate` would find in a pass for each.
        """
        key = (tuple(prompt), max_tokens)
        if key not in self.answers:
            token_ids = list(guess)
            logits = self.logits(prompt, token_ids)
            if len(token_ids) != max_tokens or logits.argmax(dim=-1).tolist() != token_ids:
                token_ids = self.generate(prompt, max_tokens)
                logits = self.logits(prompt, token_ids)
            self.answers[key] = token_ids, logits
        return self.answers[key]

    def logits(self, prompt: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        """Return those behind each of the tokens; `generate` reports them rounded to float32."""
        with torch.inference_mode():
            logits: torch.Tensor = self.hf_model(torch.tensor([[*prompt, *token_ids[:-1]]])).logits
        return logits[0, len(prompt) - 1 :]

    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Return transformers' greedy tokens."""
        with torch.inference_mode():
            output = self.hf_model.generate(
                torch.tensor([[*prompt]]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=max_tokens,
                do_sample=False,
            )
        token_ids: list[int] = output[0, len(prompt) :].tolist()
        return token_ids


@dataclass(frozen=True, kw_only=True)
class TinyModel(Reference):
    """A reference, and the same weights in our layout."""

    name: str
    weights: TorchWeights


def hf_tiny_model(name: str, dtype: torch.dtype) -> Any:
    """Return a random reference model, the same for the same name."""
    model_class, config_class, options = (ON_TORCH | KIN | STATEFUL | WINDOWED)[name]
    # A configuration writes into the tables that it is given, and kin share some.
    options = {**SIZES, "attn_implementation": "eager" if name == "gemma2" else "sdpa", **deepcopy(options)}
    config = config_class(**options, experts_implementation="eager")
    config.architectures = [model_class.__name__]
    torch.manual_seed(len(name))
    hf_model = model_class(config).to(torch.float64)
    with torch.no_grad():
        for parameter_name, parameter in hf_model.named_parameters():
            # Matrices that keep activations at their size, norms and biases that are not the identity.
            is_matrix = parameter.dim() >= 2
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5 if is_matrix else 0.3)
            offset = name in ("gemma2", "gemma3") or (
                name in STATEFUL and "linear_attn" not in parameter_name
            )
            if ("norm" in parameter_name and not offset) or parameter_name.endswith("scale"):
                parameter.add_(1.0)
        for buffer_name, buffer in hf_model.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        hf_model.model.embed_tokens.weight.normal_(0.0, 1.0)
    hf_model.generation_config.eos_token_id = None
    return hf_model.to(dtype).eval()


@functools.cache
def tiny_model(name: str, dtype: torch.dtype = torch.float64) -> TinyModel:
    hf_model = hf_tiny_model(name, dtype)
    weights = load_weights(StateCheckpoint(hf_model), dtype=dtype, device=torch.device("cpu"))
    return TinyModel(name=name, hf_model=hf_model, weights=weights)


def random_prompt(length: int, vocab_size: int = 211) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(1, vocab_size, (length,), generator=generator).tolist()


def to_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a tensor on the CPU as an array that shares its memory."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(BFLOAT16)
    return tensor.numpy()
