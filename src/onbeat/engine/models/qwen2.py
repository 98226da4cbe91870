"""Qwen 2 and 2.5: Llama's layer, with biases on the query, key and value projections.

The configuration says so (`attention_bias`), and the shared attention loads them.
"""

from __future__ import annotations

from onbeat.engine.models.llama import LlamaLayer


class Qwen2Layer(LlamaLayer):
    """A layer of Qwen 2."""
