"""What attention must know of a step, whatever computes it.

Legend: T tokens of the step, R rows, S request slots, B blocks of a table.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
BlockTable = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step, in host memory. Tokens are packed row after row."""

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
