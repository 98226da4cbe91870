"""The model families, one file each, and the table of them."""

from __future__ import annotations

from collections.abc import Mapping

from onbeat.engine.model_config.families.base import Family, GgufRules
from onbeat.engine.model_config.families.gemma3 import GEMMA3
from onbeat.engine.model_config.families.granite import GRANITE
from onbeat.engine.model_config.families.llama import LLAMA
from onbeat.engine.model_config.families.mistral import MISTRAL, MIXTRAL
from onbeat.engine.model_config.families.olmo2 import OLMO2
from onbeat.engine.model_config.families.phi3 import PHI3
from onbeat.engine.model_config.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from onbeat.engine.model_config.families.smollm3 import SMOLLM3

__all__ = ["FAMILIES", "GGUF_FAMILIES", "Family", "GgufRules"]

FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        *(LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA3),
        *(PHI3, OLMO2, SMOLLM3, GRANITE),
    )
}
"""By `architectures` of a config.json."""
GGUF_FAMILIES: Mapping[str, Family] = {
    family.gguf.architecture: family for family in FAMILIES.values() if family.gguf is not None
}
"""By `general.architecture` of a GGUF file."""
