"""Parts of the reference models that round to float32 on the way, with ours in their place, which do not."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.cohere import modeling_cohere
from transformers.models.cohere2 import modeling_cohere2
from transformers.models.ernie4_5 import modeling_ernie4_5
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm


def _exact_rotation(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> tuple[Any, Any]:
    """Turn neighbours as Cohere and ERNIE do, who round to float32 first."""
    half = cos.shape[-1] // 2
    is_repeated = torch.equal(cos[..., 0::2], cos[..., 1::2]) and torch.equal(sin[..., 0::2], sin[..., 1::2])
    cos, sin = (
        part if is_repeated else part[..., :half].repeat_interleave(2, dim=-1)
        for part in (cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))
    )
    return q * cos + modeling_cohere.rotate_half(q) * sin, k * cos + modeling_cohere.rotate_half(k) * sin


def _exact_norm(norm: Any, x: torch.Tensor) -> Any:
    """Normalise as Cohere does, who rounds to float32 first."""
    x = x - x.mean(-1, keepdim=True)
    return norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))


def _exact_attention(
    module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float = 1.0, softcap: float = 1.0, **_: Any
) -> tuple[Any, None]:
    """Attend as Gemma 2 does, whose softmax rounds to float32."""
    k, v = (part.repeat_interleave(module.num_key_value_groups, dim=1) for part in (k, v))
    scores = torch.tanh(q @ k.transpose(2, 3) * scaling / softcap) * softcap
    return ((scores + mask).softmax(-1) @ v).transpose(1, 2).contiguous(), None


def _exact_scale(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Scale what is normalised as OLMo 2 does; Gemma 4 rounds the scale to float32 first."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    return (wide * norm.weight if norm.with_scale else wide).to(x.dtype)


_EXACT: tuple[tuple[Any, str, Any], ...] = (
    (modeling_cohere, "apply_rotary_pos_emb", _exact_rotation),
    (modeling_cohere2, "apply_rotary_pos_emb", _exact_rotation),
    (modeling_ernie4_5, "apply_rotary_pos_emb", _exact_rotation),
    (modeling_cohere.CohereLayerNorm, "forward", _exact_norm),
    (modeling_cohere2.Cohere2LayerNorm, "forward", _exact_norm),
    (modeling_gemma2, "eager_attention_forward", _exact_attention),
    (Gemma4RMSNorm, "forward", _exact_scale),
)


def compute_exactly() -> None:
    """Let the reference models of this process compute with these."""
    for place, name, exact in _EXACT:
        setattr(place, name, exact)
