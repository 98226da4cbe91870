"""The batches that a model was fitted to, and what a prediction beyond them is worth."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape

INFLATION_PER_DOUBLING = 1.1
_EXPONENT = math.log2(INFLATION_PER_DOUBLING)


@dataclass(frozen=True, slots=True)
class ShapeRange:
    """The largest batch that was measured, per kind of work.

    There is no lower bound: below the smallest measured batch a step costs at most what that batch costs,
    whereas beyond the largest nothing bounds it (another kernel, memory that no longer streams).
    """

    num_new_tokens: int
    num_sequences: int
    query_key_pairs: int
    context_tokens: int
    """Context read by decodes and by chunks."""

    def __post_init__(self) -> None:
        if self.num_new_tokens < 1 or self.num_sequences < 1:
            raise ConfigError(f"a range of measured batches needs a token and a sequence: {self}")

    @classmethod
    def of(cls, shapes: Iterable[BatchShape]) -> ShapeRange:
        """Return the range that covers all of these batches."""
        shapes = list(shapes)
        return cls(
            num_new_tokens=max((shape.num_new_tokens for shape in shapes), default=0),
            num_sequences=max((shape.num_sequences for shape in shapes), default=0),
            query_key_pairs=max((shape.query_key_pairs for shape in shapes), default=0),
            context_tokens=max(
                (shape.chunk_cached_tokens + shape.decode_context_tokens for shape in shapes), default=0
            ),
        )

    def describe(self) -> str:
        """Return what was seen, in words."""
        prompts = f"{self.query_key_pairs:,} pairs of prompts" if self.query_key_pairs else "no prompts"
        return (
            f"up to {self.num_sequences:,} requests, {self.num_new_tokens:,} new tokens and "
            f"{self.context_tokens:,} tokens of context in a step, {prompts}"
        )

    def inflation(self, shape: BatchShape) -> float:
        """Return the factor on the time of a batch: 1 inside, 10 % more per doubling of what exceeds most."""
        context_tokens = shape.chunk_cached_tokens + shape.decode_context_tokens
        # A batch inside is the usual one and costs four comparisons.
        if (
            shape.num_new_tokens <= self.num_new_tokens
            and shape.num_sequences <= self.num_sequences
            and shape.query_key_pairs <= self.query_key_pairs
            and context_tokens <= self.context_tokens
        ):
            return 1.0
        excess = max(
            shape.num_new_tokens / self.num_new_tokens,
            shape.num_sequences / self.num_sequences,
            # Where a kind of work was not measured at all, the first token of it counts as one doubling.
            shape.query_key_pairs / (self.query_key_pairs or 0.5),
            context_tokens / (self.context_tokens or 0.5),
        )
        return float(excess**_EXPONENT)
