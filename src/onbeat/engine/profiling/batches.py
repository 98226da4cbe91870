"""Which batches to measure: corners of what the engine may run, and mixes that fill the space between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onbeat.core.extras import require
from onbeat.core.step import BatchShape
from onbeat.scheduler.scheduler_config import SchedulerConfig

MAX_CHUNKS = 4
"""Most chunks in one measured step."""
MAX_DRAFTS = 7
"""Most drafts of a row in a measured step."""
MOST_VERIFYING = 32
"""Most rows of a grid step that verify: with more, drafts are hardly worth their time."""
MAX_CACHE_SHARE = 0.9
"""Share of the KV cache that one batch may take."""
SHORTEST_CONTEXT = 16
TIMES_AT_ONCE = 3
"""How often a step is launched to be timed on an engine that launches ahead; each samples a token."""
_LONGEST_CONTEXTS = 8
"""So many rows of the longest measured context make up the most context of a batch."""


class BatchRow(NamedTuple):
    """One request's share of a measured step."""

    num_cached_tokens: int
    num_new_tokens: int
    samples: bool = True
    """False for a chunk that is not the last of its prompt."""
    num_drafts: int = 0
    """Of the new tokens: a decode row has one more than that."""


MOST_TOKENS = {"cpu": 512, "cuda": 8192}
"""Largest batch that is measured, by the kind of device. A policy whose budget is time has next to no limit
on tokens; longer chunks cost in proportion, and what lies beyond the measured range is predicted with a
surcharge."""


