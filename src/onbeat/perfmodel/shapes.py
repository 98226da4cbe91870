"""Batch shapes as the rows of a matrix, for fitting and for vectorised prediction.

`ShapeRange` is the batches that a model was fitted to, and what a prediction beyond them is worth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.typed import Count

INFLATION_PER_DOUBLING = 1.1
_EXPONENT = math.log2(INFLATION_PER_DOUBLING)
_WORDS = {
    "num_sequences": "requests",
    "num_new_tokens": "new tokens",
    "context_tokens": "tokens of context",
    "query_key_pairs": "query-key pairs of prompts",
}

Beyond = Mapping[str, tuple[int, int]]
"""Field of a range -> (the most that a run had in a step, the most that was measured)."""


@dataclass(frozen=True, slots=True)
class ShapeRange:
    """The largest batch that was measured, per kind of work.

    There is no lower bound: below the smallest measured batch a step costs at most what that batch costs,
    whereas beyond the largest nothing bounds it (another kernel, memory that no longer streams).
    """

    num_new_tokens: Count
    num_sequences: Count
    query_key_pairs: Count
    context_tokens: Count
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


class LargestStep:
    """The most of each kind of work that a step of a run had."""

    __slots__ = ("context_tokens", "num_new_tokens", "num_sequences", "query_key_pairs")

    def __init__(self) -> None:
        self.num_new_tokens = self.num_sequences = self.query_key_pairs = self.context_tokens = 0

    def see(self, shape: BatchShape, decode_context_tokens: int) -> None:
        """Look at a step, or at the last of a run of them, whose decodes read this much."""
        context = shape.chunk_cached_tokens + decode_context_tokens
        if shape.num_new_tokens > self.num_new_tokens:
            self.num_new_tokens = shape.num_new_tokens
        if shape.num_sequences > self.num_sequences:
            self.num_sequences = shape.num_sequences
        if shape.query_key_pairs > self.query_key_pairs:
            self.query_key_pairs = shape.query_key_pairs
        if context > self.context_tokens:
            self.context_tokens = context

    def beyond(self, measured: ShapeRange) -> Beyond:
        """Return where the run left what was measured."""
        pairs = {name: (int(getattr(self, name)), int(getattr(measured, name))) for name in _WORDS}
        return {name: (had, most) for name, (had, most) in pairs.items() if had > most}


def join_beyond(parts: Iterable[Beyond]) -> Beyond:
    """Return the worst of several runs, by field."""
    joined: dict[str, tuple[int, int]] = {}
    for part in parts:
        for name, (had, most) in part.items():
            known = joined.get(name)
            if known is None or had * known[1] > known[0] * most:
                joined[name] = (had, most)
    return joined


def told_beyond(beyond: Beyond) -> str:
    """Return a warning for the reader of a run's numbers; empty where all was measured."""
    if not beyond:
        return ""
    found = ", ".join(f"{had:,} {_WORDS[name]} ({most:,})" for name, (had, most) in beyond.items())
    return (
        f"steps went beyond what the profile was fitted to: up to {found}; predictions of these are "
        "extrapolated. Record or measure such steps for numbers that hold"
    )


FIELDS: tuple[str, ...] = tuple(field.name for field in fields(BatchShape))
"""The columns of a shape matrix, in order."""

NEW_TOKENS = FIELDS.index("num_new_tokens")
SEQUENCES = FIELDS.index("num_sequences")
DECODES = FIELDS.index("num_decodes")
CHUNKS = FIELDS.index("num_chunks")
QUERY_KEY_PAIRS = FIELDS.index("query_key_pairs")
CHUNK_CACHED_TOKENS = FIELDS.index("chunk_cached_tokens")
DECODE_CONTEXT_TOKENS = FIELDS.index("decode_context_tokens")
LM_HEAD_ROWS = FIELDS.index("num_lm_head_rows")
VERIFY_ROWS = FIELDS.index("num_verify_rows")
DRAFT_TOKENS = FIELDS.index("num_draft_tokens")

_row = attrgetter(*FIELDS)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step that ran."""

    shape: BatchShape
    seconds: float


def shape_matrix(shapes: Iterable[BatchShape]) -> NDArray[np.float64]:
    """Return one row a shape, one column a field of `FIELDS`: [N, F]."""
    rows = [_row(shape) for shape in shapes]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(FIELDS))


def draft_pairs(shape: BatchShape) -> float:
    """Return the query-key pairs of draft tokens: what a verified row computes beyond a plain decode.

    The sums do not say which decode rows verify; each draft is taken to attend to their mean context.
    """
    if not shape.num_draft_tokens:
        return 0.0
    return shape.num_draft_tokens * shape.decode_context_tokens / shape.num_decodes


def draft_pairs_of(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `draft_pairs` of the rows of a shape matrix. [N]."""
    decodes = np.maximum(matrix[:, DECODES], 1)
    return matrix[:, DRAFT_TOKENS] * matrix[:, DECODE_CONTEXT_TOKENS] / decodes
