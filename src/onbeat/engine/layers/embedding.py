"""Token embedding.

Legend: T tokens, V vocabulary, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Embedding:
    """Rows of a table, scaled where the family asks for it (Gemma)."""

    def __init__(self, weight_VD: Tensor, scale: float = 1.0) -> None:
        self.weight_VD = weight_VD
        # The factor is rounded to the model's type first, as the reference does.
        self.scale = float(torch.tensor(scale, dtype=weight_VD.dtype)) if scale != 1.0 else None

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        rows_TD = self.weight_VD.index_select(0, token_ids_T)
        return rows_TD if self.scale is None else rows_TD.mul_(self.scale)
