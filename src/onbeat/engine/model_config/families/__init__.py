"""The model families, and the table of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from onbeat.engine.model_config.families.base import Family, GgufRules, read_model
from onbeat.engine.model_config.families.gemma import GEMMA2, GEMMA3, GEMMA4
from onbeat.engine.model_config.families.gpt_oss import GPT_OSS
from onbeat.engine.model_config.families.llama import (
    GRANITE,
    GRANITE4,
    LLAMA,
    MINISTRAL3,
    MISTRAL,
    MIXTRAL,
    OLMO2,
    OLMO3,
    PHI3,
    SMOLLM3,
)
from onbeat.engine.model_config.families.others import (
    COHERE2,
    COMMAND_R,
    ERNIE,
    GLM4,
    PHI_MOE,
    SEED_OSS,
    STARCODER2,
)
from onbeat.engine.model_config.families.qwen import QWEN2, QWEN3, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT

__all__ = ["FAMILIES", "GGUF_FAMILIES", "Family", "GgufRules", "read_model"]

FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        *(LLAMA, MISTRAL, MINISTRAL3, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA2, GEMMA3, GEMMA4, GPT_OSS),
        *(PHI3, PHI_MOE, OLMO2, OLMO3, SMOLLM3, GRANITE, GRANITE4),
        *(COMMAND_R, COHERE2, STARCODER2, GLM4, ERNIE, SEED_OSS),
        replace(PHI_MOE, architecture="PhimoeForCausalLM"),  # as transformers calls the class itself
        *(QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE),
    )
}
"""By `architectures` of a config.json."""
GGUF_FAMILIES: Mapping[str, Family] = {
    family.gguf.architecture: family for family in FAMILIES.values() if family.gguf is not None
}
"""By `general.architecture` of a GGUF file."""
