"""The seam between models and attention implementations.

A backend owns the KV cache and its layout. `prepare` does a step's host work once; `run` is called per layer.

Legend: T tokens of the step, R rows, S request slots, B blocks of a table, N query heads, K KV heads,
H head width.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # the engines that compute with something else have batches too
    from torch import Tensor

    from onbeat.engine.torch_kv import LayerKVCache

IntArray = NDArray[np.int64]
BlockTable = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What attention must know of a step, in host memory. Tokens are packed row after row."""

    query_lens_R: IntArray
    """New tokens of each row, at least 1."""
    context_lens_R: IntArray
    """Tokens that the row's last new token sees, itself included."""
    slots_R: IntArray
    """Each row's line of `block_tables_SB`."""
    block_tables_SB: BlockTable
    slot_mapping_T: IntArray
    """Where each token's KV goes: block id * block size + offset."""
    admissions_S: IntArray | None = None
    """Whose line of `block_tables_SB` it is. As long as a line's number stays, blocks are only added at its
    end. None where nobody asks: only devices remember tables."""


class AttentionBackend(Protocol):
    """Attention of every layer over one paged KV cache."""

    @property
    def name(self) -> str: ...

    @property
    def layers(self) -> Sequence[LayerKVCache]:
        """The KV cache of each layer."""
        ...

    def prepare(self, batch: AttentionBatch) -> Any:
        """Return what `run` needs for this step; only this backend looks into it."""
        ...

    def run(self, layer_index: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, metadata: Any) -> Tensor:
        """Store the new keys and values, and return what the queries see of the cache, [T, N, H]."""
        ...

    def scrub(self, block_ids: IntArray) -> None:
        """Make stored values finite: a block's unused slots are masked, which does not hold back a NaN."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What a forward pass carries through the layers."""

    attention: AttentionBackend
    metadata: Any
