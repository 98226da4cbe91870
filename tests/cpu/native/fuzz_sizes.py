"""Sizes of made-up models, drawn at random."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onbeat.engine.native.library import MatrixLayout, Store

LAYOUTS = (
    MatrixLayout(Store.F32),
    MatrixLayout(Store.BF16),
    MatrixLayout(Store.Q8, 32),
    MatrixLayout(Store.Q8, 16),
)
"""Stores that float rows go into."""


@dataclass
class LinearSizes:
    """Of a layer that keeps a state of each request."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    most_drafts: int
    num_slots: int = 16

    @property
    def inputs(self) -> int:
        """Numbers of a token that pass the convolution."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


@dataclass
class Sizes:
    """A model's sizes, drawn at random."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    num_experts: int
    expert_size: int
    vocab: int
    block_size: int
    num_blocks: int
    window: int
    is_bfloat16: bool
    """Plain matrices are of the type of the activations."""
    layout: MatrixLayout
    widths: tuple[int, int]
    """Of the heads of each of the two layers; `head_dim` is the wider one."""
    own_input: int
    """Numbers of a token's own input of a layer; 0: none."""
    num_layers: int = 2
    linear: LinearSizes | None = None
    """Of the first layer, where it keeps a state."""


def draw_linear(sizes: Sizes, rng: np.random.Generator) -> LinearSizes | None:
    """Return sizes of a first layer that keeps a state; None where the other one does not go with it."""
    key_heads, most_drafts = int(rng.integers(1, 4)), int(rng.choice([0, 1, 5, 32]))
    dims = 4 * int(rng.integers(4, 20)), 16 * int(rng.integers(1, 6))
    if sizes.num_heads * sizes.widths[1] % 32 or rng.integers(2):
        return None
    return LinearSizes(key_heads, 2 * key_heads, *dims, int(rng.integers(2, 6)), most_drafts)


def draw_sizes(rng: np.random.Generator) -> Sizes:
    layout = LAYOUTS[rng.integers(len(LAYOUTS))]
    unit = layout.group or 1
    num_kv_heads = int(rng.integers(1, 4))
    num_experts = int(rng.choice([0, 0, 1, 3, 8]))
    widths = [32 * int(width) for width in rng.integers(1, 5, 2)]
    if not layout.group and rng.integers(2):
        widths = [2 * int(rng.integers(4, 65))] * 2
    return Sizes(
        hidden=max(unit, 8) * int(rng.integers(1, 6)),
        num_heads=num_kv_heads * int(rng.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        head_dim=max(widths),
        widths=(widths[0], widths[1]),
        own_input=32 * int(rng.integers(3)) if layout.group else 8 * int(rng.integers(6)),
        intermediate=32 * int(rng.integers(1, 6)) if layout.group else 16 * int(rng.integers(1, 10)),
        num_experts=num_experts,
        expert_size=0 if num_experts == 0 else 32 * int(rng.integers(1, 4)),
        vocab=int(rng.integers(3, 300)),
        block_size=16 * int(rng.integers(1, 5)),
        num_blocks=int(rng.integers(12, 60)),
        window=int(rng.choice([0, 0, 1, 7, 40])),
        is_bfloat16=layout.store == Store.BF16 or (layout.store == Store.Q8 and bool(rng.integers(2))),
        layout=layout,
    )
