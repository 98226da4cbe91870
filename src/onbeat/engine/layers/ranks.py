"""The seam between layers and tensor parallelism: how parts of a product become the whole.

Legend: V vocabulary, D model width.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from onbeat.engine.layers.linear import Linear


class Ranks(Protocol):
    """The processes that products are split among. Asked while a model is built, not in its steps."""

    def sum_up(self, product: Linear) -> Linear:
        """Return the whole of a product whose inputs are split: what the ranks' results add up to."""
        ...

    def join(self, product: Linear) -> Linear:
        """Return the whole of the output head, whose outputs are split; only the first rank gets it."""
        ...

    def vocabulary_part(self, weight_VD: Tensor) -> Tensor:
        """Return the rows of an embedding table that make up this rank's part of a tied output head."""
        ...


class OneRank:
    """No split: every part is the whole, so that a step pays nothing for this seam."""

    def sum_up(self, product: Linear) -> Linear:
        return product

    def join(self, product: Linear) -> Linear:
        return product

    def vocabulary_part(self, weight_VD: Tensor) -> Tensor:
        return weight_VD


ONE_RANK = OneRank()
