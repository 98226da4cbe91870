"""The host's part of the reference backend: which rows attend together, which blocks they read, their masks.

Legend: T tokens of the step, R rows of a group, L query tokens of a row (padded), G query heads per KV head,
K KV heads, B blocks per row (padded), S tokens of a block, C = B * S keys of a row.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onbeat.engine.attention.base import AttentionBatch, IntArray

FOLDED_QUERY_LIMIT = 32
"""Rows with more new tokens than this attend alone: their own work outweighs the cost of a call."""
QUERY_BUCKETS = (1, 8, FOLDED_QUERY_LIMIT)
"""Rows are padded to the longest of their bucket, so decodes are never padded to chunks."""
BUCKETS_PER_DOUBLING = 2


def group_rows(query_lens_R: IntArray, lengths_R: IntArray, group_cost: int) -> list[IntArray]:
    """Divide the rows of up to `FOLDED_QUERY_LIMIT` new tokens into groups that are padded to their longest.

    The number of groups is bounded by the logarithm of the longest context, not by the number of rows.

    Parameters
    ----------
    query_lens_R : new tokens of each row.
    lengths_R : key blocks that each row reads.
    group_cost : how many blocks of padding cost as much time as one more group.

    Returns
    -------
    Row indices of each group.
    """
    groups: list[IntArray] = []
    shortest = 0
    for longest in QUERY_BUCKETS:
        rows = np.flatnonzero((query_lens_R > shortest) & (query_lens_R <= longest))
        shortest = longest
        if len(rows):
            groups += split_by_length(rows, lengths_R[rows], group_cost)
    return groups


def split_by_length(rows: IntArray, lengths: IntArray, group_cost: int) -> list[IntArray]:
    """Divide rows where a group's padding would cost more than another group."""
    if (lengths.max() - lengths).sum() <= group_cost:
        return [rows]
    order = np.argsort(lengths, kind="stable")
    lengths = lengths[order]
    buckets = np.ceil(np.log2(np.maximum(lengths, 1)) * BUCKETS_PER_DOUBLING).astype(np.int64)
    ends = np.append(np.flatnonzero(np.diff(buckets)) + 1, len(order))
    cuts: list[int] = []
    start, end = 0, int(ends[0])
    for next_end in ends[1:]:
        padding = (end - start) * (int(lengths[next_end - 1]) - int(lengths[end - 1]))
        if padding > group_cost:
            cuts.append(end)
            start = end
        end = int(next_end)
    # In row order within a group, so that a group of all rows is the packed batch itself.
    return [np.sort(rows[part]) for part in np.split(order, cuts)]


TILE_QUERIES = 128


@dataclass(frozen=True, slots=True)
class FoldedGroup:
    """Rows of few query tokens and similar context length."""

    num_rows: int
    pieces: Tensor
    """[R * K * B] (block, KV head) pairs: block id * K + head."""
    mask: Tensor | None
    """Added to the scores, [R, 1, L * G or 1, C]."""
    num_keys: int
    """Keys used of the C gathered ones; fewer only for a single row, which then needs no mask."""
    source_tokens: Tensor | None
    """[R * L] tokens of the step; a padded query repeats token 0. None where the group is the packed step."""
    target_tokens: Tensor | None
    """The same with padded queries at T, one line past the step's tokens."""


@dataclass(frozen=True, slots=True)
class ChunkTile:
    """Some queries of a chunk, and the range of its keys that they see."""

    start: int
    end: int
    """Tokens of the step."""
    first_key: int
    end_key: int
    mask: Tensor | None
    """Added to the scores, [queries, keys]; None where plain causal attention of as many keys is exact."""


@dataclass(frozen=True, slots=True)
class LongChunk:
    """One row of many query tokens, cut into tiles that leave out most of the keys which causality hides."""

    pieces: Tensor
    """[K * B], as in `FoldedGroup`."""
    tiles: Sequence[ChunkTile]


@dataclass(frozen=True, slots=True)
class WindowMetadata:
    """A step's groups for the layers of one window. Every row is in exactly one of them."""

    folded: Sequence[FoldedGroup]
    chunks: Sequence[LongChunk]

    @property
    def max_pieces(self) -> int:
        """Most pieces that one group reads."""
        pieces = [group.pieces for group in self.folded] + [chunk.pieces for chunk in self.chunks]
        return max(map(len, pieces))


