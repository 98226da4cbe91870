"""Qwen 3: Llama's layer, with each head's query and key normalised before the rotation.

The configuration says so (`qk_norm`), and the shared attention loads the norms.
"""

from __future__ import annotations

from onbeat.engine.models.llama import LlamaLayer


class Qwen3Layer(LlamaLayer):
    """A layer of Qwen 3."""