@dataclass(frozen=True, slots=True)
class MeasuredBatch:
    """Rows of one step."""

    rows: tuple[BatchRow, ...]

    @property
    def shape(self) -> BatchShape:
        """The sums that step-time models see."""
        shape = BatchShape()
        for row in self.rows:
            if row.num_drafts:
                shape.add_verify(row.num_cached_tokens, row.num_drafts)
            else:
                shape.add(row.num_cached_tokens, row.num_new_tokens, samples=row.samples)
        return shape

    def num_blocks(self, block_size: int) -> int:
        """Return how many KV blocks the rows take."""
        return sum(-(-(row.num_cached_tokens + row.num_new_tokens) // block_size) for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The space that batches are drawn from."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    """Most tokens of one row."""
    max_context_tokens: int
    """Most tokens of all rows of a batch together, new ones included."""

    @classmethod
    def of_scheduler(
        cls, config: SchedulerConfig, *, max_context_tokens: int, device_type: str
    ) -> BatchLimits:
        """Return the limits of an engine; contexts in sum at most `max_context_tokens`, and what fits.

        Each row may leave most of its last block empty, and such blocks are set aside: at most half of what a
        batch may take, so that where a cache is small for its slots batches have fewer rows, not none with
        context.
        """
        num_blocks = int(config.num_blocks * MAX_CACHE_SHARE)
        num_rows = max(min(config.max_num_seqs, num_blocks // 2), 1)
        in_cache = (num_blocks - num_rows) * config.block_size
        # Sampled tokens need positions too; and a few of the longest contexts must fit together.
        longest = max(min(config.max_model_len - TIMES_AT_ONCE, max_context_tokens // _LONGEST_CONTEXTS), 2)
        return cls(
            max_num_seqs=num_rows,
            max_num_batched_tokens=min(config.max_num_batched_tokens, MOST_TOKENS[device_type]),
            max_model_len=longest,
            max_context_tokens=max(min(max_context_tokens, in_cache), min(longest, 2 * SHORTEST_CONTEXT)),
        )


def corner_batches(limits: BatchLimits, num_levels: int) -> list[MeasuredBatch]:
    """Return decodes alone and chunks alone, on grids that double or more from level to level.

    Parameters
    ----------
    num_levels : levels of batch size and of chunk length; contexts have half as many.
    """
    maker = _BatchMaker(limits, np.random.default_rng(0))
    contexts = _levels(SHORTEST_CONTEXT, limits.max_model_len, max(num_levels // 2, 2))
    batches = [
        maker.make(num_decodes=num_decodes, decode_context=context, context_spread=0.0)
        for num_decodes in _levels(1, limits.max_num_seqs, num_levels)
        for context in contexts
    ]
    batches += [
        maker.make(chunk_tokens=length, num_chunks=1, chunk_cached=cached)
        for length in _levels(2, limits.max_num_batched_tokens, num_levels)
        for cached in (0, *contexts[1:])
    ]
    return _distinct(batches)


def verify_batches(limits: BatchLimits, num_levels: int) -> list[MeasuredBatch]:
    """Return decodes alone that all verify drafts, on a grid of rows and drafts.

    Contexts go in turns, so that a row more, a draft more and a longer context each have a price of their
    own.

    Parameters
    ----------
    num_levels : as in `corner_batches`; of rows there is one less, of drafts and contexts half as many.
    """
    maker = _BatchMaker(limits, np.random.default_rng(3))
    contexts = _levels(SHORTEST_CONTEXT, limits.max_model_len, max(num_levels // 2, 2))
    rows = _levels(1, min(limits.max_num_seqs, MOST_VERIFYING), max(num_levels - 1, 2))
    drafts = _levels(1, MAX_DRAFTS, max(num_levels // 2, 2))
    batches = [
        maker.verifying(
            maker.make(num_decodes=num_rows, decode_context=contexts[(i + j) % len(contexts)]), num
        )
        for i, num_rows in enumerate(rows)
        for j, num in enumerate(drafts)
    ]
    return _distinct(batches)


def with_drafts(batch: MeasuredBatch, most: int) -> MeasuredBatch:
    """Return a batch whose decodes have the same contexts, and verify so many drafts at most."""
    return MeasuredBatch(
        tuple(
            BatchRow(row.num_cached_tokens + num_fewer, row.num_new_tokens - num_fewer, row.samples, most)
            if (num_fewer := row.num_drafts - most) > 0
            else row
            for row in batch.rows
        )
    )


def mixed_batches(limits: BatchLimits, number: int) -> list[MeasuredBatch]:
    """Return mixes of decodes and chunks that fill the space: a Sobol sequence, logarithmic in sizes.

    In every third, half of the decodes verify drafts.
    """
    qmc = require("scipy.stats.qmc", extra="plan", purpose="measuring step times")
    sequence = qmc.Sobol(d=_NUM_DIMENSIONS, rng=np.random.default_rng(1))
    points = sequence.random_base2(max(int(np.ceil(np.log2(max(number, 1)))), 1))[:number]
    return _distinct(_batches_at(points, limits, np.random.default_rng(2)))


def random_batches(limits: BatchLimits, number: int, seed: int) -> list[MeasuredBatch]:
    """Return mixes at random from the same space, to test a fit with what it has not seen."""
    rng = np.random.default_rng(seed)
    return _distinct(_batches_at(rng.random((number, _NUM_DIMENSIONS)), limits, rng))


_NUM_DIMENSIONS = 7


def _batches_at(
    points: NDArray[np.float64], limits: BatchLimits, rng: np.random.Generator
) -> Iterator[MeasuredBatch]:
    maker = _BatchMaker(limits, rng)
    longest = limits.max_model_len
    for decodes, context, spread, chunk, chunks, cached, drafts in points.tolist():
        chunk_tokens = _between(2, limits.max_num_batched_tokens, chunk)
        batch = maker.make(
            num_decodes=_between(1, limits.max_num_seqs, decodes),
            decode_context=_between(SHORTEST_CONTEXT, longest, context),
            context_spread=spread,
            chunk_tokens=chunk_tokens,
            num_chunks=1 + int(chunks * MAX_CHUNKS),
            # A third of prompts have nothing cached, as first chunks of new requests do not.
            chunk_cached=0 if cached < 1 / 3 else _between(SHORTEST_CONTEXT, longest, 1.5 * cached - 0.5),
        )
        if drafts >= 2 / 3:
            batch = maker.verifying(batch, _between(1, MAX_DRAFTS, 3 * drafts - 2), share=0.5)
        yield batch


class _BatchMaker:
    """Turns wishes into batches that keep the limits: chunks first, then the decodes that still fit."""

    def __init__(self, limits: BatchLimits, rng: np.random.Generator) -> None:
        self._limits = limits
        self._rng = rng

    def make(
        self,
        *,
        num_decodes: int = 0,
        decode_context: int = SHORTEST_CONTEXT,
        context_spread: float = 0.0,
        chunk_tokens: int = 0,
        num_chunks: int = 0,
        chunk_cached: int = 0,
    ) -> MeasuredBatch:
        """Return a batch.

        Parameters
        ----------
        num_decodes, decode_context : decode rows and the middle of their contexts, tokens.
        context_spread : contexts are log-normal with this deviation; 0 makes them equal.
        chunk_tokens, num_chunks : prompt tokens of the step, and how many prompts share them.
        chunk_cached : tokens before each chunk.
        """
        limits = self._limits
        num_chunks = min(num_chunks, limits.max_num_seqs, chunk_tokens // 2)
        chunks = self._chunks(chunk_tokens, num_chunks, chunk_cached) if num_chunks else []
        num_decodes = min(
            num_decodes,
            limits.max_num_seqs - num_chunks,
            limits.max_num_batched_tokens - sum(chunk.num_new_tokens for chunk in chunks),
        )
        left = limits.max_context_tokens - sum(row.num_cached_tokens + row.num_new_tokens for row in chunks)
        decodes = self._decodes(min(num_decodes, left // 2), decode_context, context_spread, left)
        return MeasuredBatch((*decodes, *chunks))

    def verifying(self, batch: MeasuredBatch, num_drafts: int, share: float = 1.0) -> MeasuredBatch:
        """Return a batch of the same lengths, whose decodes end with drafts as far as these fit.

        Parameters
        ----------
        num_drafts : of a row; rows too short for all have fewer.
        share : of the decodes that have any.
        """
        rows, num_left = [], self._limits.max_num_batched_tokens - batch.shape.num_new_tokens
        for row in batch.rows:
            number = min(num_drafts, row.num_cached_tokens - 1, num_left)
            if row.num_new_tokens > 1 or number < 1 or self._rng.random() >= share:
                rows.append(row)
                continue
            num_left -= number
            rows.append(BatchRow(row.num_cached_tokens - number, 1 + number, num_drafts=number))
        return MeasuredBatch(tuple(rows))

    def _chunks(self, tokens: int, number: int, cached: int) -> list[BatchRow]:
        limits = self._limits
        weights = self._rng.random(number) + 0.2
        # A chunk has two tokens at least: one makes a decode.
        lengths = (2 + (weights / weights.sum() * (tokens - 2 * number)).astype(int)).tolist()
        longest = min(limits.max_model_len, limits.max_context_tokens // (2 * number))
        rows = []
        for length in lengths:
            new = min(length, longest)
            samples = bool(self._rng.random() < 0.5)
            rows.append(BatchRow(max(min(cached, longest - new), 0), new, samples))
        return rows

    def _decodes(self, number: int, context: int, spread: float, left: int) -> list[BatchRow]:
        if number <= 0:
            return []
        contexts = context * np.exp(spread * self._rng.standard_normal(number))
        contexts = np.clip(contexts, 2, self._limits.max_model_len)
        if contexts.sum() > left:
            contexts = 2 + (contexts - 2) * ((left - 2 * number) / (contexts.sum() - 2 * number))
        return [BatchRow(int(length) - 1, 1) for length in contexts.tolist()]


def _levels(lowest: int, highest: int, number: int) -> list[int]:
    """Return up to `number` whole numbers, evenly spaced by ratio, both ends among them."""
    if highest <= lowest:
        return [highest]
    return sorted({round(value) for value in np.geomspace(lowest, highest, number).tolist()})


def _between(lowest: int, highest: int, position: float) -> int:
    """Return the whole number at a position in [0, 1] of a logarithmic scale."""
    if highest <= lowest:
        return highest
    return round(float(lowest * (highest / lowest) ** position))


def _distinct(batches: Sequence[MeasuredBatch] | Iterator[MeasuredBatch]) -> list[MeasuredBatch]:
    return [batch for batch in dict.fromkeys(batches) if batch.rows]
