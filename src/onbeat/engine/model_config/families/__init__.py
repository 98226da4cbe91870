"""The model families, and the table of them."""

from __future__ import annotations

from collections.abc import Mapping

from onbeat.engine.model_config.families.base import Family, GgufRules, read_model
from onbeat.engine.model_config.families.gemma3 import GEMMA3
from onbeat.engine.model_config.families.gpt_oss import GPT_OSS
from onbeat.engine.model_config.families.llama import GRANITE, LLAMA, MISTRAL, MIXTRAL, OLMO2, PHI3, SMOLLM3
from onbeat.engine.model_config.families.qwen import QWEN2, QWEN3, QWEN3_MOE

__all__ = ["FAMILIES", "GGUF_FAMILIES", "Family", "GgufRules", "read_model"]

FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        *(LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA3, GPT_OSS),
        *(PHI3, OLMO2, SMOLLM3, GRANITE),
    )
}
"""By `architectures` of a config.json."""
GGUF_FAMILIES: Mapping[str, Family] = {
    family.gguf.architecture: family for family in FAMILIES.values() if family.gguf is not None
}
"""By `general.architecture` of a GGUF file."""
