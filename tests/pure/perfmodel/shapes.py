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


def mixed_batches(count: int, seed: int) -> list[BatchShape]:
    """Decodes, chunks and both, over the sizes that a server meets."""
    rng = random.Random(seed)
    shapes = []
    for _ in range(count):
        rows: list[Row] = [(rng.randint(1, 4000), 1) for _ in range(rng.choice((0, 1, 8, 32, 128)))]
        rows += [(rng.randint(0, 4000), rng.randint(2, 1024)) for _ in range(rng.choice((0, 1, 2)))]
        shapes.append(batch(rows or [(0, 16)]))
    return shapes


rows = st.lists(st.tuples(st.integers(0, 8192), st.sampled_from((1, 1, 1, 2, 64, 512))), max_size=40)
