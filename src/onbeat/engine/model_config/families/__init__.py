"""The model families, and the table of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from onbeat.engine.model_config.families import gemma, llama, others, qwen
from onbeat.engine.model_config.families.base import Family, GgufRules, read_model

__all__ = ["FAMILIES", "GGUF_FAMILIES", "Family", "GgufRules", "read_model"]

FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        *(llama.LLAMA, llama.MISTRAL, llama.MINISTRAL3, llama.MIXTRAL),
        *(qwen.QWEN2, qwen.QWEN3, qwen.QWEN3_MOE, gemma.GEMMA2, gemma.GEMMA3, gemma.GEMMA4, others.GPT_OSS),
        *(llama.PHI3, others.PHI_MOE, llama.OLMO2, llama.OLMO3),
        *(llama.SMOLLM3, llama.GRANITE, llama.GRANITE4),
        *(others.COMMAND_R, others.COHERE2, others.STARCODER2, others.GLM4, others.ERNIE, others.SEED_OSS),
        # as transformers calls the class itself
        replace(others.PHI_MOE, architecture="PhimoeForCausalLM"),
        *(qwen.QWEN3_NEXT, qwen.QWEN3_5, qwen.QWEN3_5_MOE),
    )
}
"""By `architectures` of a config.json."""
GGUF_FAMILIES: Mapping[str, Family] = {
    family.gguf.architecture: family for family in FAMILIES.values() if family.gguf is not None
}
"""By `general.architecture` of a GGUF file."""
