"""Batches for tests of step-time models."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from hypothesis import strategies as st

from onbeat.core.step import BatchShape

Row = tuple[int, int]
"""(computed tokens, new tokens)"""


def batch(rows: Iterable[Row]) -> BatchShape:
    shape = BatchShape()
    for num_computed_tokens, num_new_tokens in rows:
        shape.add(num_computed_tokens, num_new_tokens, samples=True)
    return shape


def decodes(count: int, context: int) -> BatchShape:
    return batch([(context - 1, 1)] * count)


def verifies(count: int, context: int, num_drafts: int, *, by_model: bool = False) -> BatchShape:
    """Decodes at a context, each with drafts; by a model, in as many passes as there are drafts."""
    shape = BatchShape()
    for _ in range(count):
        shape.add_verify(context - 1, num_drafts)
    shape.num_draft_passes = num_drafts if by_model else 0
    return shape


def with_chunk(shape: BatchShape, cached_tokens: int, num_tokens: int) -> BatchShape:
    longer = replace(shape)
    longer.add(cached_tokens, num_tokens, samples=True)
    return longer


def linear_seconds(shape: BatchShape) -> float:
    """A plausible step time that no sum can make smaller."""
    weights_read = 5e-3
    arithmetic = 2e-5 * shape.num_new_tokens + 1e-9 * shape.query_key_pairs
    cache_read = 1e-8 * (shape.decode_context_tokens + shape.chunk_cached_tokens)
    return max(weights_read, arithmetic) + cache_read + 1e-5 * shape.num_sequences


def mixed_batches(count: int, seed: int, *, with_drafts: bool = False) -> list[BatchShape]:
    """Decodes, chunks and both, over the sizes that a server meets; with drafts in half of them, or none."""
    rng = random.Random(seed)
    shapes = []
    for _ in range(count):
        rows: list[Row] = [(rng.randint(1, 4000), 1) for _ in range(rng.choice((0, 1, 8, 32, 128)))]
        rows += [(rng.randint(0, 4000), rng.randint(2, 1024)) for _ in range(rng.choice((0, 1, 2)))]
        shape = batch(rows or [(0, 16)])
        if with_drafts and rng.random() < 0.5:
            for _ in range(rng.choice((1, 4, 16))):
                shape.add_verify(rng.randint(1, 4000), rng.randint(0, 8))
        shapes.append(shape)
    return shapes


rows = st.lists(st.tuples(st.integers(0, 8192), st.sampled_from((1, 1, 1, 2, 64, 512))), max_size=40)
verified = st.lists(st.tuples(st.integers(0, 8192), st.integers(0, 8)), max_size=10)
"""Decode rows (computed tokens, drafts)."""


def with_verified(shape: BatchShape, verified_rows: Iterable[Row]) -> BatchShape:
    longer = replace(shape)
    for num_computed_tokens, num_drafts in verified_rows:
        longer.add_verify(num_computed_tokens, num_drafts)
    return longer
