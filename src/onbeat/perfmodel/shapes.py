"""Batch shapes as the rows of a matrix, for fitting and for vectorised prediction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from onbeat.core.step import BatchShape

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


def shapes_of(matrix: NDArray[np.float64]) -> list[BatchShape]:
    """Return the shapes of a matrix: the inverse of `shape_matrix`."""
    return [BatchShape(*(int(value) for value in row)) for row in matrix]


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
