"""What models need that onbeat lacks, for the error that refuses them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from onbeat.core.errors import ModelLoadError

_TABLE = "https://github.com/onbeat/onbeat/blob/main/docs/models.md#families"
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "linear attention (gated DeltaNet)": ("qwen35", "qwen3next"),
    "rotary positions of three parts": ("qwen2vl", "qwen25vl", "qwen3vl"),
    "attention sinks and MXFP4 experts": ("gptoss",),
    "layers with two head sizes and shared KV": ("gemma4",),
    "shared KV and embeddings of each layer": ("gemma3n",),
    "soft-capped logits": ("gemma2",),
    "latent attention (MLA)": ("deepseekv2", "deepseekv3", "deepseek2"),
    "chunked attention and shared experts": ("llama4",),
    "its text taken out of a multimodal checkpoint": ("mistral3",),
    "attention in both directions": ("bert", "modernbert", "roberta", "xlmroberta", "gemma3text", "gemmaemb"),
    "LayerNorm and biases": ("gpt2", "opt", "gptneox", "gptj", "starcoder2"),
    "state-space layers": ("mamba", "falconh1", "nemotronh", "granitemoehybrid", "granitehybrid", "jamba"),
}
"""A need, and how the names begin of what has it: lower case, letters and digits alone."""


def unsupported_architecture(name: object, supported: Iterable[str], *, source: str) -> ModelLoadError:
    """Return the error for an architecture that onbeat does not run.

    Parameters
    ----------
    name, supported : as the source spells architectures.
    source : what names it.
    """
    plain = re.sub(r"[^a-z0-9]", "", str(name).lower())
    needs = [f": it needs {need}" for need, starts in _NEEDS.items() if plain.startswith(starts)]
    return ModelLoadError(
        f"{source}'s architecture {name!r} is not supported{''.join(needs)}; "
        f"supported: {', '.join(sorted(supported))}. More: {_TABLE}"
    )