@dataclass(frozen=True, slots=True)
class SdpaMetadata:
    """A step's groups, for each window that a layer of the model has."""

    blocks_T: Tensor
    offsets_T: Tensor
    """Where each token's KV goes: block, and place in it."""
    windows: dict[int | None, WindowMetadata]
    workspace: tuple[Tensor, Tensor]
    """Where gathered keys and values go, [most pieces of a group, S, H] each. All layers and groups use the
    same memory, which thus stays in the processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SdpaSizes:
    """Sizes of the cache and the model."""

    block_size: int
    num_kv_heads: int
    num_query_groups: int
    """Query heads per KV head."""
    group_cost_blocks: int
    """Blocks of padding that take as much time as one more group."""
    mask_dtype: torch.dtype
    device: torch.device


class WindowGrouping:
    """Groups the rows of one step for the layers of one window.

    Parameters
    ----------
    sizes : sizes, type and device.
    batch : the step's rows.
    window : a token sees itself and the `window` - 1 tokens before it; None for all.
    """

    def __init__(self, sizes: SdpaSizes, batch: AttentionBatch, window: int | None) -> None:
        self.sizes = sizes
        self.batch = batch
        self.window = window
        self.starts_R = np.cumsum(batch.query_lens_R) - batch.query_lens_R
        self.first_blocks_R = self._first_blocks()
        self.end_blocks_R = -(-batch.context_lens_R // sizes.block_size)

    def metadata(self) -> WindowMetadata:
        query_lens_R = self.batch.query_lens_R
        groups = group_rows(
            query_lens_R, self.end_blocks_R - self.first_blocks_R, self.sizes.group_cost_blocks
        )
        long_rows = np.flatnonzero(query_lens_R > FOLDED_QUERY_LIMIT)
        return WindowMetadata(
            [self._fold(rows) for rows in groups], [self._chunk(int(row)) for row in long_rows]
        )

    def _first_blocks(self) -> IntArray:
        """Return the first block that each row's first new token sees; a layer reads no block before it."""
        if self.window is None:
            return np.zeros_like(self.batch.context_lens_R)
        first_keys_R = self.batch.context_lens_R - self.batch.query_lens_R + 1 - self.window
        first_blocks_R: IntArray = np.maximum(first_keys_R, 0) // self.sizes.block_size
        return first_blocks_R

    def _fold(self, rows: IntArray) -> FoldedGroup:
        batch, block_size = self.batch, self.sizes.block_size
        query_lens_R1, contexts_R1 = batch.query_lens_R[rows, None], batch.context_lens_R[rows, None]
        first_blocks_R1 = self.first_blocks_R[rows, None]
        num_queries, num_tokens = int(query_lens_R1.max()), len(batch.slot_mapping_T)
        num_blocks = int((self.end_blocks_R[rows] - self.first_blocks_R[rows]).max())
        # A column past the end of a table (of a row shorter than the group's longest) is read and masked.
        columns_RB = np.minimum(first_blocks_R1 + np.arange(num_blocks), batch.block_tables_SB.shape[1] - 1)
        block_ids_RB = batch.block_tables_SB[batch.slots_R[rows, None], columns_RB].astype(np.int64)

        offsets_L = np.arange(num_queries)
        is_padding_RL = offsets_L >= query_lens_R1
        tokens_RL = self.starts_R[rows, None] + offsets_L
        source_tokens = target_tokens = None
        if is_padding_RL.any() or tokens_RL.size != num_tokens:
            source_tokens = self._to_device(np.where(is_padding_RL, 0, tokens_RL).reshape(-1))
            target_tokens = self._to_device(np.where(is_padding_RL, num_tokens, tokens_RL).reshape(-1))
        is_exact = len(rows) == 1 and num_queries == 1 and self.window is None
        mask = None
        if not is_exact:
            # A padded query repeats the last position: one that sees no key at all would be NaN.
            positions_RL = np.minimum(contexts_R1 - query_lens_R1 + offsets_L, contexts_R1 - 1)
            mask = self._mask(positions_RL - first_blocks_R1 * block_size, num_blocks * block_size)
            if num_queries > 1:
                mask = mask.repeat_interleave(self.sizes.num_query_groups, dim=1)
            mask = mask[:, None]
        return FoldedGroup(
            num_rows=len(rows),
            pieces=self._pieces(block_ids_RB),
            mask=mask,
            num_keys=int(contexts_R1[0, 0]) if is_exact else num_blocks * block_size,
            source_tokens=source_tokens,
            target_tokens=target_tokens,
        )

    def _chunk(self, row: int) -> LongChunk:
        batch = self.batch
        first_block = int(self.first_blocks_R[row])
        block_ids = batch.block_tables_SB[batch.slots_R[row], first_block : int(self.end_blocks_R[row])]
        num_queries = int(batch.query_lens_R[row])
        first_position = int(batch.context_lens_R[row]) - num_queries - first_block * self.sizes.block_size
        start = int(self.starts_R[row])
        tiles = [
            self._tile(start + offset, first_position + offset, min(TILE_QUERIES, num_queries - offset))
            for offset in range(0, num_queries, TILE_QUERIES)
        ]
        return LongChunk(self._pieces(block_ids.astype(np.int64)[None]), tiles)

    def _tile(self, start: int, position: int, num_queries: int) -> ChunkTile:
        """Group queries at `position` and after, counted from the first key that the chunk reads."""
        first_key = 0 if self.window is None else max(position + 1 - self.window, 0)
        end_key = position + num_queries
        mask = None
        if position > first_key or (self.window is not None and self.window < num_queries):
            positions_L = np.arange(position, end_key) - first_key
            mask = self._mask(positions_L[None], end_key - first_key)[0]
        return ChunkTile(start, start + num_queries, first_key, end_key, mask)

    def _pieces(self, block_ids_RB: IntArray) -> Tensor:
        """Return which pieces of the cache hold the blocks, head after head of each row."""
        num_kv_heads = self.sizes.num_kv_heads
        pieces_RKB = block_ids_RB[:, None] * num_kv_heads + np.arange(num_kv_heads)[:, None]
        return self._to_device(pieces_RKB.reshape(-1))

    def _mask(self, positions_RL: IntArray, num_keys: int) -> Tensor:
        """Return what is added to scores: 0 for the keys that a query at a position sees, -inf for others.

        Every line of a mask is a piece of one vector (hidden, seen, hidden): making a mask is copying.
        """
        longest = max(int(positions_RL.max()) + 1, num_keys)
        num_seen = longest + 1 if self.window is None else min(self.window, longest + 1)
        steps = torch.full(
            (2 * longest + 1,), -torch.inf, dtype=self.sizes.mask_dtype, device=self.sizes.device
        )
        steps[longest + 1 - num_seen : longest + 1] = 0.0
        starts = self._to_device((longest - positions_RL).reshape(-1))
        return steps.unfold(0, num_keys, 1).index_select(0, starts).view(*positions_RL.shape, num_keys)

    def _to_device(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self.sizes.device)
