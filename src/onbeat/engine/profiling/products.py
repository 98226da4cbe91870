"""Matrix products of a forward pass, timed apart from its steps: what a profile says of the machine."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


class RowProducts(Protocol):
    """Matrix products as a forward pass computes them, to be timed."""

    flops_per_row: float
    """Operations of one run for each row."""
    num_bytes: int
    """Of the weights, which every run reads."""

    def run(self, num_rows: int) -> float:
        """Multiply so many rows, and return the seconds that it took."""

    def close(self) -> None:
        """Let go of threads and memory."""


@runtime_checkable
class GivesProducts(Protocol):
    """A forward pass whose matrix products can be timed by themselves."""

    def products(self) -> RowProducts:
        """Return products of its kind; no step may run until they are closed."""
